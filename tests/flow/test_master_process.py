"""A real master process, fake agents on the real line, a run folder on disk."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from aimaster.journal import Journal, read_frames
from aimaster.master.mind import decode_record, replay
from aimaster.wire import codec
from aimaster.wire.actions import SetPeers, StopNode
from aimaster.wire.messages import ControllerPulse
from aimaster.wire.places import RunPlaces
from aimaster.wire.topology import EpochProposal, JobPlan
from tests.fakes.agent import FakeAgent
from tests.fakes.master import RL, SECRET, WAIT_SECONDS, Run, plan_of, until


@pytest.fixture
async def make_run(tmp_path):
    runs = []

    def make(plan: JobPlan) -> Run:
        runs.append(Run(tmp_path / f"run-{len(runs)}", plan))
        return runs[-1]

    yield make
    for run in runs:
        await run.close()


async def test_a_job_starts_and_a_dead_member_is_started_again(make_run):
    """Agents connect, members are started once each; a killed one is started as its next incarnation, and the incident tells all moments."""
    run = make_run(plan_of(RL))
    await run.start_master()
    run.start_agents()
    await run.running()
    assert run.agents["node-0"].started() == [("controller-0", 0), ("policy-0", 0)]
    assert run.agents["node-1"].started() == [("policy-1", 0), ("rollout-0", 0)]
    peers = [
        order.action.peers
        for agent in run.agents.values()
        for order in agent.orders
        if isinstance(order.action, SetPeers)
    ]
    assert set(peers[-1]) == {"node-0", "node-1"}
    await run.ask("POST", "/v1/drill", json={"member": "rollout-0", "note": "drill kill:rollout-0@1"})
    run.agents["node-1"].die("rollout-0")
    await until(lambda: ("rollout-0", 1) in run.agents["node-1"].started(), "the restart")

    async def healed() -> bool:
        return any(incident.healed_at for incident in (await run.status()).incidents)

    await until(healed, "the incident heals")
    (incident,) = (await run.status()).incidents
    assert (incident.subject, incident.verdict.category, incident.action, incident.drill) == (
        "rollout-0",
        "process.killed",
        "restart_process",
        True,
    )
    assert incident.occurred_at <= incident.detected_at <= incident.decided_at
    assert incident.resumed_at is not None


async def test_a_killed_master_adopts_the_living(make_run):
    """kill -9 of the master: the next one replays its journal, takes a higher term, adopts every member and starts none."""
    run = make_run(plan_of(RL))
    await run.start_master()
    run.start_agents()
    await run.running()
    before = {agent.node: agent.started() for agent in run.agents.values()}
    term = (await run.status()).term
    run.kill_master()
    await run.start_master()
    await run.running()
    status = await run.status()
    assert status.term == term + 1
    assert {agent.node: agent.started() for agent in run.agents.values()} == before
    assert all(member.state == "running" and member.incarnation == 0 for member in status.members)
    assert [incident.subject for incident in status.incidents] == ["master"]
    assert status.incidents[0].occurred_at <= status.incidents[0].detected_at


async def test_a_deleted_announcement_is_written_again(make_run):
    """Whoever deletes RUN/master.json does not hide a living master: the same address stands there again."""
    run = make_run(plan_of(RL))
    await run.start_master()
    file = RunPlaces(run.folder).master
    before = file.read_bytes()
    file.unlink()
    await until(file.exists, "the announcement")
    assert file.read_bytes() == before


async def test_a_death_while_the_master_is_dead_is_one_incident(make_run):
    """A member that dies while no master lives is reported to the next one, and started again once."""
    run = make_run(plan_of(RL))
    await run.start_master()
    run.start_agents()
    await run.running()
    run.kill_master()
    run.agents["node-1"].die("rollout-0")
    await run.start_master()
    await until(lambda: ("rollout-0", 1) in run.agents["node-1"].started(), "the restart")
    await run.running()
    subjects = [incident.subject for incident in (await run.status()).incidents]
    assert sorted(subjects) == ["master", "rollout-0"]
    assert run.agents["node-1"].started().count(("rollout-0", 1)) == 1


async def test_everything_believed_replays_to_the_same_state(make_run):
    """The journal alone gives the state that the master had, member for member and incident for incident."""
    run = make_run(plan_of(RL))
    await run.start_master()
    run.start_agents()
    await run.running()
    run.agents["node-0"].die("policy-0", exit_code=137, signal=None)
    await until(lambda: ("policy-0", 1) in run.agents["node-0"].started(), "the restart")
    await run.running()
    status = await run.status()
    run.kill_master()
    state = replay(frame.payload for frame in read_frames(run.folder / "journal"))
    assert {m.member: (m.state, m.incarnation) for m in state.members.values()} == {
        m.member: (m.state, m.incarnation) for m in status.members
    }
    assert list(state.incidents) == [incident.incident for incident in status.incidents]


async def test_the_finished_job_ends_nodes_and_then_the_master(make_run):
    """When the controller says finished, members leave, nodes are stopped with their memory removed, and the master ends with 0."""
    run = make_run(plan_of(RL))
    await run.start_master()
    run.start_agents()
    await run.running()
    pulse = ControllerPulse(
        url="http://127.0.0.1:1",
        incarnation=0,
        epoch=1,
        lineage=0,
        step=7,
        steps=7,
        seen={},
        at=time.time(),
        finished=True,
    )
    reply = await run.ask("POST", "/v1/controller", role="member", data=codec.encode(pulse))
    assert reply.status == 200
    assert codec.decode(await reply.read(), dict) == {"term": 1, "stop": False}
    for agent in run.agents.values():
        for member in list(agent.members):
            agent.die(member, exit_code=0, signal=None, expected=True)
    await until(lambda: run.in_state("finished"), "the job is finished")
    orders = [
        order.action for agent in run.agents.values() for order in agent.orders if isinstance(order.action, StopNode)
    ]
    assert len(orders) == 2
    assert all(order.remove_memory for order in orders)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(WAIT_SECONDS) == 0


async def test_a_stop_is_journaled_and_ends_the_nodes(make_run):
    """`POST /v1/stop` stops all nodes; the run ends unfinished, and a new front resumes it with the next incarnations."""
    run = make_run(plan_of(RL))
    (run.folder / "run.json").write_text('{"starts": 1}')
    await run.start_master()
    run.start_agents()
    await run.running()
    assert (await run.ask("POST", "/v1/stop", json={"reason": "enough"})).status == 200
    await until(lambda: all(agent.stopped.is_set() for agent in run.agents.values()), "the agents stop")
    status = await run.status()
    assert status.state == "stopping"
    assert "enough" in status.reason
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(WAIT_SECONDS) == 0
    (run.folder / "run.json").write_text('{"starts": 2}')
    run.agents = {
        node: FakeAgent(run.folder, "0badcafe", node, token=f"{SECRET}member", pid=2000) for node in run.plan.nodes
    }
    await run.start_master()
    run.start_agents()
    await run.running()
    assert run.agents["node-1"].started() == [("policy-1", 1), ("rollout-0", 1)]
    assert not [incident for incident in (await run.status()).incidents if incident.healed_at is None]


@pytest.fixture
def front() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the front and does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


async def test_the_end_of_the_front_ends_the_job(make_run, front):
    """When the front process is gone, nodes are stopped, their memory is kept, and the master ends by itself."""
    run = make_run(plan_of(RL, front_pid=front.pid))
    await run.start_master("--front-pid", str(front.pid))
    run.start_agents()
    await run.running()
    front.kill()
    await until(lambda: run.process.poll() is not None, "the master ends")
    assert run.process.returncode == 0
    orders = [
        order.action for agent in run.agents.values() for order in agent.orders if isinstance(order.action, StopNode)
    ]
    assert orders
    assert not any(order.remove_memory for order in orders)


async def test_a_front_that_is_gone_before_the_master_began_leaves_a_run_that_can_be_resumed(make_run, front):
    """The start of a master is the first thing that is believed; the run stops, and the same folder comes to life under a new front."""
    front.kill()
    front.wait()
    run = make_run(plan_of(RL))
    await run.start_master("--front-pid", str(front.pid))
    run.start_agents()
    await until(lambda: run.process.poll() is not None, "the master ends")
    assert run.process.returncode == 0
    first = next(iter(read_frames(run.folder / "journal")))
    assert type(decode_record(first.payload).events[0]).__name__ == "MasterStarted"
    run.agents = {
        node: FakeAgent(run.folder, run.plan.run_id, node, token=f"{SECRET}member", pid=2000) for node in run.plan.nodes
    }  # the new front's: those before were told to stop
    await run.start_master()
    run.start_agents()
    await run.running()


async def test_a_run_whose_journal_was_removed_comes_to_life_again(make_run):
    """kill -9 of the master, its journal gone: the next one learns the terms from the agents, adopts the living, and its orders are obeyed."""
    run = make_run(plan_of(RL))
    for _ in range(2):
        await run.start_master()
        if not run.agents["node-0"].orders:
            run.start_agents()
        await run.running()
        run.kill_master()
    shutil.rmtree(run.folder / "journal")
    await run.start_master()
    await run.running()
    assert (await run.status()).term == 3
    run.agents["node-1"].die("rollout-0")
    await until(lambda: ("rollout-0", 1) in run.agents["node-1"].started(), "the restart")
    await run.running()


async def test_who_may_ask_what(make_run):
    """Health and metrics are open on loopback; status needs a token, stop needs the operate role, a body that is no record is explained."""
    run = make_run(plan_of(RL))
    await run.start_master()
    run.start_agents()
    await run.running()
    for path in ("/healthz", "/readyz", "/metrics"):
        assert (await run.ask("GET", path, role="")).status == 200
    assert (
        'aimaster_members{role="policy",state="running"} 2.0'
        in await (await run.ask("GET", "/metrics", role="")).text()
    )
    assert (await run.ask("GET", "/v1/status", role="")).status == 401
    assert (await run.ask("GET", "/v1/status", role="read")).status == 200
    refused = await run.ask("POST", "/v1/stop", role="read", json={"reason": "x"})
    assert refused.status == 403
    assert "operate" in (await refused.json())["hint"]
    assert (await run.ask("POST", "/v1/stop", json={"raeson": "x"})).status == 400
    assert (await run.ask("GET", "/v1/agents/node-7", role="member")).status == 404
    lines = (await (await run.ask("GET", "/v1/journal?from=1", role="read")).text()).splitlines()
    assert json.loads(lines[0])["record"]["events"][0]["type"] == "master_started"


async def test_one_master_for_a_run(make_run):
    """A second master of the same run ends at once and names the first one's pid."""
    run = make_run(plan_of(RL))
    await run.start_master()
    second = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "aimaster.master.serve", "--run-dir", str(run.folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.returncode == 2
    assert f"process {run.process.pid}" in second.stderr


async def test_a_run_folder_without_a_plan_and_a_port_in_use(make_run, tmp_path):
    """Both are one sentence and exit code 2."""
    argv = [sys.executable, "-m", "aimaster.master.serve", "--run-dir", str(tmp_path / "nothing")]
    bare = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False)
    assert (bare.returncode, "plan.json is not there" in bare.stderr) == (2, True)
    run = make_run(plan_of(RL))
    await run.start_master()
    port = json.loads((run.folder / "master.json").read_bytes())["url"].rpartition(":")[2]
    other = make_run(plan_of(RL))
    argv = [sys.executable, "-m", "aimaster.master.serve", "--run-dir", str(other.folder), "--port", port]
    taken = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, check=False)
    assert (taken.returncode, f"127.0.0.1:{port}" in taken.stderr) == (2, True)


