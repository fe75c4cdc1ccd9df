"""The engine's own helper: what it is told, what it leaves at the end, and what it finds in memory."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from easyckpt import Checkpointer, shm
from easyckpt.errors import SaveFailed
from easyckpt.flush import verify_stored
from easyckpt.sidecar import may_be_removed
from easyckpt.storage import list_manifests

ROOT = Path(__file__).resolve().parents[3]
QUIET = {"on_event": lambda _event: None}


def state(step):
    return {"w": torch.full((5000,), float(step)), "step": step}


def steps(storage):
    return [record.step for record in list_manifests(storage)]


def until(condition, seconds=20.0):
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def killed_trainer(folder, storage, *, member="trainer-0"):
    """A trainer that was killed, with its helper, after it sealed steps 1 and 2; step 1 is on storage."""
    code = f"""
import os, signal, torch
from easyckpt import Checkpointer
ckpt = Checkpointer({str(storage)!r}, folder={str(folder)!r}, member={member!r}, flush_every=None)
for step in (1, 2):
    assert ckpt.save(step, {{"w": torch.full((5000,), float(step)), "step": step}}, flush=step == 1)
    ckpt.wait()
os.kill(ckpt._flusher.sidecar.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("version", "stored", "is_being_written", "goes"),
    [
        ((0, 5), [(0, 5)], False, True),
        ((0, 4), [(0, 5)], False, True),
        ((0, 6), [(0, 5)], False, False),
        ((0, 6), [], False, False),
        ((0, 9), [(1, 5)], False, True),  # its lineage is past
        (None, [], False, True),  # left by who was killed
        (None, [(0, 5)], True, False),
    ],
)
def test_only_what_storage_has_as_new_may_go_at_a_clean_end(version, stored, is_being_written, goes):
    assert may_be_removed(version, stored, is_being_written=is_being_written) is goes


def test_a_process_that_only_restores_leaves_no_memory_that_is_on_storage(folder, tmp_path):
    """The trainer before it was killed: its newest step goes to storage first, then the memory is free."""
    killed_trainer(folder, tmp_path)
    assert steps(tmp_path) == [1]
    reader = Checkpointer(tmp_path, folder=folder, flush_every=None, **QUIET)
    back = state(0)
    assert reader.restore(back).step == 2
    reader.close()
    assert steps(tmp_path) == [2, 1]
    verify_stored(tmp_path, list_manifests(tmp_path)[0])
    assert not folder.exists()


def test_a_process_that_ends_without_having_marked_anything_flushes_at_the_end(folder, tmp_path):
    """flush_every=None means only at the end."""
    engine = Checkpointer(tmp_path, folder=folder, flush_every=None, **QUIET)
    engine.save(3, state(3))
    engine.wait()
    assert steps(tmp_path) == []
    engine.close()
    assert steps(tmp_path) == [3]
    assert not folder.exists()


def test_ranks_of_a_step_that_is_not_whole_here_stay_in_memory(folder, tmp_path):
    """A rank whose others are nowhere to be seen: nothing reaches storage, so nothing goes, and that is said."""
    told = []
    engine = Checkpointer(tmp_path, folder=folder, rank=0, ranks=2, on_event=told.append)
    engine.save(3, state(3))
    engine.close()
    assert steps(tmp_path) == []
    assert [segment.header.step for segment in shm.scan(folder)] == [3]
    (stays,) = [event for event in told if event.kind == "housekeeping_failed"]
    assert "step 3" in stays.text


def test_a_helper_that_was_killed_is_started_again_for_the_end(folder, tmp_path):
    """What was marked and not flushed is on storage when close returns."""
    engine = Checkpointer(tmp_path, folder=folder, **QUIET)
    engine.save(1, state(1))
    engine.wait()
    os.kill(engine._flusher.sidecar.pid, signal.SIGKILL)
    engine.save(2, state(2), flush=False)
    engine.close()
    assert steps(tmp_path) == [2, 1]
    assert not folder.exists()


def test_a_stopped_helper_holds_nobody_up_however_many_words_wait_in_its_pipe(folder, tmp_path):
    engine = Checkpointer(tmp_path, folder=folder, **QUIET)
    engine.save(1, state(1))
    engine.wait()
    helper = engine._flusher.sidecar
    os.kill(helper.pid, signal.SIGSTOP)
    talker = threading.Thread(target=lambda: [helper.tell("sealed") for _ in range(20_000)], daemon=True)
    talker.start()
    talker.join(20)
    stuck = talker.is_alive()
    os.kill(helper.pid, signal.SIGCONT)
    assert not stuck
    engine.save(2, state(2))
    engine.wait()
    assert 2 in steps(tmp_path)
    engine.close()


