"""A save is killed at any byte: the newest whole step loads, or the one before, and never a mixture."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from easyckpt import shm
from easyckpt.flush import verify_stored
from easyckpt.storage import list_manifests

HERE = Path(__file__).resolve().parent


@pytest.fixture
def memory():
    import shutil

    path = Path(f"/dev/shm/easyckpt-kill-{os.getpid()}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def killed(memory, storage, kills, seed, victims):
    script = [sys.executable, str(HERE / "ckpt_trainer.py"), str(memory), str(storage), str(kills), str(seed), victims]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(figures, memory, storage):
    """Nothing sealed was lost, every restore proved every element, and what lies on each tier verifies."""
    assert figures["lost"] == []
    assert figures["steps"] > 0
    for segment in shm.scan(memory):
        shm.verify(segment.path)
    for record in list_manifests(storage):
        verify_stored(storage, record)


def test_a_trainer_killed_at_random_moments_never_loses_a_sealed_step(memory, tmp_path):
    figures = killed(memory, tmp_path, 25, 11, "trainer,trainer,helper,both")
    check(figures, memory, tmp_path)
    assert figures["distinct"] > 5


def test_with_all_memory_lost_the_newest_flushed_step_loads(memory, tmp_path):
    """The node dies: its memory is gone, storage has a whole step that proves."""
    import shutil

    figures = killed(memory, tmp_path, 6, 12, "both")
    shutil.rmtree(memory)
    newest = list_manifests(tmp_path)[0].step
    again = killed(memory, tmp_path, 0, 0, "both")
    assert again["steps"] == newest
    assert newest <= figures["steps"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_hundred_kills_lose_nothing(memory, tmp_path):
    check(killed(memory, tmp_path, 200, 13, "trainer,helper,both"), memory, tmp_path)
