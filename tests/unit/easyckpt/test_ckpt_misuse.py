"""What a caller can get wrong, and what the engine then says at once instead of losing a step in silence."""

import errno
import functools
import os
import threading
import time

import numpy as np
import pytest
import torch

from easyckpt import shm
from easyckpt.errors import EasyckptError, Mismatch, Pinned, SaveFailed, StorageError, StorageFull, Unsupported
from easyckpt.flush import flush_segment
from easyckpt.storage import Files, FolderStorage, list_manifests


@pytest.fixture
def engine(engine):
    return functools.partial(engine, mode="copy")


@pytest.mark.parametrize("step", [np.int64(5), torch.tensor(5), np.array(5)], ids=["numpy", "tensor", "array"])
def test_whatever_is_a_whole_number_is_a_step(engine, step):
    """Steps come out of numpy and tensors as well: the snapshot carries the plain number."""
    checkpointer = engine()
    assert checkpointer.save(step, {"a": 1})
    checkpointer.wait(10)
    restored, _ = checkpointer.load()
    assert (type(restored.step), restored.step) == (int, 5)


@pytest.mark.parametrize(
    ("step", "error"),
    [(1.5, TypeError), ("7", TypeError), (True, TypeError), (torch.tensor(1.0), TypeError), (None, TypeError),
     (torch.tensor([1, 2]), TypeError), (-1, ValueError), (1 << 63, ValueError)],
    ids=repr,
)  # fmt: skip
def test_a_step_that_is_no_count_is_refused_at_once_and_the_engine_goes_on(engine, step, error):
    """The refusal names the step, nothing of it reaches the saving thread, and the next save is as good as ever."""
    checkpointer = engine()
    with pytest.raises(error, match="step"):
        checkpointer.save(step, {"a": 1})
    assert checkpointer.save(9, {"a": 2})
    checkpointer.wait(10)
    assert checkpointer.newest.step == 9


def test_a_failure_that_cannot_be_told_as_an_event_still_fails_the_save(engine):
    """A listener that raises on the saving thread ends neither the thread nor in silence: the next call raises, the one after saves."""

    def listener(event):
        if event.kind in ("save_sealed", "save_failed"):
            raise ValueError("the listener is broken")

    checkpointer = engine(on_event=listener)
    checkpointer.save(1, {"a": 1})
    with pytest.raises(SaveFailed, match="the listener is broken"):
        checkpointer.wait(10)
    checkpointer.save(2, {"a": 1})
    with pytest.raises(SaveFailed):
        checkpointer.wait(10)


def test_nothing_waits_for_a_saving_thread_that_has_ended(engine):
    """Were it to end against all care, each call says so at once and close returns."""
    checkpointer = engine()
    checkpointer._saver._jobs.put(None)
    checkpointer._saver._thread.join(10)
    done = threading.Event()

    def use():
        with pytest.raises(SaveFailed, match="saving thread has ended"):
            checkpointer.save(1, {"a": 1})
        checkpointer.close()
        done.set()

    threading.Thread(target=use, daemon=True).start()
    assert done.wait(30)


def test_a_clean_end_leaves_no_memory_that_holds_no_snapshot(engine, folder, tmp_path):
    """What was taken in advance after a restore goes at the end; a sealed snapshot that is not on storage stays."""
    first = engine(tmp_path / "ckpts")
    first.save(1, {"w": torch.ones(1 << 16)})
    first.close()
    second = engine(tmp_path / "ckpts")
    assert second.restore({"w": torch.zeros(1 << 16)}).step == 1
    second._saver.settle(30)
    assert list(folder.glob("*.safetensors"))
    second.close()
    assert not list(folder.glob("*.safetensors"))
    third = engine()
    third.save(2, {"w": torch.ones(1 << 16)})
    third.close()
    assert [path.name for path in folder.glob("*.safetensors")] == ["trainer-0.r0.s0.safetensors"]


