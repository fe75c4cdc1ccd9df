"""The process that copies a trainer's protected memory into a segment, and lets a page go as soon as it is copied. No torch.

It is a process of its own because a thread of the trainer that waits for a page may hold the interpreter's lock. Only it holds the descriptor of
the protection: when it ends, however it ends, the kernel lets every page go and the trainer runs on; the snapshot is then not sealed.
A watcher, its parent, ends it when it stands still while it protects something, so that a stopped helper holds the trainer up for seconds only.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from easyckpt import memory, userfault

BLOCK_BYTES = 2 << 20
"""A huge page: letting all of it go never splits it."""
BEAT_SECONDS = 0.2
SOCKET_SECONDS = 30.0
HEADER = struct.Struct("=III")
"""Number of regions that follow; how far apart two may lie to be protected together; seconds to wait for a first write before anything is
copied. The protection's and the segment's descriptors come with it."""
REGION = struct.Struct("=QQQ")
"""Address, length (whole pages), and where in the file the bytes go."""
_DESCRIPTORS = 2
_MAPPINGS = 4
_PR_SET_PDEATHSIG = 1


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the helper says: once when all is protected, once when all is copied."""

    pid: int = 0
    """Of the process that will read the trainer's memory; said once, at the start."""
    refused: tuple[int, ...] = ()
    """Indices of regions that cannot be protected: the trainer copies them itself."""
    waited: int = 0
    """Writes of the trainer that had to wait for their piece."""
    error: str = ""
    """Why the copy ended early; everything was let go."""


