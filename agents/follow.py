"""Reads named log files in a thread of its own, so that a file server that does not answer holds up nobody else.

What a file held when the agent came is history; one that appears later is read from its beginning, unless it is a known file under a new
name. Of all files together a bounded amount is read a look, the flood last.
"""

import contextlib
import glob
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import structlog

from agents.tail import Tail

MOST_FILES = 256
LOOK_BYTES = 4 << 20
CLOSE_SECONDS = 0.5
log = structlog.get_logger()


class Eye(Protocol):
    """Says when it is worth looking for files."""

    def due(self, now: float) -> bool: ...
    def close(self) -> None: ...


class Gain(msgspec.Struct, frozen=True):
    """What one file has gained in one look; no pieces: it is gone."""

    path: str
    begins_at: int
    """Where reading of the file began."""
    pieces: tuple[bytes, ...]


class Follower:
    """All files that the patterns name; used by one thread."""

    def __init__(self, patterns: Sequence[str], eye: Eye) -> None:
        self.left_out = 0
        """Files beyond the most that are followed."""
        self._patterns = patterns
        self._eye = eye
        self._files: dict[str, tuple[Tail, int]] = {}
        self._inodes: set[int] = set()
        self.begun = False
        """What was there at the first look is known: everything from now on is news."""

    def __len__(self) -> int:
        return len(self._files)

    def look(self) -> list[Gain]:
        """What is new, a bounded amount."""
        gains = self._discover() if self._eye.due(time.monotonic()) else []
        budget = LOOK_BYTES
        for path, (tail, begins_at) in list(self._files.items()):
            pieces = tuple(tail.read(budget))
            if pieces:
                gains.append(Gain(path, begins_at, pieces))
            budget -= sum(map(len, pieces))
            if budget <= 0:
                break
        self._files = dict(sorted(self._files.items(), key=lambda pair: pair[1][0].bytes_read))
        return gains

    def close(self) -> None:
        self._eye.close()
        for tail, _ in self._files.values():
            tail.close()

    def _discover(self) -> list[Gain]:
        there = self._stat_all()
        gone = [Gain(path, 0, ()) for path in set(self._files) - set(there)]
        for one in gone:
            self._files.pop(one.path)[0].close()
        self.left_out = 0
        for path, (inode, size) in there.items():
            if path in self._files:
                continue
            if len(self._files) >= MOST_FILES:
                self.left_out += 1
                continue
            begins_at = size if inode in self._inodes or not self.begun else 0
            self._files[path] = (Tail(Path(path), begins_at), begins_at)
        self._inodes = {inode for inode, _ in there.values()}  # that of a file that was removed is given to another
        self.begun = True
        return gone

    def _stat_all(self) -> dict[str, tuple[int, int]]:
        """Inode and size of every file that matches."""
        found = {}
        for pattern in self._patterns:
            for path in glob.iglob(pattern, recursive=True):
                with contextlib.suppress(OSError):  # gone again
                    status = os.stat(path)
                    if stat.S_ISREG(status.st_mode):
                        found[path] = (status.st_ino, status.st_size)
        return found


class FollowThread:
    """Looks again and again in a daemon thread: a read that hangs in the kernel cannot be ended."""

    def __init__(self, follower: Follower, hand_on: Callable[[list[Gain]], None], pause_seconds: float) -> None:
        """`hand_on` is called in the thread; the next look waits until `taken` says that the gains were judged."""
        self._follower = follower
        self._hand_on = hand_on
        self._pause_seconds = pause_seconds
        self._ending = threading.Event()
        self._taken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="named logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def taken(self) -> None:
        self._taken.put(None)

    def close(self) -> None:
        self._ending.set()
        self._taken.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                gains = self._follower.look()
            except Exception:  # whatever a strange file system does must not end the eyes for all others
                log.exception("named_logs_not_read")
                gains = []
            if gains:
                self._hand_on(gains)
                self._taken.get()
            self._ending.wait(self._pause_seconds)
        self._follower.close()
