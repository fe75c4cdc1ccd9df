"""The one writer of a journal folder.

`await append(...)` returns when an fsync covers the record; appends that wait at the same time share one write and one fsync,
run in the journal's own thread. `append_now` is the same for callers without an event loop. A failed write keeps nothing of
its group, tells every waiter, and cuts the file back, so the next append starts clean. At most as many appends are pending
as there are callers that wait.
"""

import asyncio
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import msgspec

from aimaster.journal.errors import JournalClosedError, JournalHeldError, not_durable
from aimaster.journal.frames import Frame, decode_frames, encode_frame
from aimaster.journal.segments import (
    ASIDE,
    Extent,
    measure,
    newest_segment,
    remove_older,
    segment_path,
    sync_folder,
    write_all,
)

DEFAULT_COMPACT_BYTES = 64 << 20


class _Wish(msgspec.Struct, frozen=True, kw_only=True):
    """One payload that waits to be written."""

    payload: bytes
    snapshot: bool
    answer: "asyncio.Future[int]"


class Journal:
    """An open journal. Make it with `Journal.open`."""

    def __init__(self, folder: Path, lock: int, descriptor: int, extent: Extent, compact_bytes: int) -> None:
        self.folder = folder
        self.compact_bytes = compact_bytes
        self.torn_bytes = extent.torn_bytes
        """Bytes of an append that never ended, cut off at opening."""
        self._lock_descriptor = lock
        self._descriptor = descriptor
        self._path = extent.path
        self._first = extent.first
        self._last = extent.last
        self._end = extent.end
        self._base = extent.base
        self._cut_due = False
        self._closed = False
        self._mutex = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._wishes: list[_Wish] = []
        self._writing = False

    # -- opening and closing -------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, folder: Path, *, compact_bytes: int = DEFAULT_COMPACT_BYTES) -> Self:
        """Take the folder (made if absent), cut a torn tail, and be ready to append. Raises JournalHeldError, JournalDamagedError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _take_lock(folder)
        try:
            path = newest_segment(folder) or segment_path(folder, 1)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                extent = measure(path, path.read_bytes())
                if extent.torn_bytes:
                    os.ftruncate(descriptor, extent.end)
                    os.fsync(descriptor)
                remove_older(folder, keep=path)
                sync_folder(folder)
            except BaseException:
                os.close(descriptor)
                raise
        except BaseException:
            os.close(lock)
            raise
        return cls(folder, lock, descriptor, extent, compact_bytes)

    def close(self) -> None:
        """End after the write in progress; whoever still waits gets JournalClosedError. Releases the lock."""
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=True)
        self._answer(self._wishes, JournalClosedError("the journal was closed before this record was written"))
        self._wishes = []
        os.close(self._descriptor)
        os.close(self._lock_descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- what is in it -------------------------------------------------------------------------------------------------

    @property
    def last_sequence(self) -> int:
        """Sequence of the newest durable record; 0 when there is none."""
        return self._last

    @property
    def size_bytes(self) -> int:
        """Durable bytes of the open segment."""
        return self._end

    @property
    def compaction_due(self) -> bool:
        """True once `compact_bytes` were appended since the last snapshot (or since the file began)."""
        return self._end - self._base >= self.compact_bytes

    def frames(self) -> Iterator[Frame]:
        """Yield the durable frames from the newest snapshot on. What is appended meanwhile is not seen."""
        with self._mutex:
            data = os.pread(self._descriptor, self._end, 0)
            while len(data) < self._end and (piece := os.pread(self._descriptor, self._end - len(data), len(data))):
                data += piece
            first = self._first
        yield from decode_frames(data, first)

    def replay(self) -> Iterator[bytes]:
        """Yield the payloads of `frames`; the first is the newest snapshot where there is one."""
        for frame in self.frames():
            yield frame.payload

    # -- writing -------------------------------------------------------------------------------------------------------

    async def append(self, payload: bytes) -> int:
        """Return the record's sequence once it is durable; raises NotDurableError when it was not kept."""
        return await self._wish(payload, snapshot=False)

    async def compact(self, snapshot: bytes) -> int:
        """Start anew with `snapshot`, which must sum up every record appended before this call, and drop those."""
        return await self._wish(snapshot, snapshot=True)

    def append_now(self, payloads: Sequence[bytes]) -> int:
        """Write and fsync all payloads, or none; returns the sequence of the last."""
        with self._mutex:
            self._refuse_when_closed()
            return self._write_group(payloads)

    def compact_now(self, snapshot: bytes) -> int:
        """As `compact`, at once."""
        with self._mutex:
            self._refuse_when_closed()
            return self._write_snapshot(snapshot)

    async def _wish(self, payload: bytes, *, snapshot: bool) -> int:
        self._refuse_when_closed()
        loop = asyncio.get_running_loop()
        wish = _Wish(payload=payload, snapshot=snapshot, answer=loop.create_future())
        self._wishes.append(wish)
        if not self._writing:
            self._write_next(loop)
        return await wish.answer

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise JournalClosedError("the journal is closed; the record was not kept")

    def _write_next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand all waiting payloads up to the next snapshot to the thread."""
        self._writing = True
        group = self._take_wishes()
        work = loop.run_in_executor(self._thread, self._write_wishes, group)
        work.add_done_callback(lambda done: self._written(loop, group, done))

    def _written(self, loop: asyncio.AbstractEventLoop, group: list[_Wish], done: "asyncio.Future[int]") -> None:
        self._writing = False
        if self._wishes and not self._closed:
            self._write_next(loop)
        if done.cancelled():
            self._answer(group, JournalClosedError("the event loop ended before this record was written"))
        elif (error := done.exception()) is not None:
            self._answer(group, error)
        else:
            last = done.result()
            for distance, wish in enumerate(reversed(group)):
                if not wish.answer.done():
                    wish.answer.set_result(last - distance)

    def _take_wishes(self) -> list[_Wish]:
        """Take a run of records, or one snapshot."""
        wishes = self._wishes
        count = next((number for number, wish in enumerate(wishes) if wish.snapshot), len(wishes))
        group, self._wishes = wishes[: max(count, 1)], wishes[max(count, 1) :]
        return group

    @staticmethod
    def _answer(group: list[_Wish], error: BaseException) -> None:
        for wish in group:
            if not wish.answer.done():
                wish.answer.set_exception(error)

    def _write_wishes(self, group: list[_Wish]) -> int:
        with self._mutex:
            if group[0].snapshot:
                return self._write_snapshot(group[0].payload)
            return self._write_group([wish.payload for wish in group])

    def _write_group(self, payloads: Sequence[bytes]) -> int:
        frames = [
            encode_frame(payload, sequence=self._last + number, durable=self._last)
            for number, payload in enumerate(payloads, start=1)
        ]
        data = b"".join(frames)
        try:
            self._cut()
            self._cut_due = True
            write_all(self._descriptor, data, self._end)
            os.fdatasync(self._descriptor)
            self._cut_due = False
        except OSError as error:
            self._cut_after(error)
            raise not_durable(self._path, error) from error
        self._last += len(frames)
        self._end += len(data)
        return self._last

    def _write_snapshot(self, snapshot: bytes) -> int:
        sequence = self._last + 1
        frame = encode_frame(snapshot, sequence=sequence, durable=self._last, snapshot=True)
        path = segment_path(self.folder, sequence)
        aside = path.with_suffix(ASIDE)
        descriptor = -1
        try:
            descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            write_all(descriptor, frame, 0)
            os.fsync(descriptor)
            os.rename(aside, path)
            sync_folder(self.folder)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            # Neither name may stay: a later record would be appended to the old segment, which this one hides.
            aside.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise not_durable(path, error) from error
        os.close(self._descriptor)
        self._descriptor, self._path, self._first = descriptor, path, sequence
        self._last, self._end, self._base, self._cut_due = sequence, len(frame), len(frame), False
        remove_older(self.folder, keep=path)
        return sequence

    def _cut(self) -> None:
        """Drop what a failed write left behind the last durable record."""
        if self._cut_due:
            os.ftruncate(self._descriptor, self._end)
            self._cut_due = False

    def _cut_after(self, error: OSError) -> None:
        try:
            self._cut()
        except OSError as second:
            # The next append tries the cut again before it writes.
            error.add_note(f"cutting the file back failed too: {second}")


def _take_lock(folder: Path) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 20, 0)
        os.close(descriptor)
        raise JournalHeldError(folder, int(text) if text.strip().isdigit() else None) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
