"""However the trainer ends, what it saved last goes to storage."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from easyckpt import shm
from easyckpt.flush import verify_stored
from easyckpt.storage import list_manifests

ROOT = Path(__file__).resolve().parent.parent.parent
TRAINER = """
import sys, torch
from easyckpt import Checkpointer
ckpt = Checkpointer("ckpts", flush_every=1000)
for step in range(1, 8):
    ckpt.save(step, {"w": torch.full((50_000,), float(step))})
    ckpt._saver.settle(30)
print("saved", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def trainer(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    assert process.stdout.readline() == "saved\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    shutil.rmtree(shm.default_folder(tmp_path / "ckpts"), ignore_errors=True)


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, None], ids=["SIGTERM", "SIGINT", "SIGKILL", "normal"]
)
def test_the_last_save_reaches_storage_by_the_helper(trainer, tmp_path, how):
    """Only step 1 was marked for storage; the helper takes step 7 there when the trainer is gone. A normal end waits for it and leaves no memory."""
    if how is None:
        trainer.stdin.write("\n")
        trainer.stdin.flush()
    else:
        trainer.send_signal(how)
    trainer.wait(60)
    give_up_at = time.monotonic() + 30
    while not (found := list_manifests(tmp_path / "ckpts")) or found[0].step < 7:
        assert time.monotonic() < give_up_at, found
        assert how is not None, "a normal end returns only when it is there"
        time.sleep(0.05)
    verify_stored(tmp_path / "ckpts", found[0])
    if how is None:
        assert not shm.default_folder(tmp_path / "ckpts").exists()
