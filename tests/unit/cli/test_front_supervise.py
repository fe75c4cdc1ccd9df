"""Programs kept up, orphans kept in sight."""

import os
import signal
import subprocess
import sys
import time

import pytest

from aimaster.cli.front_signals import Signals
from aimaster.cli.front_supervise import (
    GIVE_UP_ENDS,
    LONGEST_PAUSE_SECONDS,
    SHORT_LIFE_SECONDS,
    Supervised,
    pause_seconds,
)
from aimaster.clusters.base import Program
from aimaster.clusters.local import Local


def supervised(tmp_path, *argv: str) -> Supervised:
    return Supervised(Program(name="x", argv=argv, log=tmp_path / "x.log"), Local())


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


def test_pauses_double_up_to_a_limit():
    """The first restart comes at once; then the pause doubles and is never longer than the limit."""
    pauses = [pause_seconds(ends) for ends in range(12)]
    assert pauses[:5] == [0.0, 0.0, 0.2, 0.4, 0.8]
    assert max(pauses) == LONGEST_PAUSE_SECONDS


def test_a_killed_program_is_started_again(tmp_path):
    """The end of a program is noticed through its descriptor, told, and answered by a new start."""
    said: list[str] = []
    program = supervised(tmp_path, "sleep", "60")
    program.mind(0.0, said.append)
    assert program.placed is not None
    first = program.placed.pid
    program.placed.kill()

    def started_again() -> bool:
        program.mind(1.0, said.append)
        return program.placed is not None and program.placed.pid != first

    until(started_again)
    assert said == ["x ended (signal 9); started again"]
    program.placed.kill()
    program.keep = False
    until(lambda: program.mind(2.0, said.append) or not program.up)
    assert program.last_code == -signal.SIGKILL


def test_a_program_that_never_stands_is_given_up(tmp_path):
    """After a few short lives in a row there are no more starts, and the last word says so."""
    said: list[str] = []
    program = supervised(tmp_path, "false")
    clock = 0.0
    deadline = time.monotonic() + 20
    while not program.given_up:
        assert time.monotonic() < deadline
        clock += 0.1
        program.mind(clock, said.append)
        time.sleep(0.005)
    assert program.starts == GIVE_UP_ENDS
    assert said[-1] == "x ended (exit code 1); given up"


def test_a_program_that_stood_starts_a_new_count(tmp_path):
    """An end after a long life is not counted with earlier short ones."""
    program = supervised(tmp_path, "false")
    clock = 0.0
    for _ in range(GIVE_UP_ENDS + 2):
        program.mind(clock, lambda _: None)
        assert program.placed is not None
        until(lambda: os.waitid(os.P_PID, program.placed.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
        clock += SHORT_LIFE_SECONDS + 1
        program.mind(clock, lambda _: None)
        clock += LONGEST_PAUSE_SECONDS
    assert not program.given_up
    program.keep = False
    until(lambda: program.mind(clock, lambda _: None) or not program.up)


def test_a_stopped_program_heeds_the_wish_to_end(tmp_path):
    """SIGTERM reaches a program that is stopped, since it is continued."""
    program = supervised(tmp_path, "sleep", "60")
    program.mind(0.0, lambda _: None)
    assert program.placed is not None
    os.kill(program.placed.pid, signal.SIGSTOP)
    program.placed.ask_to_end()
    program.keep = False
    until(lambda: program.mind(1.0, lambda _: None) or not program.up)
    assert program.last_code == -signal.SIGTERM


def test_orphans_of_orphans_stay_in_sight_and_end_with_the_front():
    """What a program leaves behind in other sessions becomes the front's child, and is killed with all below it."""
    script = (
        "import subprocess, psutil, time\n"
        "from aimaster.clusters.local import adopt_orphans, kill_descendants, reap_orphans\n"
        "adopt_orphans()\n"
        "subprocess.run(['sh', '-c', 'setsid sleep 60 & setsid sh -c \"sleep 60; true\" & exit 0'], check=True)\n"
        "below = psutil.Process().children(recursive=True)\n"
        "assert len(below) >= 2, below\n"
        "kill_descendants()\n"
        "reap_orphans(set())\n"
        "deadline = time.monotonic() + 5\n"
        "while psutil.Process().children() and time.monotonic() < deadline: reap_orphans(set())\n"
        "print(psutil.Process().children(), [p.pid for p in below if p.is_running()])"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False)
    assert shown.stdout == "[] []\n", shown.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_a_fact_to_be_taken(number):
    """Signals wake whoever waits on the descriptor and are taken by name; afterwards all is as before."""
    before = signal.getsignal(number)
    with Signals() as signals:
        assert not signals.take()
        os.kill(os.getpid(), number)
        until(lambda: signals.waiting)
        assert signals.take() == [number.name]
        assert signals.first_at <= time.monotonic()
    assert signal.getsignal(number) is before
