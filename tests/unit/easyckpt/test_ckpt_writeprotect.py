"""Saving by write protection: everything may change the moment `save` returns, and nobody is ever left waiting."""

import ctypes
import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from easyckpt import shm, userfault, writeprotect_guard
from easyckpt.errors import Refused, SaveFailed
from easyckpt.writeprotect import is_within, private_memory
from easyckpt.writeprotect_guard import Guard, Region
from easyckpt.writeprotect_helper import BLOCK_BYTES, blocks_of, spans_of

ROOT = os.path.dirname(os.path.dirname(shm.__file__))
try:
    os.close(userfault.open_userfault())  # only this: what else the machine lacks must not go unseen here
    WHY_NOT = ""
except Refused as refused:
    WHY_NOT = str(refused)
protects = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
LARGE = 600_000  # floats: more than a mebibyte, and no whole number of pages


@pytest.fixture
def engine(engine):
    return functools.partial(engine, mode="protect")


def filled(value):
    """Large and small tensors, and one that begins in the middle of a page."""
    base = torch.full((LARGE + 300,), float(value))
    return {
        "a": torch.full((LARGE,), float(value)),
        "small": torch.tensor(float(value)),
        "inner": base[137 : 137 + LARGE],
        "step": value,
    }


def write_all(state, value):
    for tensor in (one for one in state.values() if isinstance(one, torch.Tensor)):
        tensor.fill_(float(value))
    state["step"] = value


def is_of(state, value):
    return state["step"] == value and all(
        bool((one == value).all()) for one in state.values() if isinstance(one, torch.Tensor)
    )


@protects
def test_what_changes_right_after_the_save_never_shows_in_it(engine):
    """No optimizer, no ready(): every tensor is rewritten at once, five times, while the helper copies."""
    checkpointer = engine()
    state = filled(0)
    for step in range(1, 6):
        write_all(state, step)
        assert checkpointer.save(step, state)
        write_all(state, -1)
        checkpointer.wait()
        assert is_of(checkpointer.load()[1], step)
    assert checkpointer.events.counts["protect_refused"] == 0


@protects
def test_large_tensors_are_not_copied_by_the_trainer(engine, monkeypatch):
    """What it copies itself is small tensors and less than two pages at the ends of each large one."""
    from easyckpt import memory

    moved = []

    def watched(copy):
        return lambda target, source, nbytes: (moved.append(nbytes), copy(target, source, nbytes))

    for name in ("copy", "copy_small"):
        monkeypatch.setattr(memory, name, watched(getattr(memory, name)))
    checkpointer = engine()
    checkpointer.save(1, filled(1))
    checkpointer.wait()
    assert 0 < sum(moved) <= 4 + 2 * 2 * 4096
    assert is_of(checkpointer.load()[1], 1)


@protects
def test_a_writer_that_holds_the_interpreters_lock_is_let_go(engine):
    """memoryview writes with the lock held, so no thread of the trainer could help it: the helper does."""
    checkpointer = engine()
    tensor = torch.zeros(8 << 20)
    checkpointer.save(1, {"w": tensor})
    view = memoryview(tensor.numpy()).cast("B")
    ones = bytes([1]) * (1 << 20)
    for at in range(view.nbytes - len(ones), -1, -len(ones)):  # from the end: where the copy is last
        view[at : at + len(ones)] = ones
    checkpointer.wait()
    assert checkpointer.load()[1]["w"].abs().sum() == 0
    assert int(tensor.view(torch.int32)[0]) == 0x01010101


class Caught:
    """Sends the helper a signal the moment everything is protected."""

    def __init__(self, monkeypatch, number):
        begin = Guard.begin

        def stopped(this, path, address, regions, **options):
            hear = this._hear

            def hear_and_stop(seconds):
                reply = hear(seconds)
                os.kill(this.helper_pid, number)
                return reply

            this._hear = hear_and_stop if regions else hear
            try:
                return begin(this, path, address, regions, **options)
            finally:
                this._hear = hear

        monkeypatch.setattr(Guard, "begin", stopped)


@protects
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_helper_that_dies_or_stands_still_holds_nobody_up(engine, monkeypatch, how):
    """The writes go on, that snapshot is not sealed and the trainer hears of it, the one before is intact, the next save works."""
    monkeypatch.setattr(writeprotect_guard, "STILL_SECONDS", 1.0)
    checkpointer = engine()
    state = {"w": torch.full((32 << 20,), 1.0), "step": 1}
    checkpointer.save(1, state)
    checkpointer.wait()
    with monkeypatch.context() as patch:
        Caught(patch, how)
        checkpointer.save(2, state)
    state["w"].fill_(3.0)
    with pytest.raises(SaveFailed, match="write-protected"):
        checkpointer.wait()
    assert [one.step for one in checkpointer.candidates()] == [1]
    state["step"] = 3
    assert checkpointer.save(3, state)
    state["w"].fill_(4.0)
    checkpointer.wait()
    loaded = checkpointer.load()[1]
    assert loaded["step"] == 3
    assert bool((loaded["w"] == 3.0).all())


