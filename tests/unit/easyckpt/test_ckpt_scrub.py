"""What lies in memory is read again by and by, and damage is found before it is needed."""

import os
import threading
import time

import msgspec
import pytest
import torch

from easyckpt import Checkpointer, layout, memory, replica, scrub, shm
from easyckpt.pieces import pieces
from easyckpt.scrub import Scrubber, Watched, choose, may_go, noticed

AFTER = 300.0


@pytest.fixture
def watch(folder):
    """A scrubber without its thread, and what it told."""

    def make(**fields):
        told, proven = [], []
        made = Scrubber(folder, told.append, proven.append, **fields)
        return made, told, proven

    return make


def flip(path, at=-9):
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def run_until_rest(one, now):
    """All slices that are due at this moment."""
    for _ in range(10_000):
        one.step(now)
        if choose(one._watched, now) is None:
            return
    raise AssertionError("it never rests")


def test_a_file_is_due_when_it_has_lain_unproven_and_another_under_its_name_begins_anew():
    watched = noticed({}, {"a": 1, "b": 2}, now=10.0, after_seconds=AFTER)
    assert {name: one.due_at for name, one in watched.items()} == {"a": 310.0, "b": 310.0}
    assert choose(watched, 309.0) is None
    watched["b"] = Watched(inode=2, due_at=311.0, at=64)
    assert choose(watched, 312.0) == "a", "the one that has been due longest"
    later = noticed(watched, {"b": 2, "a": 7}, now=20.0, after_seconds=AFTER)
    assert later["b"] == watched["b"]
    assert later["a"] == Watched(inode=7, due_at=320.0)
    assert noticed(later, {}, now=30.0, after_seconds=AFTER) == {}


@pytest.mark.parametrize(
    ("peer", "writer_lives", "others", "goes"),
    [
        (True, False, False, True),  # its owner sends it again
        (False, True, True, True),  # its writer makes a new one
        (False, True, False, False),  # it may be all that memory has
        (False, False, True, False),  # nobody makes a new one: a person may want what is left of it
    ],
)
def test_a_damaged_segment_goes_only_where_it_comes_back(peer, writer_lives, others, goes):
    assert may_go(peer=peer, writer_lives=writer_lives, others=others) is goes


def test_every_tensor_byte_is_in_one_piece_with_its_digest(make_segment):
    header = shm.read_header(make_segment())
    cut = pieces(header)
    assert [piece.begin for piece in cut] == [0, *[piece.end for piece in cut[:-1]]]
    assert cut[-1].end == header.data_bytes


def test_what_nobody_proves_is_read_when_it_is_due_and_what_a_flush_proved_is_not(watch, make_segment):
    one, told, proven = watch()
    path = make_segment(1)
    start = time.monotonic()
    run_until_rest(one, start)
    assert one.read_bytes == 0
    run_until_rest(one, start + AFTER)
    data_bytes = shm.read_header(path).data_bytes
    assert one.read_bytes == data_bytes
    assert [segment.header.step for segment in proven] == [1]
    run_until_rest(one, start + AFTER + 1)
    assert one.read_bytes == data_bytes, "once"
    one.note_proven(shm.read_segment(path))
    run_until_rest(one, time.monotonic() + AFTER - 1)
    assert one.read_bytes == data_bytes
    assert told == []


def test_the_rate_is_bounded(watch, make_segment):
    one, _, _ = watch(after_seconds=0.0)
    make_segment(1)
    rest = one.step(time.monotonic())
    assert rest == pytest.approx(one.read_bytes / scrub.RATE_BYTES_PER_SECOND)
    assert one.read_bytes > 0


@pytest.mark.parametrize("at", [-9, 300, -30_000], ids=["tensor", "header", "another tensor"])
def test_a_flipped_byte_is_told_once_and_the_segment_is_called_damaged(watch, make_segment, at):
    one, told, proven = watch()
    good, bad = make_segment(1, slot=0), make_segment(2, slot=1)
    segment = shm.read_segment(bad)
    flip(bad, at)
    start = time.monotonic()
    one.step(start)
    for later in (AFTER, AFTER + 20, AFTER + 40):
        run_until_rest(one, start + later + 1)
    assert [(damage.name, damage.version, damage.tier) for damage in told] == [(bad.name, (0, 2), "shm")]
    assert one.is_damaged(segment)
    assert not one.is_damaged(shm.read_segment(good))
    assert [proof.path.name for proof in proven] == [good.name]
    assert bad.exists(), "no writer lives who would make a new one"


