import asyncio
import json
import os
import signal
import time

import pytest

from agents.stacks import find_spy
from aimaster.wire.actions import DumpStacks, KillMember, StartMember, StopMember
from aimaster.wire.messages import Found, HangSuspected, MemberExited, MemberStarted
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


async def test_a_killed_member_is_reported_to_master_and_controller(run):
    """SIGKILL of a member: the master learns signal 9 within milliseconds, the controller gets its own notice, both once."""
    run.agent()
    async with Master(run) as master:
        started = await master.start("node-0", member("policy-0", BEATING))
        await until(lambda: (p := master.pulses.get("node-0")) and p.members and p.members[0].progress.step > 10)
        picture = master.pulses["node-0"].members[0]
        assert picture.alive
        assert picture.progress.phase == "compute"
        killed_at = time.time()
        os.kill(started.process.pid, signal.SIGKILL)
        ended = await master.ended("policy-0")
        assert (ended.exit_code, ended.signal, ended.expected) == (None, 9, False)
        assert ended.process == started.process
        assert 0 <= ended.at - killed_at < 2.0
        await until(lambda: master.deaths)
        assert [(death.member, death.incarnation) for death in master.deaths] == [("policy-0", 0)]
        assert len(master.events(MemberExited)) == 1


async def test_an_exit_tells_code_and_last_words(run):
    """An exception of the user's code: exit code 1, the traceback in the log's tail, and secrets hidden."""
    run.agent()
    async with Master(run) as master:
        code = "print('login with api_key=abcdef123456'); raise ValueError('bad batch')"
        await master.start("node-0", member("policy-0", code))
        ended = await master.ended("policy-0")
        assert (ended.exit_code, ended.signal, ended.expected) == (1, None, False)
        assert ended.log_tail[-1] == "ValueError: bad batch"
        assert "abcdef123456" not in "".join(ended.log_tail)
        json_text = (run.member("policy-0") / "exit.json").read_text()
        assert json.loads(json_text)["exit_code"] == 1


async def test_a_command_that_does_not_exist_is_an_exit(run):
    """A member that cannot be started ends with 127 and says why in its log."""
    run.agent()
    async with Master(run) as master:
        spec = member("policy-0", "")
        spec = type(spec)(member=spec.member, role="command", argv=("/no/such/program",))
        await master.start("node-0", spec)
        ended = await master.ended("policy-0")
        assert ended.exit_code == 127
        assert "/no/such/program" in ended.log_tail[-1]


async def test_a_stopped_process_is_suspected_with_evidence(run):
    """SIGSTOP: two looks find state T; after SIGCONT it beats on, and nobody was killed by the agent."""
    run.agent()
    async with Master(run) as master:
        started = await master.start("node-0", member("policy-0", BEATING, lease_floor_seconds=0.4))
        await until(lambda: (p := master.pulses.get("node-0")) and p.members and p.members[0].progress.lease_seconds)
        os.kill(started.process.pid, signal.SIGSTOP)
        suspected = await until(
            lambda: next((e for e in master.events(HangSuspected) if "state-T-twice" in e.evidence), None)
        )
        assert suspected.member == "policy-0"
        assert suspected.progress.phase == "compute"
        os.kill(started.process.pid, signal.SIGCONT)
        step = suspected.progress.step
        await until(lambda: master.pulses["node-0"].members[0].progress.step > step + 5)
        assert alive(started.process.pid)


HANGING = """
import ctypes, os, time
from aimaster.client import start_member
progress = start_member(fence=False)
for step in range(30):
    progress.beat("compute", step=step)
    time.sleep(0.01)
def stand_still():
    never, _ = os.pipe()
    ctypes.PyDLL(None).read(never, ctypes.create_string_buffer(1), 1)
stand_still()
"""


async def test_a_true_hang_is_suspected_by_its_frames(run):
    """A training thread in C with the GIL held: two dumps a lease apart show the same frame, and no processor time passes."""
    run.agent()
    async with Master(run) as master:
        await master.start("node-0", member("policy-0", HANGING, lease_floor_seconds=0.4))
        suspected = await until(
            lambda: next((e for e in master.events(HangSuspected) if "same-frame-twice" in e.evidence), None)
        )
        assert "no-cpu" in suspected.evidence
        assert "state-T-twice" not in suspected.evidence
        assert any("stand_still" in line for line in suspected.stacks)


