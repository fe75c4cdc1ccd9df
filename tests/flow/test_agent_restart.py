import asyncio
import json
import os
import random
import shutil
import signal
import subprocess

import pytest

from aimaster.wire.actions import Order, StartMember, StopNode
from aimaster.wire.ids import Term
from aimaster.wire.messages import MemberExited, MemberStarted, OrderDone
from tests.flow.agent_master import BEATING, Master, Run, member, until


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    yield run
    run.close()


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait(timeout=10)


async def test_a_restarted_agent_adopts_the_living_and_reports_the_dead(run):
    """SIGKILL of the agent: members train on; the next agent adopts them with the same pids, and reports who died meanwhile and how."""
    first = run.agent()
    async with Master(run) as master:
        living = await master.start("node-0", member("policy-0", BEATING))
        dying = await master.start("node-0", member("rollout-0", BEATING, role="rollout"))
        code = "import time; time.sleep(0.5); raise SystemExit(7)"
        leaving = await master.start("node-0", member("rollout-1", code, role="rollout"))
        await until(
            lambda: len(master.pulses["node-0"].members) == 3 and master.pulses["node-0"].members[0].progress.beats > 3
        )
        kill(first)
        os.kill(dying.process.pid, signal.SIGKILL)
        await until(lambda: not alive(dying.process.pid) and not alive(leaving.process.pid))
        beats = master.pulses["node-0"].members[0].progress.beats
        assert alive(living.process.pid)
        outbox = master.hellos[-1].outbox_id

        run.agent()
        await until(lambda: len(master.hellos) == 2)
        assert master.hellos[-1].outbox_id == outbox
        adopted = await master.event(MemberStarted, member="policy-0", adopted=True)
        assert adopted.process == living.process
        assert (await master.ended("rollout-0")).signal == 9
        assert (await master.ended("rollout-1")).exit_code == 7
        await until(lambda: any(p.progress.beats > beats for p in master.pulses["node-0"].members))
        await until(lambda: {death.member for death in master.deaths} >= {"rollout-0", "rollout-1"})
        os.kill(living.process.pid, signal.SIGKILL)
        assert (await master.ended("policy-0")).signal == 9


async def test_a_death_is_reported_once_over_agents(run):
    """A death that was reported is not reported again by the next agent."""
    first = run.agent()
    async with Master(run) as master:
        started = await master.start("node-0", member("policy-0", BEATING))
        os.kill(started.process.pid, signal.SIGKILL)
        await master.ended("policy-0")
        spec = run.member("policy-0") / "spec.json"
        await until(lambda: json.loads(spec.read_text())["reported"])
        kill(first)
        run.agent()
        await until(lambda: len(master.hellos) == 2)
        await master.start("node-0", member("policy-0", BEATING), 1)
        assert len([event for event in master.events(MemberExited) if event.incarnation == 0]) == 1


async def test_sigterm_ends_the_agent_alone(run):
    """SIGTERM: the agent ends with code 0 and its members live on."""
    agent = run.agent()
    async with Master(run) as master:
        started = await master.start("node-0", member("policy-0", BEATING))
        agent.terminate()
        assert await asyncio.to_thread(agent.wait, 20) == 0
        assert alive(started.process.pid)


async def test_reports_wait_for_a_master_and_are_sent_once(run):
    """While the master is away deaths wait in the outbox, over a restart of the agent too; the next master gets all, in order, once."""
    first = run.agent()
    async with Master(run) as master:
        started = [await master.start("node-0", member(f"rollout-{n}", BEATING, role="rollout")) for n in range(3)]
        before = len(next(iter(run.journals.values())))
    for one in started:
        os.kill(one.process.pid, signal.SIGKILL)
    await until(
        lambda: all(json.loads((run.member(one.member) / "spec.json").read_text())["reported"] for one in started)
    )
    kill(first)
    run.agent()
    async with Master(run, term=2) as master:
        for one in started:
            assert (await master.ended(one.member)).signal == 9
        assert (master.hellos[0].term_seen, master.hellos[0].starts) == (1, 2)
        assert master.hellos[0].started == {one.member: 0 for one in started}
        journal = next(iter(run.journals.values()))
        assert [report.sequence for report in journal] == list(range(1, len(journal) + 1))
        assert len([r for r in journal[before:] if isinstance(r.event, MemberExited)]) == 3


async def test_unacknowledged_reports_are_resent(run):
    """A master that dies before it acknowledges gets the same reports again after its restart, with the same numbers."""
    run.agent()
    async with Master(run) as master:
        await master.connected("node-0")
        master.acknowledging = False
        spec = member("policy-0", BEATING)
        await master.send(
            "node-0", Order(order_id="1.1", term=Term(1), cause="test", action=StartMember(spec=spec, incarnation=0))
        )
        await until((run.member("policy-0") / "pid.json").exists)
    assert not any(run.journals.values())
    async with Master(run, term=2) as master:
        await master.event(MemberStarted, member="policy-0")
        await master.event(OrderDone, order_id="1.1")


async def test_an_order_is_carried_out_once(run):
    """The same order again, over a restart of the agent too, is answered from memory; one of an older term is refused."""
    first = run.agent()
    spec = member("policy-0", "import time; time.sleep(600)")
    order = Order(order_id="2.1", term=Term(2), cause="test", action=StartMember(spec=spec, incarnation=0))
    async with Master(run, term=2) as master:
        await master.send("node-0", order)
        started = await master.event(MemberStarted, member="policy-0")
        await until(lambda: len(master.events(OrderDone)) == 1)
        os.kill(started.process.pid, signal.SIGKILL)
        await master.ended("policy-0")
        await master.send("node-0", order)
        await until(lambda: len(master.events(OrderDone)) == 2)
        kill(first)
        run.agent()
        await until(lambda: len(master.hellos) == 2)
        await master.send("node-0", order)
        await until(lambda: len(master.events(OrderDone)) == 3)
        assert [done.ok for done in master.events(OrderDone)] == [True] * 3
        late = Order(order_id="1.9", term=Term(1), cause="test", action=StartMember(spec=spec, incarnation=5))
        await master.send("node-0", late)
        refused = await master.event(OrderDone, order_id="1.9")
        assert not refused.ok
        assert "term 1 is past" in refused.detail
        assert len(master.events(MemberStarted)) == 1


