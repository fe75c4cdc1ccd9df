"""A helper process for calls that may hang in the kernel: it is killed when one call takes too long, and started again with back-off.

The child says what it is doing in a slot of shared memory before each call and clears it after, so a hang costs no message and is
seen by whoever looks. What it finds it writes as JSON lines. One that cannot even be killed (state D) is left and counted; at most
three of those are borne, then no new one is started until one is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec

SLOT: Final = struct.Struct("<d48s")
"""Monotonic start of the present call (0: none), and its name."""
SLOT_BYTES: Final = 4096
MOST_STUCK: Final = 3
FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0
_READ_BYTES: Final = 64 << 10
_LONGEST_REST_BYTES: Final = 1 << 20


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """A call that did not return within its limit."""

    call: str
    seconds: float
    """How long it had been going on when the child was killed."""


class Child:
    """One helper process at a time; used by one thread."""

    def __init__(
        self,
        command: Callable[[int], list[str]],
        *,
        limit_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`command` makes the command line from the number of the slot's descriptor, which the child inherits."""
        self.hangs = 0
        """In a row, since it was last well."""
        self.starts = 0
        self._command = command
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._descriptor = os.memfd_create("aimaster-slot", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, SLOT_BYTES)
        self._slot = mmap.mmap(self._descriptor, SLOT_BYTES)
        self._process: subprocess.Popen[bytes] | None = None
        self._stuck: list[subprocess.Popen[bytes]] = []
        self._rest = b""
        self._next_start = 0.0
        self._pause = FIRST_PAUSE_SECONDS

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def stuck(self) -> int:
        """Children that were killed and are still there."""
        return len(self._stuck)

    def fileno(self) -> int:
        """What becomes readable when the child has something to say; -1 while there is none."""
        return -1 if self._process is None or self._process.stdout is None else self._process.stdout.fileno()

    def ensure(self) -> None:
        """Start the child where none runs and its time has come."""
        self._stuck = [one for one in self._stuck if one.poll() is None]
        if self._process is not None or self._clock() < self._next_start or len(self._stuck) >= MOST_STUCK:
            return
        self._slot[: SLOT.size] = bytes(SLOT.size)
        self.starts += 1
        self._next_start = self._clock() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        with contextlib.suppress(OSError):  # no process to be had now: tried again after the pause
            self._process = subprocess.Popen(
                self._command(self._descriptor),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(self._descriptor,),
                env=_environment(),
            )
            os.set_blocking(self.fileno(), False)

    def messages(self) -> list[Any]:
        """What the child has written since the last call; never waits."""
        found: list[Any] = []
        while self._process is not None:
            try:
                piece = os.read(self.fileno(), _READ_BYTES)
            except BlockingIOError:
                break
            if not piece:  # it ended
                self.kill()
                break
            *lines, self._rest = (self._rest + piece)[-_LONGEST_REST_BYTES:].split(b"\n")
            for line in lines:
                with contextlib.suppress(msgspec.DecodeError):  # a library that prints
                    found.append(msgspec.json.decode(line))
        return found

    def well(self) -> None:
        """The child did what it is for: hangs are counted anew, the next start need not wait."""
        self.hangs = 0
        self._pause = FIRST_PAUSE_SECONDS

    def check(self) -> Hang | None:
        """Kill the child if its present call is over the limit, and say which call that was."""
        if self._process is None:
            return None
        since, name = SLOT.unpack_from(self._slot)
        seconds = self._clock() - since
        if since == 0.0 or seconds <= self._limit_seconds:
            return None
        self.kill()
        self.hangs += 1
        return Hang(call=name.rstrip(b"\0").decode(errors="replace"), seconds=seconds)

    def kill(self) -> None:
        """SIGKILL; one that does not end at once is remembered as stuck."""
        process, self._process = self._process, None
        self._rest = b""
        if process is None:
            return
        process.kill()
        if process.stdout is not None:
            process.stdout.close()
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            self._stuck.append(process)

    def close(self) -> None:
        self.kill()
        self._slot.close()
        os.close(self._descriptor)


def isolated_python(path: str, *words: str) -> list[str]:
    """Run one of our files by its path, without the user's site or environment."""
    return [sys.executable, "-I", path, *words]


def _environment() -> dict[str, str]:
    """What a library loader and a fake need, and nothing secret."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("LD_", "NVIDIA_", "FAKE_")) or name in ("PATH", "LANG", "TZ")
    }