@protects
def test_a_helper_that_keeps_dying_is_given_up_and_saves_copy_at_once(engine):
    checkpointer = engine()
    state = filled(0)
    for step in range(1, 6):
        guard = checkpointer._saver._shield._guard
        if guard._process is not None:
            os.killpg(guard._process.pid, signal.SIGKILL)
            guard._process.wait()
        write_all(state, step)
        checkpointer.save(step, state)
        write_all(state, -1)
        checkpointer.wait()
        assert is_of(checkpointer.load()[1], step)


@protects
def test_memory_that_others_can_write_to_is_copied_at_once(engine, tmp_path, monkeypatch):
    """Shared with other processes, mapped from a file, strided: never protected, and never torn all the same."""
    taken = []
    begin = Guard.begin

    def watched(this, path, address, regions, **options):
        taken.extend(regions)
        return begin(this, path, address, regions, **options)

    file = tmp_path / "w.bin"
    file.write_bytes(bytes(4 * LARGE))
    state = {
        "shared": torch.ones(LARGE).share_memory_(),
        "file": torch.from_file(str(file), shared=True, size=LARGE),
        "private file": torch.from_file(str(file), shared=False, size=LARGE),
        "strided": torch.ones(LARGE, 2)[:, 0],
        "own": torch.ones(LARGE),
        "step": 1,
    }
    checkpointer = engine()
    monkeypatch.setattr(Guard, "begin", watched)
    checkpointer.prepare(state)
    write_all(state, 7)
    checkpointer.save(7, state)
    write_all(state, -1)
    checkpointer.wait()
    assert is_of(checkpointer.load()[1], 7)
    assert [region.address for region in taken] == [state["own"].data_ptr()]


TRAINER = """
import os, sys, torch
sys.path.insert(0, {root!r})
{before}
from easyckpt import Checkpointer
heard = []
ckpt = Checkpointer(folder=sys.argv[1], mode="protect", on_event=lambda event: heard.append(event))
w = torch.full((4 << 20,), 1.0)
ckpt.save(1, {{"w": w}})
w.fill_(2.0)
ckpt.wait()
assert bool((ckpt.load()[1]["w"] == 1.0).all())
{after}
"""