async def test_an_agent_without_its_folders_is_a_new_node(run):
    """The node's folders are lost with agent, shims and members: the next agent of the name is empty, under a new outbox."""
    first = run.agent()
    async with Master(run) as master:
        await master.start("node-0", member("policy-0", BEATING))
        os.kill(first.pid, signal.SIGSTOP)
        for pid in run.pids() - {first.pid}:
            os.kill(pid, signal.SIGKILL)
        kill(first)
        shutil.rmtree(run.places.node("node-0"))
        shutil.rmtree(run.memory())
        run.agent()
        await until(lambda: len(master.hellos) == 2)
        assert master.hellos[0].outbox_id != master.hellos[1].outbox_id
        assert master.hellos[1].members == ()
        done = await master.order("node-0", StartMember(spec=member("policy-0", BEATING), incarnation=1))
        assert done.ok


async def test_the_node_is_stopped_by_order(run):
    """StopNode: members stop within their grace, the outcome reaches the master, the agent ends with 0, memory goes where ordered."""
    agent = run.agent()
    async with Master(run) as master:
        await master.start("node-0", member("policy-0", BEATING))
        assert run.memory().stat().st_mode & 0o777 == 0o700
        done = await master.order("node-0", StopNode(grace_seconds=5.0, remove_memory=True))
        assert done.ok
        assert (await master.ended("policy-0")).expected
        assert await asyncio.to_thread(agent.wait, 20) == 0
        assert not run.memory().exists()
        assert run.pids() == set()


async def test_members_stop_when_the_front_is_gone(run):
    """SIGKILL of the front process: the agent stops its members and ends; no process of the run is left."""
    front = run.front()
    agent = run.agent(front=front.pid)
    async with Master(run) as master:
        started = await master.start("node-0", member("policy-0", BEATING))
        kill(front)
        assert await asyncio.to_thread(agent.wait, 20) == 0
        assert not alive(started.process.pid)
        await until(lambda: run.pids() == set())


async def test_no_orphan_when_front_and_agent_are_gone(run):
    """Front and agent both killed: once the shim's patience ends, so does the member's whole tree, with an exit.json that says so."""
    front = run.front()
    agent = run.agent(front=front.pid, AIMASTER_ORPHAN_SECONDS="2")
    async with Master(run) as master:
        code = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); {'time.sleep(600)'}"
        await master.start("node-0", member("command-0", code, role="command"))
        await until(lambda: len(run.pids()) >= 4)
        os.kill(agent.pid, signal.SIGSTOP)  # first, so that it cannot stop its members
        kill(front)
        kill(agent)
        await until(lambda: run.pids() == set())
        assert json.loads((run.member("command-0") / "exit.json").read_text())["signal"] == 9


async def test_a_shim_waits_for_the_next_agent(run):
    """Front and agent gone, but an agent comes back in time: the member lives and is adopted."""
    front = run.front()
    agent = run.agent(front=front.pid)
    async with Master(run) as master:
        started = await master.start("node-0", member("policy-0", BEATING))
        os.kill(agent.pid, signal.SIGSTOP)
        kill(front)
        kill(agent)
        run.agent()
        await master.event(MemberStarted, member="policy-0", adopted=True)
        assert alive(started.process.pid)


async def test_a_front_that_is_gone_already_is_gone(run):
    """The front dies before its agent looks: what lives on the node is stopped, and the agent ends."""
    first = run.agent()
    async with Master(run) as master:
        started = await master.start("node-0", member("policy-0", BEATING))
        kill(first)
        front = run.front()
        kill(front)
        agent = run.agent(front=front.pid)
        assert await asyncio.to_thread(agent.wait, 20) == 0
        assert not alive(started.process.pid)


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_end_is_lost_whenever_the_agent_dies(run, seed):
    """The agent is killed again and again around starts and deaths of members: every start that ran has its end reported."""
    chance = random.Random(seed)
    agent = run.agent()
    expected = set()
    async with Master(run) as master:
        for incarnation in range(5):
            spec = member("rollout-0", BEATING, role="rollout")
            done = asyncio.create_task(master.order("node-0", StartMember(spec=spec, incarnation=incarnation)))
            await asyncio.sleep(chance.choice((0.0, 0.05, 0.2)))
            if chance.random() < 0.7:
                kill(agent)
                connections = len(master.hellos)
                agent = run.agent()
                await until(lambda connections=connections: len(master.hellos) > connections)
                done.cancel()
                done = asyncio.create_task(master.order("node-0", StartMember(spec=spec, incarnation=incarnation)))
            assert (await done).ok
            pid_file = run.member("rollout-0") / "pid.json"
            record = json.loads(await until(lambda file=pid_file: file.exists() and file.read_text()))
            assert record["incarnation"] == incarnation
            os.kill(record["member"]["pid"], signal.SIGKILL)
            expected.add(incarnation)
            await asyncio.sleep(chance.choice((0.0, 0.01, 0.05)))
            if chance.random() < 0.7:
                kill(agent)
                agent = run.agent()
            await master.ended("rollout-0", incarnation)
        ends = master.events(MemberExited)
        assert {(end.incarnation, end.signal) for end in ends} == {(one, 9) for one in expected}
