"""Drills: read, checked, due, and inflicted on real processes."""

import os
import signal
import subprocess
import sys

import msgspec
import psutil
import pytest

from aimaster.cli.front_drills import Drill, DrillError, Engine, check_drills, due, inflict, parse_drills, send, step_of
from aimaster.cli.front_plan import plan_command
from aimaster.cli.reach import start_ticks
from aimaster.wire.ids import MemberId, NodeId, RunId
from aimaster.wire.messages import Progress
from aimaster.wire.places import RunPlaces, node_memory
from aimaster.wire.status import JobStatus, MemberStatus
from aimaster.wire.topology import ProcessId


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def member(name="policy-1", state="running", pid=1, ticks=1, step=-1) -> MemberStatus:
    return MemberStatus(
        member=MemberId(name),
        role=name.rpartition("-")[0],
        node=NodeId("node-0"),
        state=state,
        incarnation=0,
        process=ProcessId(boot_id="b", pid=pid, start_ticks=ticks),
        progress=Progress(step=step),
    )


def picture(*members: MemberStatus, step=0, kind="rl") -> JobStatus:
    return JobStatus(
        run_id="0a",
        name="tiny",
        kind=kind,
        state="running",
        started_at=0.0,
        now=1.0,
        term=1,
        step=step,
        members=members,
    )


def test_a_text_of_drills_is_read_in_its_order():
    """FAULT:SUBJECT@STEP, with commas between."""
    assert parse_drills("kill:policy-1@20, stop:rollout-0@5,") == (
        Drill(fault="kill", subject="policy-1", step=20),
        Drill(fault="stop", subject="rollout-0", step=5),
    )
    assert parse_drills("") == ()
    assert str(parse_drills("node:node-1@40")[0]) == "node:node-1@40"
    assert parse_drills("hang:policy-0@30:pipe") == (Drill(fault="hang", subject="policy-0", step=30, how="pipe"),)


@pytest.mark.parametrize(
    "text",
    [
        "kill",
        "kill:",
        "kill:policy-1",
        "kill:@3",
        "kill:policy-1@",
        "kill:policy-1@-1",
        "maim:x@1",
        "kill:x@1:spin",
        "hang:x@1:y",
    ],
)
def test_a_text_that_is_no_drill_is_named(text):
    """What cannot be read as a drill is shown with the form that is expected."""
    with pytest.raises(DrillError, match="FAULT:SUBJECT@STEP"):
        parse_drills(text)


def test_a_drill_of_a_stranger_is_refused():
    """A subject that the job has not is refused before anything starts, and the possible ones are named."""
    plan = plan_command(
        ["true"], run_id=RunId("0a"), name="t", cwd="/", front_pid=1, ranks=2, port=1, max_restarts=1, environ={}
    )
    check_drills(parse_drills("kill:rank-1@1,stop:master@2,kill:agent-node-0@3,node:node-0@4"), plan)
    for text in ("kill:rank-2@1", "node:node-1@1", "hang:rank-0@1", "kill:node-0@1"):
        with pytest.raises(DrillError, match="wants one of"):
            check_drills(parse_drills(text), plan)


@pytest.mark.parametrize(
    ("text", "step", "state", "is_due"),
    [
        ("kill:policy-1@20", 19, "running", False),
        ("kill:policy-1@20", 20, "running", True),
        ("kill:policy-1@20", 25, "running", True),
        ("kill:policy-1@20", 25, "suspected", True),
        ("kill:policy-1@20", 25, "dead", False),
        ("kill:policy-2@20", 25, "running", False),
        ("kill:master@20", 20, "running", True),
        ("node:node-0@20", 20, "dead", True),
        ("hang:policy-1@20", 18, "running", False),
        ("hang:policy-1@20", 19, "running", True),
    ],
)
def test_a_drill_is_due_at_its_step_while_its_subject_lives(text, step, state, is_due):
    """Too early or with a dead subject it waits; a hang, which the member does by itself, is announced a step before."""
    assert bool(due(parse_drills(text), picture(member(state=state), step=step))) == is_due