def test_another_member_serves_only_where_the_own_snapshot_is_missing_or_damaged(engine):
    """A misfit of the own snapshot is raised: filling the state with another member's values would hide it."""
    a, b = engine(member="a"), engine(member="b")
    a.save(1, {"w": torch.full((2,), 9.0)})
    b.save(1, {"w": torch.full((3,), 5.0)})
    a.wait()
    b.wait()
    target = {"w": torch.zeros(2)}
    with pytest.raises(Mismatch, match="'w'"):
        b.restore(target)
    assert target["w"].tolist() == [0, 0]
    c = engine(member="c")
    assert c.restore(target).member == "a"


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "x"}, {"keep_every": 0}, {"keep_every": -2}, {"flush_every": "fast"}, {"flush_every": 0}, {"slots": 0},
     {"keep": 0}, {"rank": 1}, {"member": "../x"}, {"role": "a b"}],
    ids=repr,
)  # fmt: skip
def test_an_argument_out_of_range_is_named_at_open(engine, wrong):
    """Nothing is made and nothing is taken for something else."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        engine(**wrong)


def nested():
    return {"model": {"a": torch.ones(2), "b/c": torch.ones(2)}, "list": [1, (2, 3)], 7: "x", "step": 3}


@pytest.mark.parametrize("only", ["model", "model/a", ["model/b~1c"], ["list/1/0", "7"]], ids=repr)
def test_a_path_of_only_fills_what_it_leads_to(engine, only):
    """A text is one path, not its letters; paths are those that are shown."""
    checkpointer = engine()
    checkpointer.save(1, nested())
    target = nested()
    target["model"]["a"].zero_()
    assert checkpointer.restore(target, only=only).step == 1
    assert target["model"]["a"].tolist() == ([1, 1] if "model" in only[:5] else [0, 0])


@pytest.mark.parametrize("only", ["mdoel", ["model", "model/x"], ["list/2"], ["step/1"], [], ""], ids=repr)
def test_a_path_of_only_that_leads_nowhere_is_named(engine, only):
    """To restore nothing is no success."""
    checkpointer = engine()
    checkpointer.save(1, nested())
    target = nested()
    target["model"]["a"].zero_()
    with pytest.raises(Mismatch, match="only="):
        checkpointer.restore(target, only=only, strict=False)
    assert target["model"]["a"].tolist() == [0, 0]


def garble(path):
    path.write_bytes(path.read_bytes()[:-9] + b"x" * 9)


def replace(make):
    def act(path):
        path.unlink()
        make(path)

    return act


@pytest.mark.parametrize("damage", [garble, replace(os.mkfifo), replace(os.mkdir)], ids=["garbled", "pipe", "folder"])
@pytest.mark.parametrize("name", ["manifest.json", "trainer-0.r0.safetensors"])
def test_whatever_stands_in_place_of_a_file_is_refused_aloud(engine, tmp_path, damage, name):
    """A damaged manifest is told like damaged data, and so is what is no file at all; the step before serves."""
    first = engine(tmp_path / "ckpts")
    for step in (1, 2):
        first.save(step, {"w": torch.full((9,), float(step))})
        first.wait()
    first.close()
    damage(tmp_path / "ckpts" / "trainer" / "l000-s000000002-e000" / name)
    told = []
    second = engine(tmp_path / "ckpts", on_event=told.append)
    assert second.restore({"w": torch.zeros(9)}).step == 1
    assert [(event.tier, "s000000002" in event.text) for event in told if event.kind == "tier_refused"] == [
        ("storage", True)
    ]


def test_a_storage_that_no_other_process_sees_is_refused(engine):
    """The helper would flush into its own memory, and all of it would be lost."""
    for url in ("memory://x", "dir::memory://x", "simplecache::memory://x"):
        with pytest.raises(EasyckptError, match="memory://x"):
            engine(url)


def test_a_second_engine_of_the_same_rank_waits_for_the_first_ones_end(engine):
    """Two would overwrite each other's slots, in one process as well as in two."""
    first = engine()
    with pytest.raises(Pinned, match="another engine of this process"):
        engine()
    engine(member="other")
    first.close()
    engine().save(1, {"a": 1})


def test_a_state_that_holds_itself_or_text_that_is_none_is_refused_by_its_path(engine):
    """Both would only fail deep inside, without the place."""
    checkpointer = engine()
    loop: dict = {"inner": {}}
    loop["inner"]["outer"] = loop
    with pytest.raises(Unsupported, match=r"inner/outer/inner.*holds itself"):
        checkpointer.save(1, loop)
    with pytest.raises(Unsupported, match=r"state\['notes/0'\] has text that is no Unicode"):
        checkpointer.save(1, {"notes": ["\udc80"]})
    with pytest.raises(Unsupported, match="no Unicode"):
        checkpointer.save(1, {"\udc80": 1})


