"""Passing on output without ever waiting for its reader: who watches a job may not stand still because a pager does.

Spout            a descriptor that a slow or absent reader may hold up; writes what it takes, when it takes it
OutputFollower   a thread that passes on what a wrapped command's members print, from their files, at the reader's pace
NoteStream       a text stream for the front's own words: a bounded queue and a thread; what does not fit is dropped and counted

Nothing is kept in memory but a block: the files hold the output, and what the reader never took is said with the file it is in.
"""

import io
import os
import queue
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TextIO

import msgspec

from aimaster.wire.places import RunPlaces
from aimaster.wire.topology import JobPlan

READ_BYTES: Final = 1 << 16
LINE_BYTES: Final = 1 << 20
"""A line with a rank before it that is longer is passed on in pieces."""
WRITE_BYTES: Final = select.PIPE_BUF
"""A pipe that is ready takes so much at once, so that no write waits."""
LOOK_SECONDS: Final = 0.1
STALL_SECONDS: Final = 10.0
"""A reader that took nothing for so long after the end is not waited for."""
NOTES: Final = 1000


class Unshown(msgspec.Struct, frozen=True, kw_only=True):
    """Output that the reader did not take."""

    size_bytes: int
    """At least so many; the reader may not have looked at all that it was given."""
    file: Path
    """Where all of it is."""


class Spout:
    """Writes to a descriptor, blocking or not, in pieces that it is ready for."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self.moved_at = time.monotonic()
        """When it last took something, or had nothing to take."""

    def write(self, data: bytes, given_up: threading.Event) -> int:
        """Write all, however long that takes, unless given up; the bytes written. OSError when there is no reader or no room."""
        view, done = memoryview(data), 0
        while done < len(view) and not given_up.is_set():
            if not self._poll.poll(LOOK_SECONDS * 1000):
                continue
            try:
                done += os.write(self._descriptor, view[done : done + WRITE_BYTES])
            except BlockingIOError:
                continue
            self.moved_at = time.monotonic()
        return done


class OutputFollower:
    """Passes on what the members of a wrapped command print, from where their files stand now."""

    def __init__(self, plan: JobPlan, places: RunPlaces, descriptor: int) -> None:
        several = len(plan.members) > 1
        self._files = [
            _Tail(
                places.member(plan.placement[member], member) / "output.log",
                f"[{member}]: ".encode() if several else b"",
            )
            for member in plan.members
        ]
        self._spout = Spout(descriptor)
        self._ending = threading.Event()
        self._given_up = threading.Event()
        self._unheard = False
        self._thread = threading.Thread(target=self._pass_on, name="output", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def finish(self, wait_seconds: float, *, stall_seconds: float = STALL_SECONDS) -> bool:
        """Members print no more: pass on the rest. Whether it is over, after waiting a little; a reader that stands still ends it too."""
        if not self._ending.is_set():
            self._spout.moved_at = time.monotonic()
            self._ending.set()
        self._thread.join(wait_seconds)
        if self._thread.is_alive() and time.monotonic() - self._spout.moved_at > stall_seconds:
            self.give_up()
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Wait for the reader no longer."""
        self._ending.set()
        self._given_up.set()
        self._thread.join()

    def unshown(self) -> list[Unshown]:
        """What the reader did not take, after the end; nothing when it went away, for then it wanted no more."""
        if self._unheard:
            return []
        left = [Unshown(size_bytes=file.left_bytes(), file=file.path) for file in self._files]
        return [one for one in left if one.size_bytes]

    def _pass_on(self) -> None:
        while not self._given_up.is_set():
            ending = self._ending.is_set()  # looked at before the files: what they hold by now is all of it
            try:
                moved = [self._pass_on_file(file, last=ending) for file in self._files]
            except BrokenPipeError:
                self._unheard = True
                return
            except OSError:  # no room where stdout goes: told at the end, by what is left
                return
            if any(moved):
                continue
            if ending:
                return
            self._ending.wait(LOOK_SECONDS)

    def _pass_on_file(self, file: "_Tail", *, last: bool) -> bool:
        """One block of one file, so that ranks take turns; whether there was anything."""
        found = False
        for piece in file.new_pieces(last=last):
            found = True
            if self._spout.write(piece, self._given_up) < len(piece):
                break
            file.shown()
        return found


class _Tail:
    """One file as it grows. Without a prefix its bytes pass as they come; with one, line by line."""

    def __init__(self, path: Path, prefix: bytes) -> None:
        self.path = path
        self._prefix = prefix
        self._rest = b""
        self._open_line = False
        try:
            self._offset = path.stat().st_size
        except FileNotFoundError:
            self._offset = 0
        self._shown = self._offset

    def new_pieces(self, *, last: bool) -> Iterator[bytes]:
        """The next block in pieces; with `last` and nothing new, the end of an unfinished line."""
        data = self._read()
        if data and not self._prefix:
            self._open_line = not data.endswith(b"\n")
            yield data
        elif data:
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > LINE_BYTES:
                lines, self._rest = [*lines, self._rest], b""
            if lines:
                yield b"".join(self._prefix + line + b"\n" for line in lines)
        elif last and (self._rest or self._open_line):
            piece = self._prefix + self._rest + b"\n"
            self._rest, self._open_line = b"", False
            yield piece

    def shown(self) -> None:
        """The last piece was taken."""
        self._shown = self._offset - len(self._rest)

    def left_bytes(self) -> int:
        try:
            return max(0, self.path.stat().st_size - self._shown)
        except OSError:
            return 0

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = self._shown = 0  # truncated or replaced: read it anew
                file.seek(self._offset)
                data = file.read(READ_BYTES)
        except OSError:  # not begun, or its node was lost with it
            return b""
        self._offset += len(data)
        return data


class NoteStream(io.TextIOBase):
    """Stands before a text stream with a descriptor; `write` never waits."""

    def __init__(self, behind: TextIO) -> None:
        super().__init__()
        self._behind = behind
        self._spout = Spout(behind.fileno())
        self._queue: queue.Queue[bytes] = queue.Queue(NOTES)
        self._ending = threading.Event()
        self._given_up = threading.Event()
        self.dropped = 0
        """Pieces that did not fit."""
        self._thread = threading.Thread(target=self._write_on, name="notes", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        try:
            self._queue.put_nowait(text.encode(errors="replace"))
        except queue.Full:
            self.dropped += 1
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._behind.isatty()

    def fileno(self) -> int:
        return self._behind.fileno()

    def close(self) -> None:
        """Write what is queued; a reader that stands still is not waited for."""
        if not self._ending.is_set():
            self._ending.set()
            self._thread.join(STALL_SECONDS / 5)
            self._given_up.set()
            self._thread.join()
        super().close()

    def _write_on(self) -> None:
        while not self._given_up.is_set():
            try:
                piece = self._queue.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if self._ending.is_set():
                    return
                continue
            try:
                self._spout.write(piece, self._given_up)
            except OSError:  # who reads no more (`2>&1 | head`) does not end the job
                continue