@pytest.fixture
def small_journal_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB where the first run's journal will be."""
    disk = tmp_path / "run-0" / "journal"
    disk.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine does not let the test mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


async def test_a_full_run_disk_is_a_finding_and_nothing_is_acknowledged(small_journal_disk, make_run):
    """While the journal cannot grow, a report is not acknowledged and the status says why; with space again it is, and the member restarts."""
    run = make_run(plan_of(RL))
    await run.start_master()
    run.start_agents()
    await run.running()
    with contextlib.suppress(OSError), (small_journal_disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(512))
    agent = run.agents["node-1"]
    # What fits into the journal's last page is still kept: mark drills of nobody until no more is.
    while (await run.ask("POST", "/v1/drill", json={"member": "x" * 4000, "note": ""})).status == 200:
        pass
    acknowledged = agent.acknowledged
    agent.die("rollout-0")

    async def says_so() -> bool:
        return any("storage.full" in finding for finding in (await run.status()).findings)

    await until(says_so, "the finding")
    assert (await run.ask("GET", "/readyz", role="")).status == 503
    assert agent.acknowledged == acknowledged
    assert ("rollout-0", 1) not in agent.started()
    (small_journal_disk / "ballast").unlink()
    await until(lambda: ("rollout-0", 1) in agent.started(), "the restart")
    await run.running()
    assert agent.acknowledged > acknowledged