def test_a_line_that_is_no_event_ends_nothing(folder, tmp_path, monkeypatch):
    """A library that prints in the helper does not make the trainer deaf."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("print('hello from a library', flush=True)\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    engine = Checkpointer(tmp_path / "storage", folder=folder, **QUIET)
    engine.save(1, state(1))
    engine.wait(20)
    engine.close()


def test_a_storage_that_cannot_be_listed_is_told(folder, tmp_path):
    """Not only writing fails: a new helper that cannot see what is there says so, and goes on once the storage is back."""
    storage = tmp_path / "storage"
    told = []
    engine = Checkpointer(storage, folder=folder, on_event=told.append)
    engine.save(1, state(1))
    engine.wait()
    os.kill(engine._flusher.sidecar.pid, signal.SIGKILL)
    engine._flusher.sidecar._process.wait()
    storage.rename(tmp_path / "away")
    storage.symlink_to(storage)  # ELOOP at every call
    engine.save(2, state(2))
    with pytest.raises(SaveFailed, match="cannot be read"):
        engine.wait(20)
    storage.unlink()
    (tmp_path / "away").rename(storage)
    with suppress(SaveFailed):
        engine.save(3, state(3))
    until(lambda: 3 in steps(storage))
    with suppress(SaveFailed):
        engine.close()


def test_when_the_newest_step_is_damaged_the_one_before_goes_to_storage_after_the_trainers_death(folder, tmp_path):
    """Nobody had flushed either: an older step is better than none, and the memory stays as it is."""
    code = f"""
import os, signal, torch
from easyckpt import Checkpointer, shm
ckpt = Checkpointer({str(tmp_path)!r}, folder={str(folder)!r}, flush_every=None)
for step in (1, 2):
    assert ckpt.save(step, {{"w": torch.full((5000,), float(step)), "step": step}})
    ckpt.wait()
with open(shm.scan({str(folder)!r})[0].path, "r+b") as file:
    file.seek(-3, os.SEEK_END)
    file.write(b"?")
ckpt._flusher.sidecar.start()
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: steps(tmp_path) == [1])
    assert [segment.header.step for segment in shm.scan(folder)] == [2, 1]


def test_the_helper_scrubs_what_lies_in_its_folder(folder, tmp_path, monkeypatch):
    """With a short patience: a flipped byte is told to the trainer while nothing else happens."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "from easyckpt import scrub\nscrub.Scrubber.__init__.__kwdefaults__['after_seconds'] = 0.05\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{ROOT}")
    told = []
    engine = Checkpointer(tmp_path / "storage", folder=folder, on_event=told.append)
    try:
        for step in (1, 2):
            engine.save(step, state(step))
            engine.wait()
        newest = shm.scan(folder)[0]
        with open(newest.path, "r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"?")
        until(lambda: [event for event in told if event.kind == "segment_damaged"])
        (damage,) = [event for event in told if event.kind == "segment_damaged"]
        assert (damage.step, damage.tier) == (2, "shm")
        until(lambda: not newest.path.exists())  # its writer lives, and the step before is there
        assert engine.save(3, state(3))
        engine.wait()
        assert engine.restore(state(0)).step == 3
    finally:
        engine.close()
    assert not folder.exists()


def test_the_last_step_waits_for_ranks_that_still_seal_it(folder, tmp_path):
    """Rank 0 closes first, while rank 1 is in the middle of the same step: both parts are on storage at the end, and no memory stays."""
    ranks = [Checkpointer(tmp_path, folder=folder, rank=rank, ranks=2, flush_every=None, **QUIET) for rank in (0, 1)]
    ranks[0].save(1, state(1))
    ranks[0]._saver.settle(20)
    closing = threading.Thread(target=ranks[0].close)
    closing.start()
    helper = ranks[0]._flusher.sidecar
    until(lambda: helper.is_alive() and helper._process.stdin.closed)
    time.sleep(0.5)  # so long it would not live if it did not wait
    assert helper.is_alive()
    ranks[1].save(1, state(1))
    ranks[1].close()
    closing.join(30)
    assert not closing.is_alive()
    assert steps(tmp_path) == [1]
    assert not folder.exists()


def test_a_listener_that_raises_makes_nobody_deaf(folder, tmp_path, caplog):
    """What the user's own function does with one event does not keep the engine from the next: a flush is still known to be done."""

    def listener(event):
        if event.tier == "storage":
            raise ValueError("of the user's")

    engine = Checkpointer(tmp_path, folder=folder, on_event=listener)
    for step in (1, 2):
        engine.save(step, state(step))
        engine.wait(20)
    engine.close()
    assert steps(tmp_path) == [2, 1]
    assert "of the user's" in caplog.text


def test_two_trainers_of_one_name_on_two_nodes_are_told_and_neither_state_is_lost(folder, tmp_path):
    """A trainer that was taken for dead lives on beside its successor: both save step 2. Storage keeps the first, who holds the other hears of it."""
    old = Checkpointer(tmp_path, folder=folder / "here", **QUIET)
    old.save(1, state(1))
    old.wait()
    new = Checkpointer(tmp_path, folder=folder / "there", **QUIET)
    new.restore(state(0))
    new.save(2, state(20))
    new.wait()
    new.close()
    old.save(2, state(2))
    with pytest.raises(SaveFailed, match="another trainer"):
        old.wait()
    old.close()
    again = Checkpointer(folder=folder / "here", **QUIET)
    assert again.load()[1]["w"].unique().tolist() == [2.0]
    elsewhere = Checkpointer(tmp_path, folder=folder / "elsewhere", **QUIET)
    assert elsewhere.load()[1]["w"].unique().tolist() == [20.0]
    again.close()
    elsewhere.close()
