"""`aimaster run -- COMMAND`: real commands that end, crash, hang and are killed; what is restarted, what is stopped, what is said."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.flow.jobs import AIMASTER, Job, job, processes_of, until

pytestmark = pytest.mark.timeout(120)

PYTHON = sys.executable

GLOO = """
import os, signal, sys
import torch, torch.distributed as dist

rank, restart = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
port, fault = os.environ["MASTER_PORT"], sys.argv[1]
dist.init_process_group("gloo")
for step in range(6):
    grown = torch.ones(1)
    dist.all_reduce(grown)
    assert grown.item() == dist.get_world_size()
    if rank == 1 and step == 3:
        if fault == "raise":
            raise ValueError("the seventh sample is empty")
        if fault == "kill" and restart == 0:
            os.kill(os.getpid(), signal.SIGKILL)
print(f"rank {rank} of {dist.get_world_size()} done, start {restart}, port {port}", flush=True)
dist.destroy_process_group()
"""

TORCHRUN = (PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def write(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def summary(one: Job) -> dict:
    return json.loads(one.places.summary.read_bytes())


def nothing_left(one: Job) -> None:
    """No process and no memory of the run is left."""
    nothing_runs(one, 5)
    assert not one.memory()


def nothing_runs(one: Job, seconds: float) -> None:
    """No process of the run is left, or none soon."""
    deadline = time.monotonic() + seconds
    while left := processes_of(one.run):
        assert time.monotonic() < deadline, f"still there after {seconds:.0f} s: {left}\n{one.story()}"
        time.sleep(0.1)


def test_a_command_runs_to_its_end(tmp_path):
    """Its arguments arrive untouched, its output is passed on, its exit is ours, and nothing of it is left."""
    script = write(
        tmp_path, "import sys, os; print(sys.argv[1:], os.getcwd(), 'RANK' in os.environ); print('end', end='')"
    )
    with job(tmp_path / "run", "--", PYTHON, script, "--run-dir", "x", "--", "-y") as one:
        assert one.wait(30) == 0, one.story()
        said = one.output.read_text()
        assert f"['--run-dir', 'x', '--', '-y'] {Path.cwd()} False\nend\n" in said
        end = summary(one)
        assert (end["outcome"], end["exit_code"], end["children"]) == (
            "finished",
            0,
            {"command-0": {"exit_code": 0, "signal": None}},
        )
        assert end["incidents"] == []
        nothing_left(one)


def test_a_reader_that_goes_away_does_not_end_the_job(tmp_path):
    """`aimaster run ... 2>&1 | head -1`: the command runs to its end unheard, and the exit code is its own."""
    script = write(
        tmp_path,
        "for number in range(2000): print('x' * 100)\nopen('DONE', 'w').close()".replace(
            "DONE", str(tmp_path / "done")
        ),
    )
    words = [*AIMASTER, "run", "--run-dir", str(tmp_path / "run"), "--", PYTHON, script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as front:
        assert front.stdout is not None
        assert front.stdout.readline().startswith(b"aimaster: run train")
        front.stdout.close()
        assert front.wait(30) == 0
    assert (tmp_path / "done").exists()
    assert json.loads((tmp_path / "run" / "summary.json").read_bytes())["outcome"] == "finished"


def test_a_reader_that_stands_still_holds_nothing_up(tmp_path):
    """`aimaster run ... | less` left alone: signals are heeded and everything ends, and what was not shown is said with its file."""
    run = tmp_path / "run"
    script = write(tmp_path, "import time\nprint('x' * 1_000_000, flush=True)\ntime.sleep(300)\n")
    words = [*AIMASTER, "run", "--run-dir", str(run), "--", PYTHON, script]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as front:
        assert front.stderr is not None
        output = run / "nodes" / "node-0" / "members" / "command-0" / "output.log"
        until(lambda: output.exists() and output.stat().st_size > 1_000_000, "the command has printed", 30)
        front.send_signal(signal.SIGINT)
        assert front.stderr.readline().startswith(b"aimaster: run train")
        assert b"flushing and stopping" in front.stderr.readline()
        front.send_signal(signal.SIGINT)
        assert front.wait(30) == 130
        said = front.stderr.read().decode()
    assert f"bytes of output were not shown; all of it is in {output}" in said
    assert "outcome" in said  # the summary went where there is a reader
    assert processes_of(run) == {}


def test_a_user_s_exception_stops_the_job_at_once(tmp_path):
    """A traceback in the user's code is never retried: exit 1, its category, its traceback, and the child's own code."""
    script = write(tmp_path, "def load():\n    raise KeyError('no such column')\nload()\n")
    with job(tmp_path / "run", "--", PYTHON, script) as one:
        assert one.wait(30) == 1, one.story()
        end = summary(one)
        assert end["failure"]["category"] == "app.exception"
        assert "KeyError: 'no such column'" in end["failure"]["traceback"]
        assert end["children"]["command-0"]["exit_code"] == 1
        assert end["status"]["members"][0]["restarts"] == 0
        said = one.output.read_text()
        assert "app.exception" in said
        assert "in load" in said
        nothing_left(one)


def test_a_rank_that_raises_stops_all_ranks_with_its_traceback(tmp_path):
    """Of two ranks, rank 1 raises: the job stops at once, the verdict is app.exception, rank 1 and its traceback are shown, exit 1."""
    script = write(tmp_path, GLOO)
    with job(tmp_path / "run", "--nproc-per-node", "2", "--", PYTHON, script, "raise") as one:
        assert one.wait(60) == 1, one.story()
        failure = summary(one)["failure"]
        assert (failure["category"], failure["member"], failure["rank"]) == ("app.exception", "rank-1", 1)
        assert "ValueError: the seventh sample is empty" in failure["traceback"]
        assert all(member["restarts"] == 0 for member in summary(one)["status"]["members"])
        said = one.output.read_text()
        for words in ("app.exception", "rank 1", "ValueError: the seventh sample is empty"):
            assert words in said
        nothing_left(one)


def test_a_killed_rank_restarts_all_ranks_on_a_new_port(tmp_path):
    """Rank 1 is killed: both ranks start again, told so and on another port, and finish; exit 0."""
    script = write(tmp_path, GLOO)
    with job(tmp_path / "run", "--nproc-per-node", "2", "--", PYTHON, script, "kill") as one:
        assert one.wait(90) == 0, one.story()
        first = json.loads(one.places.plan.read_bytes())["members"]["rank-0"]["env"]["MASTER_PORT"]
        said = one.output.read_text()
        for rank in (0, 1):
            assert f"[rank-{rank}]: rank {rank} of 2 done, start 1, port " in said
        assert f"port {first}\n" not in said
        end = summary(one)
        assert [line["what"].partition(" (with it")[0] for line in end["incidents"]] == ["rank-1 process.killed"]
        assert end["incidents"][0]["recovered_after_seconds"] > 0
        assert [member["restarts"] for member in end["status"]["members"]] == [1, 1]
        nothing_left(one)


def test_torchrun_inside_a_rank_that_raises_stops_the_job(tmp_path):
    """The user's own torchrun: the rank it blames is the culprit, its exception the verdict, exit 1."""
    script = write(tmp_path, GLOO)
    with job(tmp_path / "run", "--", *TORCHRUN, script, "raise") as one:
        assert one.wait(60) == 1, one.story()
        failure = summary(one)["failure"]
        assert (failure["category"], failure["rank"]) == ("app.exception", 1)
        assert "ValueError: the seventh sample is empty" in failure["traceback"]
        assert "app.exception" in one.output.read_text()
        nothing_left(one)


