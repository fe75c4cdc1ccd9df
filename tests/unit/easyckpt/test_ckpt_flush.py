"""From memory to storage, and what every failure on the way leaves behind."""

import errno
import fcntl
import os
import shutil
import stat
import time

import pytest

from easyckpt import flush, manifest, shm
from easyckpt.errors import AlreadyFlushed, Corrupt, EasyckptError, StorageDenied, StorageError, StorageFull, Torn
from easyckpt.events import Events
from easyckpt.flush import Flusher, flush_segment, newest_to_flush, tidy, verify_stored
from easyckpt.storage import Files, FolderStorage, list_manifests


class BrokenFiles(Files):
    """A disk that fails in one way, from the `after`-th call of one kind on; or takes few bytes at a time."""

    def __init__(self, kind: str, error: int = errno.EIO, *, after: int = 0) -> None:
        self.kind, self.error, self.left = kind, error, after

    def _maybe(self, kind: str) -> None:
        if kind == self.kind:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.error, os.strerror(self.error))

    def open(self, path, flags):
        self._maybe("open")
        if self.kind == "no-direct" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct writes here")
        return super().open(path, flags)

    def write(self, fd, block, at):
        self._maybe("write")
        is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        if is_direct and (self.kind == "no-direct-write" or (self.kind == "wide-blocks" and len(block) % 65536)):
            raise OSError(errno.EINVAL, "not aligned enough")
        return super().write(fd, block[:1000] if self.kind == "short" else block, at)

    def fsync(self, fd):
        self._maybe("fsync")
        super().fsync(fd)

    def rename(self, source, target):
        self._maybe("rename")
        if self.kind != "rename-lost":
            super().rename(source, target)

    def link(self, source, target):
        self._maybe("link")
        super().link(source, target)


def steps(storage):
    return [record.step for record in list_manifests(storage)]


def test_a_flushed_segment_is_the_same_file_with_a_manifest(tmp_path, make_segment):
    path = make_segment(7, chain="abc", epoch=2)
    record = flush_segment(shm.read_segment(path), tmp_path / "deep" / "ckpts")
    folder = tmp_path / "deep" / "ckpts" / "trainer" / "l000-s000000007-e002"
    assert (folder / "trainer-0.r0.safetensors").read_bytes() == path.read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "trainer-0.r0.safetensors"]
    assert list_manifests(tmp_path / "deep" / "ckpts") == [record]
    assert record.chain == "abc"
    verify_stored(tmp_path / "deep" / "ckpts", record)
    assert shm.pinned_names(path.parent) == set()


