"""easyckpt alone: the three lines of the example keep a plain loop going through a kill."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from easyckpt import shm
from easyckpt.storage import list_manifests

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def start(tmp_path):
    """Starts the example on one folder; whatever is left of it is killed at the end, and its memory removed."""
    started = []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def run(steps):
        argv = [sys.executable, str(ROOT / "examples" / "plain_loop.py"), "ckpts", str(steps)]
        started.append(subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
    shutil.rmtree(shm.default_folder(tmp_path / "ckpts"), ignore_errors=True)


def test_a_killed_loop_goes_on_with_the_loss_it_would_have_had(start, tmp_path):
    """SIGKILL after some steps; the same command restores from memory, and its losses are those of an undisturbed run, to the last digit."""
    first = start(100_000)
    seen = [first.stdout.readline() for _ in range(40)]
    first.send_signal(signal.SIGKILL)
    first.wait()

    second = start(100_000)
    greeting = second.stdout.readline()
    assert greeting.endswith("(from shm)\n")
    seen += [second.stdout.readline() for _ in range(20)]
    second.send_signal(signal.SIGKILL)
    second.wait()

    shutil.rmtree(shm.default_folder(tmp_path / "ckpts"))
    (tmp_path / "ckpts").rename(tmp_path / "before")
    last = int(seen[-1].split()[1])
    undisturbed, _ = start(last).communicate(timeout=60)
    assert last >= int(greeting.split()[3]) + 20
    assert {line.strip() for line in seen[1:]} <= set(undisturbed.splitlines())


def test_a_clean_end_leaves_the_last_step_on_storage_and_no_memory(start, tmp_path):
    out, _ = start(7).communicate(timeout=60)
    assert out.splitlines()[-1].startswith("step 7 ")
    assert list_manifests(tmp_path / "ckpts")[0].step == 7
    give_up_at = time.monotonic() + 10
    while shm.default_folder(tmp_path / "ckpts").exists():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
    again, _ = start(9).communicate(timeout=60)
    assert again.splitlines()[0] == "starting after step 7 (from storage)"