def test_a_storage_that_cannot_be_listed_is_named_and_nothing_begins_anew(engine, tmp_path):
    """To start from nothing beside checkpoints that are only out of reach would bury them."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    checkpointer = engine(loop)
    with pytest.raises(StorageError, match="cannot be listed"):
        checkpointer.restore({"w": torch.zeros(3)})
    with pytest.raises(StorageError, match="cannot be listed"):
        checkpointer.save(1, {"w": torch.zeros(3)})


@pytest.mark.parametrize("chain", [5, b"x", None])
def test_what_is_no_text_is_no_chain(engine, chain):
    checkpointer = engine()
    with pytest.raises(TypeError, match="chain"):
        checkpointer.save(1, {"w": torch.zeros(3)}, chain=chain)
    assert checkpointer.save(1, {"w": torch.zeros(3)}, chain="x")


def test_an_expanded_tensor_is_saved_and_refused_as_a_target_before_anything_changes(engine):
    """Several of its elements are one: torch fills no such tensor either."""
    checkpointer = engine()
    state = {"a": torch.ones(3), "scale": torch.full((1,), 2.0).expand(4)}
    checkpointer.save(1, state)
    state["a"].zero_()
    with pytest.raises(Mismatch, match=r"scale.*expanded"):
        checkpointer.restore(state)
    assert state["a"].sum() == 0
    assert checkpointer.load()[1]["scale"].tolist() == [2.0] * 4


def test_a_forgotten_restore_is_told_and_buries_nothing(engine, tmp_path):
    """The run begins from nothing beside what is there; the newest of that stays and can be named, whatever `keep` says."""
    first = engine(tmp_path, keep=2)
    for step in (98, 99, 100):
        first.save(step, {"w": torch.full((3,), float(step))})
        first.wait()
    first.close()
    heard = []
    second = engine(tmp_path, keep=1, on_event=heard.append)
    for step in (1, 2):
        second.save(step, {"w": torch.zeros(3)})
        second.wait()
    (told,) = [event.text for event in heard if event.kind == "begun_anew"]
    assert "step 100" in told
    give_up_at = time.monotonic() + 20  # the old ones go after the new one is there
    while [record.version for record in list_manifests(tmp_path)] != [(1, 2), (0, 100)]:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    restored, state = second.load(at=(0, 100))
    assert (restored.step, state["w"].tolist()) == (100, [100.0] * 3)
    second.save(101, {"w": torch.ones(3)})
    second.wait()
    assert second.newest.version == (2, 101)
    assert second.load()[0].step == 101


@pytest.mark.parametrize(
    "options",
    [
        {"flush_every": 1.5}, {"on_event": 5}, {"on_sealed": "no"}, {"folder": ""}, {"storage": ""}, {"storage": "/etc/passwd"},
        {"member": "m" * 300}, {"slots": 2.5},
    ],
)  # fmt: skip
def test_an_engine_that_could_not_work_is_not_opened(engine, options):
    (named,) = options
    with pytest.raises((TypeError, ValueError), match=named):
        engine(**options)


@pytest.mark.parametrize("at", [3, "x", (1,), (0, "5"), {"step": 3}])
def test_what_is_no_version_cannot_be_asked_for(engine, at):
    with pytest.raises(TypeError, match="lineage, step"):
        engine().restore({}, at=at)


def test_a_full_disk_leaves_no_empty_folders(engine, tmp_path, monkeypatch):
    """Each failed step tidies after itself."""
    root = tmp_path / "ckpts"
    checkpointer = engine(root, flush_every=None)
    checkpointer.save(1, {"w": torch.zeros(3)})
    checkpointer.wait()
    (segment,) = shm.scan(checkpointer.folder)

    class Full(Files):
        def write(self, _fd, _block, _at):
            raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(StorageFull):
        flush_segment(segment, FolderStorage(root, Full()))
    assert not root.exists() or list((root / "trainer").iterdir()) == []