def test_a_hang_of_a_member_that_was_started_again_is_never_due():
    """Members hang in their first start only; the summary names the drill as not reached."""
    again = msgspec.structs.replace(member(), incarnation=1)
    assert due(parse_drills("hang:policy-1@20"), picture(again, step=30)) == ()
    assert due(parse_drills("kill:policy-1@20"), picture(again, step=30)) != ()


def test_steps_of_a_wrapped_command_are_those_its_ranks_report():
    """Without a controller, the newest step that any rank reported counts."""
    assert step_of(picture(member("rank-0", step=3), member("rank-1", step=4), kind="command")) == 4
    assert step_of(picture(member(step=9), step=5)) == 5


def test_a_kill_reaches_the_process_that_was_meant(sleeper, tmp_path):
    """SIGKILL goes to the process of that pid and start time."""
    status = picture(member(pid=sleeper.pid, ticks=start_ticks(sleeper.pid)))
    said = inflict(
        parse_drills("kill:policy-1@0")[0], status, Engine(master=None, agents={}), RunPlaces(tmp_path), RunId("0a")
    )
    assert sleeper.wait(timeout=5) == -signal.SIGKILL
    assert "SIGKILL" in said


def test_a_reused_pid_is_spared(sleeper, tmp_path):
    """A process of the same pid that started at another time is not the one that was meant."""
    status = picture(member(pid=sleeper.pid, ticks=start_ticks(sleeper.pid) - 1))
    said = inflict(
        parse_drills("kill:policy-1@0")[0], status, Engine(master=None, agents={}), RunPlaces(tmp_path), RunId("0a")
    )
    assert sleeper.poll() is None
    assert "ended by itself" in said


def test_stop_means_sigstop_also_for_the_engine(sleeper, tmp_path):
    """`stop:master` stops the process that the front started as master."""
    engine = Engine(master=sleeper.pid, agents={})
    inflict(parse_drills("stop:master@0")[0], picture(), engine, RunPlaces(tmp_path), RunId("0a"))
    stopped = os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
    assert stopped is not None
    assert stopped.si_code == os.CLD_STOPPED


def test_a_dead_process_cannot_be_signalled():
    """Signalling what has ended is no error, and says so."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert not send(process.pid, None, signal.SIGTERM)


def test_a_lost_node_leaves_neither_process_nor_folder(tmp_path):
    """`node:` kills the node's agent, shims and members with all below them, and deletes both its folders."""
    run_id, node = RunId(f"t{os.getpid()}"), NodeId("node-0")
    places, memory = RunPlaces(tmp_path), node_memory(run_id, node)
    folder = places.member(node, MemberId("policy-0"))
    folder.mkdir(parents=True)
    (memory / "segments").mkdir(parents=True)
    tree = "import subprocess, time; subprocess.Popen(['sleep', '60']); print('up', flush=True); time.sleep(60)"
    agent = subprocess.Popen(["sleep", "60"])
    shim = subprocess.Popen([sys.executable, "-c", tree], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert shim.stdout is not None
        assert shim.stdout.readline() == b"up\n"
        below = psutil.Process(shim.pid).children()
        record = {"shim": ProcessId(boot_id="b", pid=shim.pid, start_ticks=start_ticks(shim.pid) or 0), "at": 1.0}
        (folder / "pid.json").write_bytes(msgspec.json.encode(record))
        said = inflict(
            parse_drills("node:node-0@0")[0], picture(), Engine(master=None, agents={node: agent.pid}), places, run_id
        )
        assert agent.wait(timeout=5) == shim.wait(timeout=5) == -signal.SIGKILL
        assert all(not child.is_running() or child.status() == psutil.STATUS_ZOMBIE for child in below)
        assert not places.node(node).exists()
        assert not memory.exists()
        assert "3 processes" in said
    finally:
        for process in (agent, shim):
            process.kill()
            process.wait()
        if shim.stdout is not None:
            shim.stdout.close()
