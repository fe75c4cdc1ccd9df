"""The progress file: 256 mapped bytes into which the training thread beats and which the node's agent reads.

One writer, any readers, no lock and no system call per beat. The record is guarded by a sequence that is odd while it is being
written, so a reader never takes a torn one; a writer killed or stopped inside a beat leaves it odd, and the reader keeps what it
had. A new start makes a new file under the old name, so a zombie of an earlier one beats into nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aimaster.client.leases import Leases

if TYPE_CHECKING:
    from aimaster.client.fence import Fence

PHASES: Final = (
    "startup", "restore", "join", "compute", "wait", "reduce", "save", "generate", "weights", "reward", "idle", "end",
)  # fmt: skip
SIZE_BYTES: Final = 256
VERSION: Final = 1
_MAGIC: Final = b"AIMPROGR"
_HEAD: Final = struct.Struct("<8sIIQ")
"""magic, version, pid, sequence"""
_SEQUENCE: Final = struct.Struct("<Q")
_SEQUENCE_AT: Final = 16
_BODY: Final = struct.Struct("<QddqqdQQ32s")
"""beats, monotonic, wall, step, lineage, lease hint (0: not learnt), silences it rests on, thread of the last beat, phase"""
_READ_TRIES: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReading:
    """What the file says: the last beat."""

    pid: int
    beats: int
    monotonic: float
    """On the machine-wide monotonic clock, so any process can tell the age of the beat."""
    wall: float
    """Unix seconds."""
    step: int
    """-1 before the first step."""
    lineage: int
    phase: str
    lease_hint_seconds: float | None
    """What the member has learnt for this phase; None while unlearnt."""
    seen: int
    """How many silences of this phase the member has been through, its very first one not counted."""
    thread: int
    """`threading.get_ident()` of the thread that beat, as faulthandler prints it."""


class Progress:
    """The writing side; used by the training thread alone."""

    def __init__(
        self, path: os.PathLike[str] | str | None, *, leases: Leases | None = None, fence: Fence | None = None
    ) -> None:
        """Start the file anew; `path` None keeps the beats in private memory, for a program outside a run."""
        self.path = None if path is None else Path(path)
        self.leases = leases or Leases()
        self.fence = fence
        self.phase = "startup"
        self.step = -1
        self.lineage = 0
        self._memory = mmap.mmap(-1, SIZE_BYTES) if self.path is None else _new_file(self.path)
        self._beats = 0
        self._sequence = 0
        self._last = time.monotonic()
        _HEAD.pack_into(self._memory, 0, _MAGIC, VERSION, os.getpid(), 0)
        self._write(self._last, None)
        if fence is not None:
            fence.rearm(self._last, None)

    def beat(self, phase: str, *, step: int | None = None, lineage: int | None = None) -> None:
        """Say: alive, and from now on in `phase`. Step and lineage stay what they were where not given."""
        now = time.monotonic()
        self.leases.observe(self.phase, now - self._last)
        self._last = now
        self._beats += 1
        self.phase = phase
        if step is not None:
            self.step = step
        if lineage is not None:
            self.lineage = lineage
        lease = self.leases.lease_seconds(phase)
        self._write(now, lease)
        if self.fence is not None:
            self.fence.rearm(now, lease)

    def close(self) -> None:
        """Disarm the fence; the file stays, so that the last beat can still be read."""
        if self.fence is not None:
            self.fence.disarm()
        self._memory.close()

    def _write(self, now: float, lease_seconds: float | None) -> None:
        memory = self._memory
        _SEQUENCE.pack_into(memory, _SEQUENCE_AT, self._sequence + 1)
        _BODY.pack_into(
            memory, _HEAD.size, self._beats, now, time.time(), self.step, self.lineage,
            lease_seconds or 0.0, self.leases.seen(self.phase), threading.get_ident(), self.phase.encode()[:32],
        )  # fmt: skip
        self._sequence += 2
        _SEQUENCE.pack_into(memory, _SEQUENCE_AT, self._sequence)


def read_progress(path: os.PathLike[str] | str) -> ProgressReading | None:
    """The last beat in the file; None where there is no file, or no whole record in it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(_READ_TRIES):
            before = os.pread(descriptor, SIZE_BYTES, 0)
            if len(before) < SIZE_BYTES:
                return None
            magic, version, pid, sequence = _HEAD.unpack_from(before)
            if magic != _MAGIC or version != VERSION:
                return None
            after = os.pread(descriptor, _SEQUENCE.size, _SEQUENCE_AT)
            if sequence % 2 == 0 and _SEQUENCE.unpack(after)[0] == sequence:
                return _reading(pid, before)
        return None
    finally:
        os.close(descriptor)


def _reading(pid: int, record: bytes) -> ProgressReading:
    beats, monotonic, wall, step, lineage, lease, seen, thread, phase = _BODY.unpack_from(record, _HEAD.size)
    return ProgressReading(
        pid=pid,
        beats=beats,
        monotonic=monotonic,
        wall=wall,
        step=step,
        lineage=lineage,
        phase=phase.rstrip(b"\0").decode(errors="replace"),
        lease_hint_seconds=lease or None,
        seen=seen,
        thread=thread,
    )


def _new_file(path: Path) -> mmap.mmap:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, SIZE_BYTES)
        memory = mmap.mmap(descriptor, SIZE_BYTES)
    finally:
        os.close(descriptor)
    fresh.replace(path)
    return memory