async def test_standing_in_a_collective_is_no_fault_of_its_own(run):
    """In the phase `reduce` a member waits for others: the same frame twice is no evidence there."""
    code = HANGING.replace('progress.beat("compute", step=step)', 'progress.beat("reduce", step=step)')
    run.agent()
    async with Master(run) as master:
        await master.start("node-0", member("policy-0", code, lease_floor_seconds=0.3))
        await until(lambda: len(master.events(HangSuspected)) >= 3)
        assert not any("same-frame-twice" in event.evidence for event in master.events(HangSuspected))


async def test_a_member_that_cannot_be_started_is_an_end(run):
    """Its folder cannot be made: the order fails with the reason, and the end of a member without a process is reported."""
    run.agent()
    async with Master(run) as master:
        await master.connected("node-0")
        (run.places.node("node-0") / "members").write_text("in the way")
        done = await master.order("node-0", StartMember(spec=member("policy-0", BEATING), incarnation=0))
        assert not done.ok
        ended = await master.ended("policy-0")
        assert (ended.process, ended.exit_code, ended.signal, ended.expected) == (None, None, None, False)
        assert ended.findings[0].details["message"]


async def test_a_slow_unlearnt_phase_is_no_hang(run):
    """A first evaluation that takes long on a member that has beaten before raises no suspicion while the phase is unlearnt."""
    code = """
import time
from aimaster.client import start_member
progress = start_member()
for step in range(30):
    progress.beat("compute", step=step)
    time.sleep(0.01)
progress.beat("save")
time.sleep(2.0)
progress.beat("compute", step=31)
time.sleep(600)
"""
    run.agent()
    async with Master(run) as master:
        await master.start("node-0", member("policy-0", code, lease_floor_seconds=0.3))
        await until(lambda: (p := master.pulses.get("node-0")) and p.members and p.members[0].progress.step == 31)
        assert not [event for event in master.events(HangSuspected) if event.progress.phase == "save"]


async def test_stacks_are_dumped_on_order_and_only_where_that_is_safe(run):
    """DumpStacks answers with all stacks; a program that does not handle the signal is read from outside or refused, never ended."""
    run.agent()
    async with Master(run) as master:
        await master.start("node-0", member("policy-0", BEATING))
        plain = await master.start("node-0", member("command-0", "import time; time.sleep(600)", role="command"))
        await until(lambda: (p := master.pulses.get("node-0")) and any(m.progress.step > 3 for m in p.members))
        done = await master.order("node-0", DumpStacks(member="policy-0", incarnation=0))
        assert done.ok
        assert "most recent call first" in done.detail
        outside = await master.order("node-0", DumpStacks(member="command-0", incarnation=0))
        assert outside.ok == (find_spy() is not None)
        assert alive(plain.process.pid)


FAMILY = """
import os, subprocess, sys, time
sleeper = "import time; time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleeper])
runaway = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
orphan = subprocess.run(["sh", "-c", f"setsid {sys.executable} -c '{sleeper}' >/dev/null 2>&1 & echo $!"], capture_output=True, text=True)
print(child.pid, runaway.pid, orphan.stdout.strip(), flush=True)
time.sleep(600)
"""


async def family(run, master, incarnation=0):
    started = await master.start("node-0", member("command-0", FAMILY, role="command"), incarnation)
    log = run.member("command-0") / "output.log"
    words = await until(lambda: log.exists() and log.read_text().splitlines()[incarnation:] and log.read_text())
    pids = [started.process.pid, *map(int, words.splitlines()[incarnation].split())]
    assert all(alive(pid) for pid in pids)
    return pids


@pytest.mark.parametrize("action", ["kill", "stop", "die"])
async def test_the_whole_tree_ends_with_its_member(run, action):
    """Children, a child in its own session and an orphan that left both end when the member is killed, stopped or dies."""
    run.agent()
    async with Master(run) as master:
        pids = await family(run, master)
        if action == "kill":
            assert (await master.order("node-0", KillMember(member="command-0", incarnation=0, reason="test"))).ok
        elif action == "stop":
            assert (await master.order("node-0", StopMember(member="command-0", incarnation=0, grace_seconds=0.5))).ok
        else:
            os.kill(pids[0], signal.SIGKILL)
        ended = await master.ended("command-0")
        assert ended.expected == (action == "stop")
        await until(lambda: not any(alive(pid) for pid in pids), what=f"the end of {pids}")


