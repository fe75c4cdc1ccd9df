"""Memory that nobody uses: none after a clean end; after SIGKILL of everything the next start takes it over or frees it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAINER = """
import sys, time
import torch
from easyckpt import Checkpointer
events = []
ckpt = Checkpointer(sys.argv[1], folder=sys.argv[2], on_event=events.append)
state = {"w": torch.zeros(500_000), "step": 0}
restored = ckpt.restore(state)
step = restored.step if restored else 0
assert step == 0 or bool((state["w"] == step).all())
for step in range(step + 1, step + 4):
    state["w"].fill_(step)
    state["step"] = step
    ckpt.save(step, state)
    ckpt.wait()
print(step, ckpt._flusher.sidecar.pid, flush=True)
if sys.argv[3] == "killed":
    state["w"].fill_(step + 1)
    ckpt.save(step + 1, {**state, "step": step + 1})
    time.sleep(600)
ckpt.close()
print(*sorted(f"{event.kind} {event.text}" for event in events if event.kind in ("reclaimed", "strangers_found")), sep="\\n")
"""


@pytest.fixture
def memory():
    path = Path(f"/dev/shm/easyckpt-garbage-{os.getpid()}")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def trainer(storage, memory, end):
    words = [sys.executable, "-c", TRAINER, str(storage), str(memory), end]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)


def test_the_next_start_adopts_or_frees_what_a_killed_run_left_and_a_clean_end_leaves_nothing(memory, tmp_path):
    """Trainer and helper get SIGKILL together. The next start goes on in the same memory, frees what nobody can use, names what is not ours."""
    first = trainer(tmp_path, memory, "killed")
    step, helper = map(int, first.stdout.readline().split())
    assert step == 3
    for pid in (first.pid, helper):
        os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=20)
    kept = {path.name: path.stat().st_ino for path in memory.glob("*.safetensors")}
    assert kept
    torn = memory / "trainer-7.r0.s0.safetensors"
    torn.write_bytes(bytes(1 << 16))
    stranger = memory / "core"
    stranger.write_bytes(b"x")
    second = trainer(tmp_path, memory, "closed")
    step = int(second.stdout.readline().split()[0])
    assert step in (6, 7), "it went on where the killed one was"
    assert {name: (memory / name).stat().st_ino for name in kept if (memory / name).exists()}.items() <= kept.items()
    assert not torn.exists()
    said, _ = second.communicate(timeout=60)
    assert f"reclaimed memory of killed processes was freed: {torn.name}" in said
    assert "strangers_found" in said
    assert "core" in said
    assert [path.name for path in memory.iterdir()] == ["core"], "no segment and no mark stays behind"
