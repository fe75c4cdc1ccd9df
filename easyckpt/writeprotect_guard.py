"""The trainer's end of the helper that copies protected memory: one save at a time, over a socket, with a deadline for every word.

One userfaultfd for each save: it is made here, handed to the helper, and closed here before anything is protected, so its life is the helper's.
`Guard.open` proves all of it on memory of its own before any tensor is trusted to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from easyckpt import memory, userfault
from easyckpt.errors import Refused
from easyckpt.writeprotect_helper import BLOCK_BYTES, HEADER, REGION, Reply

REPLY_SECONDS = 30.0
COPY_SECONDS = 600.0
END_SECONDS = 5.0
STILL_SECONDS = 5.0
"""A helper that protects something and stands still for so long is ended by its watcher."""
PROBE_BYTES = 2 * BLOCK_BYTES
PROBE_SECONDS = 5
BRIDGE_BYTES = 16 << 10
"""The allocator's own words between two large tensors, rounded up to pages. A huge page under both then stays whole."""
_PR_SET_PTRACER = 0x59616D61
_LINE_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class Region(NamedTuple):
    """Memory of this process and where its bytes go."""

    address: int
    """Of the first byte."""
    nbytes: int
    """How many."""
    at: int
    """Where in the segment's file."""

    @property
    def inner(self) -> Region | None:
        """Its whole pages: what can be protected. None if it has none."""
        page = userfault.PAGE_BYTES
        begin = -(-self.address // page) * page
        end = (self.address + self.nbytes) // page * page
        return Region(begin, end - begin, self.at + begin - self.address) if end > begin else None

    @property
    def edges(self) -> list[Region]:
        """What lies before and behind the whole pages."""
        inner = self.inner
        if inner is None:
            return [self]
        head = inner.address - self.address
        tail = self.nbytes - head - inner.nbytes
        ends = [self._replace(nbytes=head), Region(inner.address + inner.nbytes, tail, inner.at + inner.nbytes)]
        return [one for one in ends if one.nbytes]


class Guard:
    """The trainer's end: one helper, one save at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pending = bytearray()
        self.helper_pid = 0
        """The process that copies."""

    @classmethod
    def open(cls) -> Guard:
        """Starts the helper and proves on memory of its own that protection works here. Raises Refused."""
        guard = cls()
        try:
            guard._start()
            guard._prove()
        except (OSError, Refused) as error:
            guard.close()
            if isinstance(error, Refused):
                raise
            raise Refused(f"the helper of the write protection does not work here: {error}") from error
        return guard

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def map(self, path: Path) -> None:
        """Lets the helper map a segment before the first save into it."""
        self.begin(path, 0, [])
        self.finish()

    def begin(self, path: Path, address: int, regions: Sequence[Region], *, first_write_seconds: int = 0) -> list[int]:
        """Protects the regions, then copies them behind our back into the file at `path`, whose first byte lies at `address` here.

        Returns the indices of those that cannot be protected and were not copied. Once it returns everything may be changed. Raises OSError
        or Refused when the helper is gone: nothing is protected then. `first_write_seconds`: nothing is copied before a write waits, for that long.
        """
        inner = [region.inner for region in regions]
        userfd = userfault.open_userfault()
        try:
            segment = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                head = HEADER.pack(len(regions) - inner.count(None), BRIDGE_BYTES, first_write_seconds)
                self._send(head, [one for one in inner if one is not None], [userfd, segment])
            finally:
                os.close(segment)
        finally:
            # Before the helper has protected anything: from now on only its end ends the protection.
            os.close(userfd)
        refused = set(self._hear(REPLY_SECONDS).refused)
        whole = [index for index, one in enumerate(inner) if one is not None]
        left = [index for position, index in enumerate(whole) if position in refused]
        left += [index for index, one in enumerate(inner) if one is None]
        for index, region in enumerate(regions):
            for edge in region.edges if index not in left else ():
                memory.copy_small(address + edge.at, edge.address, edge.nbytes)
        return left

    def finish(self) -> int:
        """Until all is copied; how many writes had to wait. Raises OSError if the copy is not whole."""
        return self._hear(COPY_SECONDS).waited

    def close(self) -> None:
        """Ends the helper; what is protected still is let go."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # One that is stuck in the kernel dies when it comes out of there.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
            self._process = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        package_root = str(Path(__file__).resolve().parent.parent)
        paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        with theirs:
            arguments = [str(theirs.fileno()), str(os.getpid()), str(STILL_SECONDS)]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "easyckpt.writeprotect_helper", *arguments],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        self._socket = ours
        self.helper_pid = self._hear(REPLY_SECONDS).pid
        # Where Yama lets only parents read a process's memory, the helper, a child, has to be named.
        _libc.prctl(_PR_SET_PTRACER, self.helper_pid, 0, 0, 0)

    def _prove(self) -> None:
        """Old bytes are copied although new ones are written first; pages that were never touched count as zeros."""
        old = b"o" * BLOCK_BYTES + bytes(PROBE_BYTES - BLOCK_BYTES)
        fd = os.memfd_create("easyckpt-probe")
        try:
            os.truncate(fd, PROBE_BYTES)
            with mmap.mmap(-1, PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as source:
                source[:BLOCK_BYTES] = old[:BLOCK_BYTES]
                address = memory.address_of(memoryview(source))
                region = Region(address, PROBE_BYTES, 0)
                if self.begin(Path(f"/proc/self/fd/{fd}"), 0, [region], first_write_seconds=PROBE_SECONDS):
                    raise Refused("the kernel refuses to protect this process's own memory")
                for at in reversed(range(0, PROBE_BYTES, BLOCK_BYTES)):  # first where no page is yet
                    ctypes.memset(address + at, ord("n"), BLOCK_BYTES)
                waited = self.finish()
            if not waited or os.pread(fd, PROBE_BYTES, 0) != old:
                raise Refused(
                    "a write to protected memory was not held up: this kernel's userfaultfd is not to be trusted"
                )
        finally:
            os.close(fd)

    def _send(self, head: bytes, regions: Sequence[Region], descriptors: list[int]) -> None:
        if self._socket is None:
            raise ConnectionResetError("the helper of the write protection is closed")
        socket.send_fds(self._socket, [head], descriptors)
        self._socket.sendall(b"".join(REGION.pack(*region) for region in regions))

    def _hear(self, seconds: float) -> Reply:
        """The next word of the helper; if it is none in time, the helper is ended, which lets everything go."""
        if self._socket is None:
            raise ConnectionResetError("the helper of the write protection is closed")
        self._socket.settimeout(seconds)
        while (end := self._pending.find(b"\n")) < 0:
            try:
                block = self._socket.recv(_LINE_BYTES)
            except TimeoutError:
                block = b""
            if not block:
                self.close()
                raise ConnectionResetError("the helper of the write protection ended; everything was let go")
            self._pending += block
        reply = msgspec.json.decode(self._pending[:end], type=Reply)
        del self._pending[: end + 1]
        if reply.error:
            raise OSError(reply.error)
        return reply