async def test_a_member_may_use_its_grace(run):
    """SIGTERM comes first: a member that saves and exits 0 within the grace is not killed."""
    code = """
import signal, sys, time
def end(*_):
    time.sleep(0.3); print("saved", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
time.sleep(600)
"""
    run.agent()
    async with Master(run) as master:
        await master.start("node-0", member("policy-0", code))
        log = run.member("policy-0") / "output.log"
        await until(lambda: log.exists() and "ready" in log.read_text())
        assert (await master.order("node-0", StopMember(member="policy-0", incarnation=0))).ok
        ended = await master.ended("policy-0")
        assert (ended.exit_code, ended.expected, ended.log_tail[-1]) == (0, True, "saved")


async def test_a_log_sign_is_news_before_the_death(run):
    """A line that the catalogue knows is reported while the member still runs, once, with its file and offset."""
    line = "NVRM: Xid (PCI:0000:b3:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    code = f"import time; print('hello'); print({line!r}); print({line!r}, flush=True); time.sleep(600)"
    run.agent()
    async with Master(run) as master:
        started = await master.start("node-0", member("policy-0", code))
        found = await until(lambda: master.events(Found))
        finding = found[0].finding
        assert finding.category == "gpu.lost"
        assert finding.evidence[0].file == "members/policy-0/output.log"
        assert finding.evidence[0].offset == len("hello\n")
        os.kill(started.process.pid, signal.SIGKILL)
        ended = await master.ended("policy-0")
        assert "gpu.lost" in [one.category for one in ended.findings]
        assert len([one for one in master.events(Found) if one.finding.sign == finding.sign]) == 1


async def test_a_new_incarnation_is_a_new_life(run):
    """A member that died starts again under the next incarnation; an older one is refused, the present one is not started twice."""
    run.agent()
    async with Master(run) as master:
        first = await master.start("node-0", member("policy-0", BEATING))
        os.kill(first.process.pid, signal.SIGKILL)
        await master.ended("policy-0")
        second = await master.start("node-0", member("policy-0", BEATING), 1)
        assert second.process != first.process
        again = await master.order("node-0", StartMember(spec=member("policy-0", BEATING), incarnation=1))
        assert (again.ok, again.detail) == (True, "runs already")
        old = await master.order("node-0", StartMember(spec=member("policy-0", BEATING), incarnation=0))
        assert not old.ok
        past = await master.order("node-0", KillMember(member="policy-0", incarnation=0, reason="late"))
        assert not past.ok
        assert alive(second.process.pid)
        assert len(master.events(MemberStarted)) == 2


async def test_the_environment_tells_a_member_who_it_is(run):
    """Run, node, member, role, rank, incarnation and folders come as AIMASTER_*; the specification's own variables are added."""
    run.agent()
    async with Master(run) as master:
        code = "import json, os; print(json.dumps(dict(os.environ) | {'cwd': os.getcwd()}), flush=True)"
        await master.start("node-0", member("policy-3", code, rank=3, env={"EXTRA": "1"}, cwd="/"))
        await master.ended("policy-3")
        told = json.loads((run.member("policy-3") / "output.log").read_text())
        assert told["AIMASTER_RUN_DIR"] == str(run.places.run)
        assert told["AIMASTER_NODE_MEMORY"] == str(run.memory())
        names = ("RUN_ID", "NODE", "MEMBER", "ROLE", "RANK", "INCARNATION")
        assert [told[f"AIMASTER_{name}"] for name in names] == [run.id, "node-0", "policy-3", "policy", "3", "0"]
        assert (told["EXTRA"], told["cwd"]) == ("1", "/")
        assert run.token not in str(told)


def test_a_second_agent_of_a_node_is_refused(run):
    """One agent a node: the second ends with code 1 and says so; a node that is not planned is a usage error."""
    run.agent()
    pid_file = run.places.node("node-0") / "agent.pid.json"
    asyncio.run(until(pid_file.exists))
    second = run.agent()
    assert second.wait(timeout=20) == 1
    assert "another agent serves this node" in (run.places.node("node-0") / "agent.log").read_text()
    assert run.agent("node-9").wait(timeout=20) == 2