def test_files_follow_the_umask_and_parents_keep_their_mode(tmp_path, make_segment):
    tmp_path.chmod(0o751)
    before = os.umask(0o027)
    try:
        flush_segment(shm.read_segment(make_segment(1)), tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o751
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


@pytest.mark.parametrize("kind", ["short", "no-direct", "no-direct-write", "wide-blocks"])
def test_file_systems_with_short_writes_or_no_direct_ones_get_the_same_bytes(tmp_path, make_segment, kind):
    path = make_segment(1)
    flush_segment(shm.read_segment(path), FolderStorage(tmp_path, BrokenFiles(kind)))
    assert next(tmp_path.rglob("*.safetensors")).read_bytes() == path.read_bytes()


def test_where_there_are_no_links_the_manifest_is_still_exclusive(tmp_path, make_segment):
    storage = FolderStorage(tmp_path, BrokenFiles("link", errno.EOPNOTSUPP))
    flush_segment(shm.read_segment(make_segment(1)), storage)
    assert steps(tmp_path) == [1]
    with pytest.raises(AlreadyFlushed):
        storage.commit("trainer/l000-s000000001-e000", b"x")


@pytest.mark.parametrize(
    ("kind", "error", "raised"),
    [
        ("write", errno.ENOSPC, StorageFull),
        ("write", errno.EDQUOT, StorageFull),
        ("write", errno.EIO, StorageError),
        ("open", errno.ESTALE, StorageError),
        ("write", errno.ESTALE, StorageError),
        ("fsync", errno.EIO, StorageError),
        ("fsync", errno.ENOSPC, StorageFull),
        ("open", errno.EROFS, StorageDenied),
        ("open", errno.EACCES, StorageDenied),
        ("rename", errno.EIO, StorageError),
        ("link", errno.ENOSPC, StorageFull),
    ],
)
def test_every_failure_of_the_disk_leaves_the_checkpoint_before_intact(tmp_path, make_segment, kind, error, raised):
    """At each call of each kind: a named error, no manifest, no stray bytes of the failed shard, and the next flush works."""
    flush_segment(shm.read_segment(make_segment(1)), tmp_path)
    path = make_segment(2, slot=1)
    failures = 0
    for after in range(20):
        try:
            flush_segment(shm.read_segment(path), FolderStorage(tmp_path, BrokenFiles(kind, error, after=after)))
        except raised as caught:
            failures += 1
            said = str(caught)
            if steps(tmp_path) == [2, 1]:  # only the folder's own fsync after the manifest failed
                break
            assert "intact" in said
            assert steps(tmp_path) == [1]
            assert not list(tmp_path.rglob("*.part"))
            verify_stored(tmp_path, list_manifests(tmp_path)[0])
        else:
            break
    assert failures
    if steps(tmp_path) == [1]:
        flush_segment(shm.read_segment(path), tmp_path)
    assert steps(tmp_path) == [2, 1]


def test_after_a_failed_sync_the_bytes_are_written_anew(tmp_path, make_segment):
    """A disk that failed to sync may have dropped the pages: syncing the same file again would prove nothing."""
    path = make_segment(1)
    files = BrokenFiles("fsync", after=2)  # the folders' own come first
    with pytest.raises(StorageError):
        flush_segment(shm.read_segment(path), FolderStorage(tmp_path, files))
    files.kind, written = "", []
    write = files.write
    files.write = lambda fd, block, at: (written.append(len(block)), write(fd, block, at))[1]
    flush_segment(shm.read_segment(path), FolderStorage(tmp_path, files))
    assert sum(written) >= path.stat().st_size
    assert steps(tmp_path) == [1]


def test_a_rename_that_was_lost_is_found_when_it_is_read(tmp_path, make_segment):
    """The disk said yes and forgot: the checkpoint does not verify, and the one before does."""
    flush_segment(shm.read_segment(make_segment(1)), tmp_path)
    record = flush_segment(shm.read_segment(make_segment(2)), FolderStorage(tmp_path, BrokenFiles("rename-lost")))
    with pytest.raises((EasyckptError, OSError)):
        verify_stored(tmp_path, record)
    verify_stored(tmp_path, list_manifests(tmp_path)[1])


def test_a_second_writer_of_the_same_step_is_told_so(tmp_path, make_segment):
    flush_segment(shm.read_segment(make_segment(1)), tmp_path)
    with pytest.raises(AlreadyFlushed):
        flush_segment(shm.read_segment(make_segment(1, member="trainer-1")), tmp_path)
    assert [record.member for record in list_manifests(tmp_path)] == ["trainer-0"]


def test_a_damaged_segment_is_not_flushed(tmp_path, make_segment):
    path = make_segment(1)
    with open(path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"!")
    with pytest.raises(Corrupt):
        flush_segment(shm.read_segment(path), tmp_path)
    assert list_manifests(tmp_path) == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_only_a_whole_step_is_flushed(tmp_path, folder, make_segment):
    """All ranks of one member have it; two members' halves make no whole."""
    make_segment(1, rank=0, ranks=2)
    make_segment(1, rank=1, ranks=2)
    make_segment(2, rank=0, ranks=2, slot=1)
    make_segment(2, rank=1, ranks=2, slot=1, member="trainer-1")
    chosen = newest_to_flush(shm.scan(folder), "trainer", [])
    assert [(one.header.step, one.header.rank) for one in chosen] == [(1, 0), (1, 1)]
    assert len(flush_segment(chosen, tmp_path).shards) == 2
    with pytest.raises(EasyckptError, match="not whole"):
        flush_segment(chosen[:1], tmp_path)


def test_the_newest_marked_step_is_flushed_and_old_ones_go(tmp_path, folder, make_segment):
    events = Events(lambda _event: None)
    flusher = Flusher(folder, tmp_path, keep=2, events=events)
    for step in (1, 2, 3):
        make_segment(step, slot=step % 2)
        assert flusher.flush_newest().step == step
        assert flusher.flush_newest() is None
    make_segment(4, slot=0, flush=False)
    assert flusher.flush_newest() is None
    assert steps(tmp_path) == [3, 2]
    assert flusher.flush_newest(marked_only=False).step == 4
    assert events.counts["flush_committed"] == 4


def test_a_failed_flush_is_told_and_tried_again(tmp_path, folder, make_segment):
    events = Events(lambda _event: None)
    files = BrokenFiles("write", errno.ENOSPC)
    flusher = Flusher(folder, FolderStorage(tmp_path, files), events=events)
    make_segment(1)
    with pytest.raises(StorageFull):
        flusher.flush_newest()
    assert events.counts["flush_failed"] == 1
    files.kind = ""
    assert flusher.flush_newest().step == 1


def test_housekeeping_that_fails_is_told_and_not_fatal(tmp_path, folder, make_segment):
    events = Events(lambda _event: None)

    class Sticky(FolderStorage):
        def delete(self, folder):
            raise StorageDenied(f"{folder} may not be removed")

    flusher = Flusher(folder, Sticky(tmp_path), keep=1, events=events)
    for step in (1, 2):
        make_segment(step, slot=step % 2)
        flusher.flush_newest()
    assert events.counts["housekeeping_failed"] == 1
    assert steps(tmp_path) == [2, 1]


def test_folders_of_flushes_that_died_are_swept_once_they_are_old(tmp_path, make_segment):
    """Young ones may belong to a flush that is running."""
    flush_segment(shm.read_segment(make_segment(1)), tmp_path)
    stray = tmp_path / "trainer" / "l000-s000000002-e000"
    stray.mkdir()
    (stray / ".trainer-0.r0.safetensors.1.part").write_bytes(b"half")
    (tmp_path / "trainer" / "mine").mkdir()
    assert tidy(tmp_path, role="trainer", keep=3, now=time.time()) == []
    assert tidy(tmp_path, role="trainer", keep=3, now=time.time() + 2 * flush.STRAY_SECONDS) == [
        "trainer/" + stray.name
    ]
    assert not stray.exists()
    assert (tmp_path / "trainer" / "mine").exists()
    assert steps(tmp_path) == [1]


def test_every_flipped_byte_on_storage_is_found(tmp_path, make_segment):
    """In headers, tensors and padding, and a shard that was cut short or swapped for another step's."""
    record = flush_segment(shm.read_segment(make_segment(1)), tmp_path)
    shard = next(tmp_path.rglob("*.safetensors"))
    raw = shard.read_bytes()
    for at in [*range(0, record.shards[0].prefix_bytes, 101), *range(record.shards[0].prefix_bytes, len(raw), 1009)]:
        shard.write_bytes(raw[:at] + bytes([raw[at] ^ 8]) + raw[at + 1 :])
        with pytest.raises(EasyckptError):
            verify_stored(tmp_path, record)
    shard.write_bytes(raw[:-1])
    with pytest.raises(Corrupt):
        verify_stored(tmp_path, record)
    shutil.copy(make_segment(2), shard)
    with pytest.raises(Corrupt):
        verify_stored(tmp_path, record)


def test_a_damaged_manifest_is_no_checkpoint(tmp_path, make_segment):
    flush_segment(shm.read_segment(make_segment(1)), tmp_path)
    flush_segment(shm.read_segment(make_segment(2)), tmp_path)
    newest = tmp_path / "trainer" / "l000-s000000002-e000" / manifest.FILE_NAME
    newest.write_bytes(newest.read_bytes().replace(b'"step":2', b'"step":9'))
    assert steps(tmp_path) == [1]
    newest.write_bytes(b"")
    assert steps(tmp_path) == [1]


def test_a_segment_overwritten_before_the_flush_is_left_alone(tmp_path, folder, make_segment):
    chosen = shm.read_segment(make_segment(1))
    make_segment(2)
    with pytest.raises(Torn):
        flush_segment(chosen, tmp_path)
    chosen.path.unlink()
    with pytest.raises(Torn):
        flush_segment(chosen, tmp_path)
    make_segment(2)
    assert steps(tmp_path) == []
    assert Flusher(folder, tmp_path).flush_newest().step == 2
