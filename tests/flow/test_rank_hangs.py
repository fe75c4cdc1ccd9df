"""Ranks of a wrapped command that report nothing: their progress is learnt from rank 0's log, and the one that the others wait for is named."""

import socket
import sys
from pathlib import Path

import pytest

from agents.stacks import find_spy
from aimaster.wire.messages import Found, HangSuspected
from aimaster.wire.topology import MemberSpec
from tests.flow.agent_master import Master, Run, until

JOB = str(Path(__file__).parent.parent / "fakes" / "ring_job.py")
pytestmark = pytest.mark.skipif(
    find_spy() is None, reason="py-spy is not installed: a program's stacks cannot be read from outside"
)


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run", kind="command")
    yield run
    run.close()


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


async def start(master, mode, *, floor=0.6, ranks=4, nodes=("node-0",), **env):
    port = free_port()
    for rank in range(ranks):
        spec = MemberSpec(
            member=f"rank-{rank}", role="command", rank=rank, argv=(sys.executable, JOB, mode, str(port)),
            env={"RANK": str(rank), "WORLD_SIZE": str(ranks), "PYTHONUNBUFFERED": "1", **env},
            lease_floor_seconds=floor, reports_progress=False,
        )  # fmt: skip
        await master.start(nodes[rank % len(nodes)], spec)


def condemned(master):
    return [one for one in master.events(HangSuspected) if "apart-from-group-twice" in one.evidence]


@pytest.mark.parametrize(
    ("mode", "where", "idle"), [("sleep", "sleep_long", True), ("spin", "spin", False), ("file", "read_file", True)]
)
async def test_the_guilty_rank_is_named(run, mode, where, idle):
    """Asleep, spinning or blocked on a file before a collective: its member is suspected with evidence, the three others are not."""
    run.agent()
    async with Master(run) as master:
        await start(master, mode)
        (suspected,) = await until(lambda: condemned(master)[:1], 40)
        assert (suspected.member, suspected.rank) == ("rank-2", 2)
        assert ("no-cpu" in suspected.evidence) == idle
        assert suspected.progress.lease_seconds is not None
        words = "\n".join(suspected.stacks)
        assert "ranks 0,1,3 are waiting in exchange" in words
        assert where in words
        finding = (await until(lambda: [e.finding for e in master.events(Found) if e.finding.sign == "ranks.apart"]))[0]
        assert (finding.category, finding.role, finding.subject.rank) == ("hang.straggler", "accusation", 2)
        assert {one.member for one in condemned(master)} == {"rank-2"}


@pytest.mark.parametrize("at", ["0", "3"])
async def test_an_early_hang_is_named_as_well(run, at):
    """Before the first step, or before any pace is known: where the ranks stand tells who is waited for."""
    run.agent()
    async with Master(run) as master:
        await start(master, "sleep", RING_AT=at)
        (suspected,) = await until(lambda: condemned(master)[:1], 40)
        assert (suspected.member, suspected.rank) == ("rank-2", 2)
        assert suspected.progress.lease_seconds is None


async def test_ranks_alone_on_their_nodes_say_where_they_stand(tmp_path):
    """One rank a node has nobody to be compared with: each agent tells whether it waits or stands elsewhere, for the master to compare."""
    nodes = ("node-0", "node-1", "node-2")
    run = Run(tmp_path / "run", nodes=nodes, kind="command")
    try:
        for node in nodes:
            run.agent(node)
        async with Master(run) as master:
            await start(master, "sleep", ranks=3, nodes=nodes, RING_AT="5")

            def words():
                told = {
                    one.member: one
                    for one in master.events(HangSuspected)
                    if {"waits-twice", "elsewhere-twice"} & {*one.evidence}
                }
                return told if len(told) == 3 else None

            told = await until(words, 40)
            assert {name: one.evidence[0] for name, one in told.items()} == {
                "rank-0": "waits-twice", "rank-1": "waits-twice", "rank-2": "elsewhere-twice",
            }  # fmt: skip
            assert told["rank-2"].rank == 2
            assert all(one.seen_seconds > 0 for one in told.values())
    finally:
        run.close()


LAUNCHER = """
import os, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[1:]], env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "4"}) for rank in range(4)
]
for one in ranks:
    one.wait()
"""


async def test_ranks_that_report_themselves_are_judged_together(run):
    """Every rank's own lease is broken and every one stands still: only the one that is elsewhere is condemned, by dumps from inside."""
    run.agent()
    async with Master(run) as master:
        await start(master, "sleep", RING_REPORT="1")
        (suspected,) = await until(lambda: condemned(master)[:1], 40)
        assert suspected.member == "rank-2"
        assert any("Current thread" in line or "Thread 0x" in line for line in suspected.stacks)
        others = [one for one in master.events(HangSuspected) if one.member != "rank-2"]
        assert all("same-frame-twice" not in one.evidence for one in others)
        assert (run.member("rank-2") / "stacks.txt").stat().st_size > 0


async def test_ranks_below_a_launcher_are_found(run):
    """One member that starts all ranks itself, as torchrun does: the finding names rank and process among its children."""
    run.agent()
    async with Master(run) as master:
        spec = MemberSpec(
            member="command-0", role="command", argv=(sys.executable, "-c", LAUNCHER, JOB, "sleep", str(free_port())),
            lease_floor_seconds=0.6, reports_progress=False,
        )  # fmt: skip
        started = await master.start("node-0", spec)
        finding = (
            await until(lambda: [e.finding for e in master.events(Found) if e.finding.sign == "ranks.apart"], 40)
        )[0]
        assert finding.subject.rank == 2
        assert finding.subject.pid != started.process.pid
        (suspected,) = await until(lambda: condemned(master)[:1])
        assert (suspected.member, suspected.rank, suspected.pid) == ("command-0", 2, finding.subject.pid)


async def test_a_lone_program_is_not_judged_by_its_log_alone(run):
    """Steps in its log, then long silence in one place: stacks are taken and reported, and nothing speaks for killing it."""
    run.agent()
    async with Master(run) as master:
        await start(master, "evaluate", floor=0.4, ranks=1, RING_PAUSE="3")
        suspected = await until(lambda: master.events(HangSuspected), 40)
        log = run.member("rank-0") / "output.log"
        await until(lambda: "step 45 " in log.read_text(), 60)
        assert suspected[0].progress.step >= 38
        assert all("same-frame-twice" not in one.evidence for one in master.events(HangSuspected))


@pytest.mark.parametrize("mode", ["evaluate", "announced", "uneven", "save"])
async def test_a_first_long_phase_condemns_nobody(run, mode):
    """A first evaluation or save many leases long, on all ranks or on one that works while the others wait: no evidence, and the job goes on."""
    run.agent()
    async with Master(run) as master:
        await start(master, mode, floor=0.4, RING_PAUSE="3")
        log = run.member("rank-0") / "output.log"
        await until(lambda: log.exists() and "step 45 " in log.read_text(), 60)
        assert condemned(master) == []
        assert not [one for one in master.events(Found) if one.finding.sign == "ranks.apart"]
        if mode == "announced":
            # Where the ranks stand is told, for the master knows the other nodes; that a lease is broken is not.
            assert all("elsewhere-twice" in one.evidence for one in master.events(HangSuspected))