def test_torchrun_inside_a_rank_that_is_killed_is_restarted(tmp_path):
    """The user's own torchrun ends because a rank was killed: the command starts again and finishes, exit 0."""
    mark = tmp_path / "killed"
    text = GLOO.replace("restart == 0", f"not os.path.exists({str(mark)!r})").replace(
        "os.kill(os.getpid()", f"open({str(mark)!r}, 'w').close(); os.kill(os.getpid()"
    )
    with job(tmp_path / "run", "--", *TORCHRUN, write(tmp_path, text), "kill") as one:
        assert one.wait(90) == 0, one.story()
        end = summary(one)
        assert [line["what"] for line in end["incidents"]] == ["command-0 process.killed"]
        assert mark.exists()
        nothing_left(one)


def test_a_command_that_dies_again_and_again_is_stopped_with_the_reason(tmp_path):
    """Deaths without an explanation are retried as often as allowed, then the job stops and says so."""
    script = write(tmp_path, "import os, signal; print('up', flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    with job(tmp_path / "run", "--max-restarts", "2", "--", PYTHON, script) as one:
        assert one.wait(60) == 1, one.story()
        end = summary(one)
        assert "2 restarts are used up" in end["reason"]
        assert end["children"]["command-0"]["signal"] == signal.SIGKILL
        assert one.output.read_text().splitlines().count("up") == 3
        nothing_left(one)


def test_a_command_that_reports_and_then_hangs_is_killed_and_restarted(tmp_path):
    """A script that reports its steps and then stops is found by its broken lease, killed on evidence, and started again."""
    text = (
        "import os, signal, time\n"
        "from aimaster.client import report_progress\n"
        "for step in range(12):\n"
        "    report_progress(step)\n"
        "    time.sleep(0.05)\n"
        "if os.environ['AIMASTER_INCARNATION'] == '0': os.kill(os.getpid(), signal.SIGSTOP)\n"
        "print('through', flush=True)\n"
    )
    with job(tmp_path / "run", "--", PYTHON, write(tmp_path, text)) as one:
        assert one.wait(60) == 0, one.story()
        assert "\nthrough\n" in one.output.read_text()
        (incident,) = summary(one)["incidents"]
        assert incident["what"].startswith("command-0 hang.")
        nothing_left(one)


SLEEPER = "import subprocess, sys, time\nsubprocess.Popen(['setsid', 'sleep', '300'])\nprint('up', flush=True)\ntime.sleep(300)\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_with_130_and_the_same_command_goes_on(tmp_path, number):
    """Ctrl-C and SIGTERM stop everything, down to what the command started in other sessions; then it is resumed."""
    with job(tmp_path / "run", "--", PYTHON, write(tmp_path, SLEEPER)) as one:
        until(lambda: "\nup\n" in one.output.read_text(), f"the command is up\n{one.story()}", 30)
        one.interrupt(number)
        assert one.wait(40) == 130, one.story()
        end = summary(one)
        assert (end["outcome"], end["reason"]) == ("stopped", f"interrupted by {number.name}")
        nothing_left(one)
        if number is signal.SIGINT:
            one.start()
            until(lambda: one.output.read_text().count("\nup\n") == 2, f"the command is up again\n{one.story()}", 30)
            assert "resuming" in one.output.read_text()
            one.interrupt()
            assert one.wait(40) == 130, one.story()
            assert summary(one)["run_id"] == end["run_id"]
            nothing_left(one)


@pytest.mark.parametrize("seen", ["master.log", "master.json", "nodes/node-0/agent.pid.json"])
def test_an_interrupt_in_start_up_ends_all(tmp_path, seen):
    """Whether the master serves already or the agent is yet to come: all end within seconds, and no memory is left."""
    with job(tmp_path / "run", "--", PYTHON, write(tmp_path, SLEEPER)) as one:
        look = one.run / (f"logs/{seen}" if seen.endswith(".log") else seen)
        until(look.exists, f"{seen} is written", 30)
        one.interrupt()
        assert one.wait(25) == 130, one.story()
        nothing_left(one)


def test_a_second_interrupt_kills_at_once(tmp_path):
    """A command that ignores SIGTERM does not hold the second Ctrl-C."""
    text = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER
    with job(tmp_path / "run", "--", PYTHON, write(tmp_path, text)) as one:
        until(lambda: "\nup\n" in one.output.read_text(), f"the command is up\n{one.story()}", 30)
        one.interrupt()
        until(lambda: "once more kills at once" in one.output.read_text(), "the first is heeded", 10)
        one.interrupt()
        assert one.wait(5) == 130, one.story()
        nothing_left(one)


def test_a_killed_front_leaves_no_orphan_and_the_same_command_resumes(tmp_path):
    """SIGKILL of the front: master, agent, shim, command and what it started end by themselves; a start right behind the kill waits for them."""
    with job(tmp_path / "run", "--", PYTHON, write(tmp_path, SLEEPER)) as one:
        for times_up in (1, 2):
            until(lambda n=times_up: one.output.read_text().splitlines().count("up") == n, "the command is up", 40)
            assert len(processes_of(one.run)) >= 5
            assert one.front is not None
            one.front.kill()
            one.front.wait()
            if times_up == 1:
                nothing_runs(one, 30)
                assert not one.memory()
            one.start()
        until(lambda: one.output.read_text().splitlines().count("up") == 3, f"the command is up\n{one.story()}", 40)
        one.interrupt()
        assert one.wait(40) == 130, one.story()
        assert summary(one)["starts"] == 3
        nothing_left(one)


WAITING = """
import os, pathlib, time
print('up', os.getpid(), flush=True)
while not pathlib.Path(__file__).with_name('go').exists(): time.sleep(0.05)
print('through', os.getpid(), flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_master_and_agent_are_replaced_and_the_command_does_not_notice(tmp_path, number):
    """Killed or stopped, the front starts both again; they adopt the command, which goes on in the same process and finishes."""
    with job(tmp_path / "run", "--", PYTHON, write(tmp_path, WAITING)) as one:
        pid = one.pid("command-0")
        for old in (one.master_pid(), one.agent_pid("node-0")):
            os.kill(old, number)
        one.healed("agent-node-0")
        one.healed("master")
        assert one.pid("command-0") == pid
        (tmp_path / "go").touch()
        assert one.wait(40) == 0, one.story()
        assert f"\nthrough {pid}\n" in one.output.read_text()
        assert summary(one)["status"]["members"][0]["restarts"] == 0
        nothing_left(one)
