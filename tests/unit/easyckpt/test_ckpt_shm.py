"""A node's segment folder from outside the writer."""

import os
import signal
import subprocess
import sys
import time

import pytest

from easyckpt import layout, shm
from easyckpt.errors import Corrupt, EasyckptError, NoRoom, Pinned, Unsealed
from easyckpt.layout import SegmentName
from easyckpt.mappings import Mappings
from easyckpt.slot import Slot


def unseal(path):
    with open(path, "r+b") as file:
        file.write(bytes(8))


def test_scan_finds_sealed_segments_newest_first(folder, make_segment):
    """What is unsealed, cut short, foreign or no segment at all is left out, silently."""
    make_segment(1, slot=0)
    make_segment(2, slot=1)
    unseal(make_segment(3, slot=2))
    cut = make_segment(4, slot=3)
    os.truncate(cut, cut.stat().st_size - 1)
    (folder / str(SegmentName(member="x", rank=0, slot=0))).write_bytes(b"not a segment at all" * 1000)
    (folder / "notes.txt").write_text("hello")
    assert [segment.header.step for segment in shm.scan(folder)] == [2, 1]
    assert {segment.tier for segment in shm.scan(folder)} == {"shm"}
    assert shm.scan(folder / "absent") == []


def test_verify_finds_every_flipped_byte(make_segment):
    """Any byte of any tensor: a sample over the whole file, both ends and every tensor included."""
    path = make_segment(1)
    raw = path.read_bytes()
    assert shm.verify(path).header.step == 1
    prefix = len(raw) - shm.read_header(path).data_bytes
    for at in [prefix, prefix + 23, prefix + 24, len(raw) - 1, *range(prefix, len(raw), 997)]:
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(bytes([raw[at] ^ 1]))
        with pytest.raises(Corrupt, match="digest"):
            shm.verify(path)
        path.write_bytes(raw)


def test_a_pinned_segment_is_not_overwritten_until_unpinned(make_segment):
    path = make_segment(1)
    mark = shm.pin(path, deadline=60)
    slot = Slot(path)
    slot.fit(4096, shm.read_header(path).data_bytes)
    with pytest.raises(Pinned):
        slot.claim()
    assert shm.verify(path).header.step == 1
    shm.unpin(mark)
    shm.unpin(mark)
    slot.claim()
    assert shm.peek(path) is None
    slot.close()