async def test_a_full_run_disk_does_not_keep_a_job_from_ending(small_journal_disk, make_run):
    """A stop is heeded although it cannot be journaled, and once there is space a snapshot tells the whole story."""
    run = make_run(plan_of(RL))
    await run.start_master()
    run.start_agents()
    await run.running()
    with contextlib.suppress(OSError), (small_journal_disk / "ballast").open("wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(512))
    while (await run.ask("POST", "/v1/drill", json={"member": "x" * 4000, "note": ""})).status == 200:
        pass
    assert (await run.ask("POST", "/v1/stop", json={"reason": "enough"})).status == 200
    orders = [agent.orders for agent in run.agents.values()]
    await until(
        lambda: all(any(isinstance(o.action, StopNode) for o in given) for given in orders), "the nodes are stopped"
    )


async def test_epochs_are_proposed_until_the_controller_takes_one(make_run):
    """A refused proposal is made again on the epoch that the controller tells of next; the member's token goes with it."""
    run = make_run(plan_of(RL))
    asked: list[tuple[EpochProposal, str]] = []

    async def epoch(request: web.Request) -> web.Response:
        proposal = codec.decode(await request.read(), EpochProposal)
        asked.append((proposal, request.headers["Authorization"]))
        return web.Response(status=200 if proposal.replaces == 5 else 409)

    app = web.Application()
    app.router.add_post("/v1/epoch", epoch)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = "http://{}:{}".format(*runner.addresses[0])
        (run.folder / "controller.json").write_text(json.dumps({"url": url, "pid": 1, "incarnation": 0}))
        await run.start_master()
        run.start_agents()
        await run.running()

        async def pulse(number: int) -> None:
            now = time.time()
            record = ControllerPulse(
                url=url,
                incarnation=0,
                epoch=number,
                lineage=0,
                step=1,
                steps=9,
                seen={},
                at=now,
                in_epoch=("policy-0", "policy-1"),
            )
            assert (await run.ask("POST", "/v1/controller", role="member", data=codec.encode(record))).status == 200

        await pulse(4)
        run.agents["node-1"].die("policy-1")
        await until(lambda: asked, "a proposal")
        await pulse(5)
        await until(lambda: asked[-1][0].replaces == 5, "a proposal on the newer epoch")
        proposal, authorization = asked[-1]
        assert (proposal.leave, proposal.term, proposal.cause) == (("policy-1",), 1, "incident i-1")
        assert authorization == f"Bearer {SECRET}member"
    finally:
        await runner.cleanup()


async def test_the_journal_is_readable_after_the_end(make_run):
    """After the master has ended, whoever takes the journal finds the final state in it."""
    run = make_run(
        plan_of({"command-0": ("command", "node-0")}, kind="command", nodes=("node-0",), restart_scope="job")
    )
    await run.start_master()
    run.start_agents()
    await run.running()
    run.agents["node-0"].die("command-0", exit_code=0, signal=None, expected=True)
    await until(lambda: run.in_state("finished"), "the job is finished")
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(WAIT_SECONDS) == 0
    with Journal.open(run.folder / "journal") as journal:
        assert replay(journal.replay()).phase == "finished"
    assert os.stat(run.folder / "master.json").st_mode & 0o077 == 0