class _iovec(ctypes.Structure):  # noqa: N801 - the kernel's name
    _fields_ = [("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def read_memory(pid: int, source: int, target: int, nbytes: int) -> None:
    """From another process's memory into one's own. Raises OSError."""
    done = 0
    while done < nbytes:
        here, there = _iovec(target + done, nbytes - done), _iovec(source + done, nbytes - done)
        count = int(_libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0))
        if count <= 0:
            code = ctypes.get_errno()
            raise OSError(code, f"the trainer's memory cannot be read: {os.strerror(code)}")
        done += count


Region = tuple[int, int, int]


class Block(NamedTuple):
    """What is copied and let go at once: as much of a huge page as is protected."""

    begin: int
    """Address in the trainer."""
    nbytes: int
    """Whole pages."""
    copies: tuple[Region, ...]
    """The parts of regions in it."""


def spans_of(regions: Sequence[Region], bridge_bytes: int) -> list[list[Region]]:
    """Regions in the order of their addresses, those together that lie no further apart than that."""
    spans: list[list[Region]] = []
    end = -1
    for region in sorted(regions):
        if spans and region[0] - end <= bridge_bytes:
            spans[-1].append(region)
        else:
            spans.append([region])
        end = region[0] + region[1]
    return spans


def blocks_of(span: Sequence[Region]) -> list[Block]:
    """A span cut where huge pages begin."""
    copies: dict[int, list[Region]] = {}
    for begin, nbytes, at in span:
        for page in range(begin // BLOCK_BYTES, (begin + nbytes - 1) // BLOCK_BYTES + 1):
            first = max(begin, page * BLOCK_BYTES)
            last = min(begin + nbytes, (page + 1) * BLOCK_BYTES)
            copies.setdefault(page, []).append((first, last - first, at + first - begin))
    low, high = span[0][0], span[-1][0] + span[-1][1]
    bounds = {page: (max(low, page * BLOCK_BYTES), min(high, (page + 1) * BLOCK_BYTES)) for page in copies}
    return [Block(begin, end - begin, tuple(copies[page])) for page, (begin, end) in sorted(bounds.items())]


class Session:
    """One save: protects the regions, then copies them block by block, those first that a write waits for."""

    def __init__(self, userfd: int, pid: int, target: int, regions: list[Region], bridge_bytes: int) -> None:
        self._userfd = userfd
        self._pid = pid
        self._target = target
        self.refused: list[int] = []
        self.waited = 0
        self._blocks: list[Block] = []
        for span in spans_of(regions, bridge_bytes):
            if not self._protect(span):
                self.refused += [regions.index(one) for one in span if len(span) == 1 or not self._protect([one])]
        self._begins = [block.begin for block in self._blocks]
        self._copied = bytearray(len(self._blocks))

    def run(self, beat: Beat) -> None:
        for index in range(len(self._blocks)):
            for address in userfault.waiting_writes(self._userfd):
                self.waited += 1
                self._copy(bisect.bisect_right(self._begins, address) - 1)
            if not self._copied[index]:
                self._copy(index)
            beat.now()

    def _protect(self, span: list[Region]) -> bool:
        begin, end = span[0][0], span[-1][0] + span[-1][1]
        try:
            userfault.register(self._userfd, begin, end - begin)
            userfault.protect(self._userfd, begin, end - begin)
        except OSError:
            return False
        self._blocks += blocks_of(span)
        return True

    def _copy(self, index: int) -> None:
        block = self._blocks[index]
        if not self._copied[index]:
            for begin, nbytes, at in block.copies:
                read_memory(self._pid, begin, self._target + at, nbytes)
            self._copied[index] = 1
        userfault.let_go(self._userfd, block.begin, block.nbytes)


class Mappings:
    """The segments written to, kept mapped between saves; one that was unlinked is given back."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[int, mmap.mmap]] = {}

    def address(self, fd: int) -> int:
        """Takes over the descriptor."""
        for key, (held, _) in list(self._held.items()):
            if os.fstat(held).st_nlink == 0:
                self._drop(key)
        found = os.fstat(fd)
        key = (found.st_dev, found.st_ino)
        if key in self._held:
            os.close(fd)
        else:
            while len(self._held) >= _MAPPINGS:
                self._drop(next(iter(self._held)))
            mapping = mmap.mmap(fd, found.st_size)
            self._held[key] = (fd, mapping)
            memory.touch(memory.address_of(memoryview(mapping)), found.st_size, write=True)
        return memory.address_of(memoryview(self._held[key][1]))

    def _drop(self, key: tuple[int, int]) -> None:
        fd, mapping = self._held.pop(key)
        mapping.close()
        os.close(fd)


class Beat:
    """Tells the watcher that this process goes on."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self._said = 0.0

    def begin(self) -> None:
        self._say(b"+")

    def now(self) -> None:
        if time.monotonic() - self._said > BEAT_SECONDS:
            self._say(b"+")

    def end(self) -> None:
        self._say(b"-")

    def _say(self, word: bytes) -> None:
        os.write(self._pipe, word)
        self._said = time.monotonic()


def serve(trainer: socket.socket, pid: int, beat: Beat) -> None:
    """Until the trainer closes its end, or is gone: its children may hold that end open."""
    mappings = Mappings()
    life = os.pidfd_open(pid)
    _say(trainer, Reply(pid=os.getpid()))
    while trainer.fileno() in select.select([trainer.fileno(), life], [], [])[0]:
        head, fds, _, _ = socket.recv_fds(trainer, HEADER.size, _DESCRIPTORS)
        if len(head) < HEADER.size or len(fds) < _DESCRIPTORS:
            return
        count, bridge_bytes, first_write_seconds = HEADER.unpack(head)
        regions = list(REGION.iter_unpack(_receive(trainer, count * REGION.size)))
        userfd, segment = fds
        try:
            target = mappings.address(segment)
            beat.begin()
            session = Session(userfd, pid, target, regions, bridge_bytes)
            _say(trainer, Reply(refused=tuple(session.refused)))
            select.select([userfd] if first_write_seconds else [], [], [], first_write_seconds)
            session.run(beat)
            reply = Reply(waited=session.waited)
        except OSError as error:
            reply = Reply(error=str(error))
        finally:
            os.close(userfd)  # the last one: whatever is protected still is let go
            beat.end()
        _say(trainer, reply)


def watch(pipe: int, child: int, still_seconds: float) -> None:
    """Ends the child when it protects something and stands still for so long."""
    protecting = False
    while True:
        ready, _, _ = select.select([pipe], [], [], still_seconds if protecting else None)
        words = os.read(pipe, 4096) if ready else b""
        if not words:  # silent for too long, or gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            return
        protecting = words.endswith(b"+")


def main() -> None:
    trainer = socket.socket(fileno=int(sys.argv[1]))
    trainer.settimeout(SOCKET_SECONDS)
    hears, says = os.pipe()
    child = os.fork()
    if child:
        trainer.close()
        os.close(says)
        watch(hears, child, float(sys.argv[3]))
        os.waitpid(child, 0)
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.close(hears)
    with contextlib.suppress(ConnectionError, TimeoutError, ProcessLookupError):  # the trainer is gone
        serve(trainer, int(sys.argv[2]), Beat(says))


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    raw = bytearray()
    while len(raw) < nbytes:
        block = connection.recv(nbytes - len(raw))
        if not block:
            raise ConnectionResetError("the trainer is gone")
        raw += block
    return bytes(raw)


def _say(connection: socket.socket, reply: Reply) -> None:
    connection.sendall(msgspec.json.encode(reply) + b"\n")


if __name__ == "__main__":
    main()