# A filter of system calls, as a container's profile has one: userfaultfd is not permitted.
FORBID = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
code = [(0x20, 0, 0, 0), (0x15, 0, 1, {number}), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
raw = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(raw)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
""".replace("{number}", {"x86_64": "323", "aarch64": "282"}.get(os.uname().machine, "0"))


NO_DEVICE = """
from easyckpt import userfault
userfault.DEVICE = "/dev/absent"
"""


def run_trainer(folder, *, before="", after="", **options):
    script = TRAINER.format(root=ROOT, before=before, after=after)
    return subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True, **options)


def test_where_the_kernel_refuses_every_save_copies_at_once_and_says_why(folder):
    """The same calls, the same promise: only the stall differs."""
    after = "assert [e.text for e in heard if e.kind == 'protect_refused'], heard; print([e.text for e in heard][0])"
    with run_trainer(folder, before=FORBID + NO_DEVICE, after=after) as trainer:
        said, _ = trainer.communicate(timeout=60)
    assert trainer.returncode == 0
    assert "userfaultfd is refused (Operation not permitted)" in said
    assert "copies at once" in said


# As a container's root has it: no capability, and none gained again.
NO_CAPABILITIES = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
head, data = (ctypes.create_string_buffer(raw) for raw in (struct.pack("Ii", 0x20080522, 0), bytes(24)))
assert libc.capset(head, data) == 0 and libc.prctl(38, 1, 0, 0, 0) == 0
"""


@pytest.mark.parametrize("device", [True, False], ids=["with the device", "without"])
def test_a_trainer_without_privileges_protects_only_what_system_calls_respect_too(folder, device):
    """What such a process gets would let a receive into a protected tensor fail: it copies at once, unless the device is its to open."""
    if device and (WHY_NOT or not os.access(userfault.DEVICE, os.R_OK | os.W_OK)):
        pytest.skip(f"{userfault.DEVICE} is not there, or not ours to open")
    after = "print([e.text for e in heard if e.kind == 'protect_refused'])"
    with run_trainer(folder, before=NO_CAPABILITIES + ("" if device else NO_DEVICE), after=after) as trainer:
        said, _ = trainer.communicate(timeout=60)
    assert trainer.returncode == 0
    assert ("CAP_SYS_PTRACE" in said) == (not device)


@protects
def test_a_system_call_that_writes_waits_as_well(engine):
    """A receive into a tensor right after the save: it neither fails nor shows in the snapshot."""
    checkpointer = engine()
    tensor = torch.zeros(4 << 20)
    checkpointer.save(1, {"w": tensor})
    ours, theirs = socket.socketpair()
    ones = bytes([1]) * (1 << 16)
    view = memoryview(tensor.numpy()).cast("B")
    for at in range(view.nbytes - len(ones), -1, -len(ones) * 16):
        theirs.sendall(ones)
        assert ours.recv_into(view[at : at + len(ones)], flags=socket.MSG_WAITALL) == len(ones)
    checkpointer.wait()
    assert checkpointer.load()[1]["w"].abs().sum() == 0
    assert view[-1] == 1
    for end in (ours, theirs):
        end.close()


def wait_for(condition, seconds=30.0):
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


@protects
def test_a_killed_trainer_leaves_no_helper_and_no_half_snapshot(folder):
    """SIGKILL while memory is protected; a child of the trainer, which lives on, could write to its own copy all the time."""
    after = """
    heard.clear()
    ckpt.save(2, {"w": w})
    child = os.fork()
    if child == 0:
        w.fill_(9.0)
        os.write(1, b"child wrote\\n")
        os.read(0, 1)
        os._exit(0)
    guard = ckpt._saver._shield._guard
    print(guard._process.pid, guard.helper_pid, flush=True)
    os.read(0, 1)
    """.replace("\n    ", "\n")
    with run_trainer(folder, after=after, stdin=subprocess.PIPE) as trainer:
        lines = sorted(trainer.stdout.readline() for _ in range(2))
        trainer.kill()
        trainer.wait()
        watcher, helper = map(int, lines[0].split())
        assert lines[1] == "child wrote\n"
        wait_for(lambda: shm.start_time(helper) is None and shm.start_time(watcher) is None)
        trainer.stdin.close()
    for segment in shm.scan(folder):
        shm.verify(segment.path)
    assert {segment.header.step for segment in shm.scan(folder)} <= {1, 2}
    assert 1 in {segment.header.step for segment in shm.scan(folder)}


regions = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=12).map(
    lambda drawn: [
        (sum(gap + length for gap, length in drawn[:index]) * 100_000 + gap * 100_000, length * 99_999 + 1, index << 30)
        for index, (gap, length) in enumerate(drawn)
    ]
)


@given(regions, st.sampled_from([0, 16 << 10, 500_000]))
def test_blocks_hold_every_byte_once_and_never_cut_a_huge_page(regions, bridge):
    """However regions lie: each byte is copied to its own place once, by the block whose protection covers it."""
    spans = spans_of(regions, bridge)
    blocks = [block for span in spans for block in blocks_of(span)]
    copies = sorted(copy for block in blocks for copy in block.copies)
    glued = []
    for begin, nbytes, at in copies:
        if glued and sum(glued[-1][:2]) == begin and glued[-1][2] + glued[-1][1] == at:
            glued[-1] = (glued[-1][0], glued[-1][1] + nbytes, glued[-1][2])
        else:
            glued.append((begin, nbytes, at))
    assert glued == sorted(regions)
    for block in blocks:
        assert block.begin // BLOCK_BYTES == (block.begin + block.nbytes - 1) // BLOCK_BYTES
        assert all(
            block.begin <= begin and begin + nbytes <= block.begin + block.nbytes for begin, nbytes, _ in block.copies
        )
    assert all(one.begin + one.nbytes <= other.begin for one, other in itertools.pairwise(blocks))


@given(st.integers(0, 20_000), st.integers(1, 30_000))
def test_a_region_is_its_whole_pages_and_its_edges(address, nbytes):
    region = Region(address, nbytes, 5)
    parts = sorted([*region.edges, *([region.inner] if region.inner else [])])
    assert (parts[0].address, parts[0].at) == (address, 5)
    assert sum(one.nbytes for one in parts) == nbytes
    assert all(a.address + a.nbytes == b.address and a.at + a.nbytes == b.at for a, b in itertools.pairwise(parts))
    assert region.inner is None or (region.inner.address % 4096 == 0 and region.inner.nbytes % 4096 == 0)


def test_own_memory_is_told_from_files():
    block = ctypes.create_string_buffer(5 << 20)
    own = private_memory()
    assert is_within(Region(ctypes.addressof(block), 5 << 20, 0), own)
    assert not is_within(Region(0, 10, 0), own)
    assert not is_within(Region(own[-1][1] - 5, 10, 0), own)