def test_what_is_being_written_cannot_be_pinned(make_segment):
    path = make_segment(1)
    unseal(path)
    with pytest.raises(Unsealed):
        shm.pin(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        shm.pin(path)


def test_a_pin_ends_with_its_deadline(folder, make_segment):
    shm.pin(make_segment(1), deadline=0)
    assert shm.pinned_names(folder) == set()
    assert not list(folder.glob("*.pin.*"))


def test_a_pin_ends_with_its_process(folder, make_segment):
    """Killed, even while nobody has reaped it yet; and a later process of the same number does not revive it."""
    path = make_segment(1)
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        mark = shm.pin(path, holder.pid, deadline=600)
        assert shm.pinned_names(folder) == {path.name}
        holder.send_signal(signal.SIGKILL)
        wait_for(lambda: shm.start_time(holder.pid) is None)
        assert shm.pinned_names(folder) == set()
        assert not mark.exists()
    finally:
        holder.kill()
        holder.wait()
    (folder / f"{path.name}.pin.{os.getpid()}.1.{10**15}").touch()
    assert shm.pinned_names(folder) == set()


def test_two_writers_of_the_same_segments_are_refused(folder):
    """The second is told the first one's process; a killed one's mark holds nobody up."""
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[2]); from pathlib import Path; from easyckpt import shm;"
        " shm.claim_writer(Path(sys.argv[1]), 'trainer-0.r0'); print('ready', flush=True); time.sleep(60)"
    )
    root = os.path.dirname(os.path.dirname(shm.__file__))
    other = subprocess.Popen([sys.executable, "-c", code, str(folder), root], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"ready\n"
        with pytest.raises(Pinned, match=str(other.pid)):
            shm.claim_writer(folder, "trainer-0.r0", wait_seconds=0)
        shm.claim_writer(folder, "trainer-0.r1", wait_seconds=0)
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    shm.claim_writer(folder, "trainer-0.r0", wait_seconds=0)


def test_reclaim_removes_only_what_nobody_can_use(folder, make_segment):
    sealed, torn, busy = make_segment(1, slot=0), make_segment(2, slot=1), make_segment(3, member="b")
    unseal(torn)
    unseal(busy)
    mark = shm.claim_writer(folder, "b.r0")
    assert shm.reclaim(folder) == [torn]
    shm.unpin(mark)
    pin = shm.pin(sealed)
    assert shm.reclaim(folder, keep_sealed=False) == [busy]
    shm.unpin(pin)
    assert shm.reclaim(folder, keep_sealed=False) == [sealed]


def test_memory_that_is_not_there_is_refused_before_it_is_touched(folder):
    """The message names what is needed, what is free and how to mend it; no file is left and nothing dies of SIGBUS later."""
    slot = Slot(folder / "trainer-0.r0.s0.safetensors")
    with pytest.raises(NoRoom, match="shm-size") as caught:
        slot.fit(4096, 1 << 50)
    assert caught.value.needed_bytes == (1 << 50) + 4096
    assert 0 < caught.value.free_bytes < 1 << 50
    assert os.listdir(folder) == []


def test_memory_that_was_taken_is_taken(folder):
    """Not only promised: whoever fills the file system afterwards cannot make a write into it fail."""
    path = folder / "trainer-0.r0.s0.safetensors"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        shm.allocate(fd, 3 << 20, str(path))
        assert os.fstat(fd).st_blocks * 512 == os.fstat(fd).st_size == 3 << 20
    finally:
        os.close(fd)


def test_a_slot_of_another_size_gets_a_new_file_under_its_readers(make_segment):
    """Who has the old file open keeps reading it whole: a mapped file is never cut short."""
    path = make_segment(1)
    with open(path, "rb") as reader:
        slot = Slot(path)
        slot.fit(8192, 80)
        slot.claim()
        assert shm.segment_of(reader.fileno(), path).header.step == 1
        assert path.stat().st_size == 8192 + 80
        slot.close()


def test_an_unlinked_slot_is_noticed(make_segment):
    path = make_segment(1)
    slot = Slot(path)
    slot.fit(4096, shm.read_header(path).data_bytes)
    assert not slot.is_lost()
    path.unlink()
    assert slot.is_lost()
    slot.close()


def test_a_folder_of_someone_else_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises((EasyckptError, FileExistsError)):
        shm.open_folder(tmp_path / "link")
    assert shm.open_folder(tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert shm.default_folder("ckpts") == shm.default_folder(os.path.abspath("ckpts"))


def wait_for(condition, seconds=10.0):
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_the_page_of_a_header_is_what_tensors_follow(make_segment):
    assert shm.read_segment(make_segment(1)).prefix_bytes % layout.PAGE_BYTES == 0


def test_a_kept_mapping_is_let_go_when_its_file_is_replaced(folder, make_segment):
    """And while it is kept, it shows what is written to the file."""
    path = make_segment(step=1)
    mappings = Mappings()
    for step in (1, 2):
        segment = shm.read_segment(make_segment(step=step))
        with path.open("rb") as file, mappings.mapped(file.fileno(), segment) as view:
            assert layout.peek(bytes(view[: layout.PEEK_BYTES])) == (0, step)
    assert len(mappings._held) == 1
    path.unlink()
    mappings.tidy()
    assert not mappings._held


def test_a_slot_of_another_size_takes_the_old_memory_where_it_needs_it(make_segment, monkeypatch):
    """Though a reader still has it mapped: what it reads then matches no digest, and no signal ends it."""
    path = make_segment(step=1)
    segment = shm.read_segment(path)
    with path.open("rb") as file, shm.mapped(file.fileno(), segment.nbytes) as view:
        monkeypatch.setattr(shm, "free_bytes", lambda _fd: 2**20 if os.fstat(file.fileno()).st_blocks == 0 else 0)
        place = Slot(path)
        place.fit(segment.prefix_bytes, 4 * segment.header.data_bytes)
        place.close()
        assert not any(view)
        assert not shm.is_same(file.fileno(), segment)


def test_a_folder_under_the_name_of_a_segment_is_a_stranger(folder, make_segment):
    make_segment(1)
    (folder / "trainer-0.r0.s1.safetensors").mkdir()
    assert [str(name) for name in shm.segment_names(folder)] == ["trainer-0.r0.s0.safetensors"]
    assert shm.strangers(folder) == ["trainer-0.r0.s1.safetensors"]
    assert [segment.header.step for segment in shm.scan(folder)] == [1]
