"""The power goes at any call of a flush: whatever the disk kept of what it was not told to keep, a whole checkpoint is there.

`Disk` does every call for real and keeps a second picture: bytes last until their file was synced, names until their folder was. At a cut an
image is made of what is sure to be there, and, at the disk's whim, of some of the rest: names without their bytes, or the other way round.
"""

import os
import random

import pytest

from easyckpt import shm
from easyckpt.flush import flush_segment, tidy, verify_stored
from easyckpt.storage import Files, FolderStorage, list_manifests


class Node:
    """A file or folder: as it is now, and as it would be after a cut."""

    def __init__(self, *, folder):
        self.now = {} if folder else bytearray()
        self.sure = {} if folder else b""

    def sync(self):
        self.sure = dict(self.now) if isinstance(self.now, dict) else bytes(self.now)


class Disk(Files):
    """A folder on a disk with a cache that forgets."""

    def __init__(self, top):
        self.top = top
        self.root = Node(folder=True)
        self.open_nodes = {}
        self.calls = []
        self.after_call = lambda: None

    def find(self, path):
        node = self.root
        for part in path.relative_to(self.top).parts:
            node = node.now[part]
        return node

    def name(self, path, node):
        self.find(path.parent).now[path.name] = node

    def done(self, call):
        self.calls.append(call)
        self.after_call()

    def open(self, path, flags):
        fd = super().open(path, flags)
        siblings = self.find(path.parent).now if path != self.top else {}
        if flags & os.O_CREAT and path.name not in siblings:
            siblings[path.name] = Node(folder=False)
        self.open_nodes[fd] = self.find(path)
        if flags & os.O_TRUNC:
            self.open_nodes[fd].now.clear()
        self.done(f"open {path.name}")
        return fd

    def write(self, fd, block, at):
        written = super().write(fd, block, at)
        self.open_nodes[fd].now[at : at + written] = block[:written]
        self.done("write")
        return written

    def fsync(self, fd):
        super().fsync(fd)
        self.open_nodes[fd].sync()
        self.done("fsync")

    def rename(self, source, target):
        super().rename(source, target)
        self.name(target, self.find(source.parent).now.pop(source.name))
        self.done("rename")

    def link(self, source, target):
        super().link(source, target)
        self.name(target, self.find(source))
        self.done("link")

    def unlink(self, path):
        super().unlink(path)
        del self.find(path.parent).now[path.name]
        self.done("unlink")

    def make_folder(self, path):
        super().make_folder(path)
        self.name(path, Node(folder=True))
        self.done("make_folder")

    def remove_folder(self, path):
        super().remove_folder(path)
        del self.find(path.parent).now[path.name]
        self.done("remove_folder")

    def image(self, target, whim, node=None):
        """What a cut leaves: `whim(name)` says whether a change that was not synced is there all the same."""
        target.mkdir(parents=True)
        node = node or self.root
        for name in {**node.sure, **node.now}:
            before, after = node.sure.get(name), node.now.get(name)
            kept = before if before is after or not whim(name) else after
            if kept is None:
                continue
            if isinstance(kept.now, dict):
                self.image(target / name, whim, kept)
            else:
                synced = bytes(kept.now) == kept.sure or not whim("bytes")
                (target / name).write_bytes(kept.sure if synced else bytes(kept.now))


def whims(seed):
    """Nothing but what is sure; all names but no bytes; everything; and a toss for each."""
    chance = random.Random(seed)
    return {
        "nothing": lambda _name: False,
        "names without bytes": lambda name: name != "bytes",
        "everything": lambda _name: True,
        "a toss": lambda _name: chance.random() < 0.5,
        "another toss": lambda _name: chance.random() < 0.5,
    }


@pytest.fixture
def disk(tmp_path):
    top = tmp_path / "disk"
    top.mkdir()
    return Disk(top)


def test_a_cut_at_any_call_of_a_flush_or_of_retention_leaves_a_whole_checkpoint(disk, tmp_path, make_segment):
    """Step 1 lies there, step 2 is flushed, step 1 is deleted: after a cut at any call the newest is there, and every manifest leads to bytes that prove."""
    storage = FolderStorage(disk.top / "deep" / "ckpts", disk)
    cuts, acknowledged = [], [0]

    def cut():
        for kind, whim in whims(len(disk.calls)).items():
            place = tmp_path / f"cut-{len(cuts)}"
            disk.image(place, whim)
            cuts.append((place, acknowledged[0], f"{kind} after {disk.calls[-1]} ({len(disk.calls)})"))

    disk.after_call = cut
    for step in (1, 2):
        flush_segment(shm.read_segment(make_segment(step)), storage)
        acknowledged[0] = step
        cut()
    assert tidy(storage, role="trainer", keep=1, now=0.0) == ["trainer/l000-s000000001-e000"]
    cut()
    assert len(cuts) > 200
    seen = set()
    for place, least, what in cuts:
        records = list_manifests(place / "deep" / "ckpts")
        if not records:
            assert least == 0, what
            continue
        for record in records:
            verify_stored(place / "deep" / "ckpts", record)
        assert records[0].step >= least, what
        seen.add((least, records[0].step))
    assert seen == {(0, 1), (1, 1), (1, 2), (2, 2)}


def test_the_disk_here_does_forget(disk, tmp_path):
    """What was written but never synced is gone after a cut, and what was synced under a name that was not is unreachable."""
    for name in ("synced", "not synced"):
        fd = disk.open(disk.top / name, os.O_CREAT | os.O_WRONLY)
        disk.write(fd, memoryview(b"x"), 0)
        if name == "synced":
            disk.fsync(fd)
        os.close(fd)
    disk.image(tmp_path / "a", lambda _name: False)
    disk.image(tmp_path / "b", lambda name: name != "bytes")
    assert list((tmp_path / "a").iterdir()) == []
    assert {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()} == {"synced": b"x", "not synced": b""}