def test_a_damaged_copy_goes_so_that_it_is_sent_again_and_the_one_before_stays(watch, folder, make_segment):
    one, told, _ = watch()
    for step in (1, 2):
        path = make_segment(step)
        replica.receive(folder, replica.open_for_send(path)[2], path.name)
    copies = [folder / f"trainer-0.r0.peer.s{slot}.safetensors" for slot in (0, 1)]
    flip(copies[1])
    pin = shm.pin(copies[1])
    start = time.monotonic()
    one.step(start)
    run_until_rest(one, start + AFTER + 1)
    assert copies[1].exists(), "somebody reads it"
    shm.unpin(pin)
    run_until_rest(one, start + AFTER + 20)
    assert [path.exists() for path in copies] == [True, False]
    assert [damage.tier for damage in told] == ["peer"]


def test_what_a_save_leaves_in_its_slot_is_proven_and_damage_there_is_not_sealed_again(watch, folder, tmp_path):
    """The base weights of an adapter: copied once, then only their source is hashed. A bit that flips in the slot is found; the next save copies all."""
    model = torch.nn.Linear(400, 400, bias=False).requires_grad_(False)
    state = {"base": model, "adapter": torch.zeros(40)}
    engine = Checkpointer(folder=folder, on_sealed=lambda *_: None, on_event=lambda _event: None)
    try:
        for step in range(1, 7):
            state["adapter"].fill_(step)
            assert engine.save(step, state)
            engine.wait(30)
        newest = shm.scan(folder)[0]
        base = next(entry for entry in newest.header.tensors if entry.name.startswith("base"))
        flip(newest.path, newest.prefix_bytes + base.offsets[0])
        for step in (7, 8):
            assert engine.save(step, state)
            engine.wait(30)
        assert shm.scan(folder)[0].path == newest.path, "sealed over the damage"
        one, told, _ = watch()
        start = time.monotonic()
        run_until_rest(one, start)
        run_until_rest(one, start + AFTER)
        assert [(damage.name, damage.version) for damage in told] == [(newest.path.name, (0, 8))]
        assert "'base" in told[0].text
        assert not newest.path.exists()
        for step in (9, 10):
            assert engine.save(step, state)
            engine.wait(30)
        for segment in shm.scan(folder):
            shm.verify(segment.path)
        assert {segment.header.step for segment in shm.scan(folder)} == {9, 10}
    finally:
        engine.close()


def test_a_writer_that_comes_is_no_damage_and_the_pass_goes_on_over_what_it_sealed(
    watch, folder, make_segment, monkeypatch
):
    """Nothing is pinned meanwhile, so a save takes the very slot; all its bytes are read in the end, half before and half after."""
    monkeypatch.setattr(scrub, "SLICE_BYTES", 8)
    one, told, proven = watch()
    path = make_segment(1)
    start = time.monotonic()
    one.step(start)
    one.step(start + AFTER)
    assert one._watched[path.name].at > 0
    assert shm.pinned_names(folder) == set()
    with open(path, "r+b") as file:
        file.write(layout.UNSEALED)
    run_until_rest(one, start + AFTER + 1)
    make_segment(2)
    run_until_rest(one, start + AFTER + 100)
    assert told == []
    assert proven == [], "no snapshot was read whole"
    assert one._watched[path.name].due_at > start + AFTER + 101


def test_memory_that_is_given_back_while_it_is_read_raises_no_signal(watch, make_segment):
    """A file that is punched or cut short under the reader is a wrong digest, not a SIGBUS."""
    one, told, proven = watch()
    path = make_segment(1)
    segment = shm.read_segment(path)
    start = time.monotonic()
    one.step(start)
    with open(path, "r+b") as file:
        one._plan_of(file.fileno(), path, segment.opening)
        os.truncate(path, segment.prefix_bytes + 9)
        run_until_rest(one, start + AFTER + 1)
        assert len(told) == 1
        memory.free(file.fileno())
        run_until_rest(one, start + AFTER + 100)
    assert proven == []


def test_the_thread_finds_damage_by_itself_and_rests_while_a_flush_runs(watch, make_segment):
    one, told, _ = watch(after_seconds=0.01)
    path = make_segment(1)
    flip(path)
    with one.resting():
        one.start()
        other = threading.Thread(target=one.suspect, args=([msgspec.structs.replace(shm.read_segment(path))],))
        other.start()
        other.join(10)
        assert one.read_bytes == 0
    give_up_at = time.monotonic() + 20
    while not told:
        assert time.monotonic() < give_up_at
        time.sleep(0.005)
    one.close()
    assert not one._thread.is_alive()
