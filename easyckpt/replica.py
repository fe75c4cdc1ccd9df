"""The peer tier: one sealed segment goes to another node's memory and is proven there before it is sealed. No torch, no numpy.

The bytes are those of the file, whatever carries them: `open_for_send` pins the segment while its pieces are read, `Incoming` takes pieces of
any size, checks every digest and writes the seal last. A copy that was cut off leaves no candidate and never harms the copy before it; the
next process takes it up where it proves itself (`Incoming.resume`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from easyckpt import layout, retain, shm
from easyckpt.digest import StreamCheck, digest_bytes
from easyckpt.errors import Corrupt, Foreign, Pinned
from easyckpt.layout import SegmentHeader, SegmentName
from easyckpt.pieces import pieces
from easyckpt.retain import SlotState
from easyckpt.shm import Segment

PIECE_BYTES = 4 << 20
SEND_SECONDS = 600.0
PEER_SLOTS = 2

_choosing = threading.Lock()
_receiving: set[Path] = set()
"""Slots that this process is filling: they are not sealed, and not free."""


class Outgoing:
    """One segment on its way out, pinned until `close` or the deadline. Iterating gives its bytes from `start` on."""

    def __init__(self, path: str | os.PathLike[str], *, start: int = 0, deadline: float = SEND_SECONDS) -> None:
        self.path = Path(path)
        self._start = start
        self._mark = shm.pin(self.path, deadline=deadline)
        self._fd = -1
        self._stack = contextlib.ExitStack()
        self._view: memoryview | None = None
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self.segment = shm.segment_of(self._fd, self.path)
        except BaseException:
            self.close()
            raise
        self.total_bytes = self.segment.nbytes
        self.header_bytes = self.segment.prefix_bytes

    def __iter__(self) -> Iterator[bytes]:
        return self.pieces(self._start)

    def pieces(self, start: int = 0) -> Iterator[bytes]:
        for at in range(start, self.total_bytes, PIECE_BYTES):
            yield self.read(at, min(PIECE_BYTES, self.total_bytes - at))

    def read(self, at: int, nbytes: int) -> bytes:
        return os.pread(self._fd, nbytes, at)

    def send_range(self, connection: socket.socket, at: int, nbytes: int) -> None:
        """Straight from the mapped file to the wire."""
        if at < 0 or nbytes < 0 or at + nbytes > self.total_bytes:
            raise Foreign(f"{self.path} has no bytes {at} to {at + nbytes}")
        if self._view is None:
            self._view = self._stack.enter_context(shm.mapped(self._fd, self.total_bytes))
        connection.sendall(self._view[at : at + nbytes])

    def close(self) -> None:
        shm.unpin(self._mark)
        self._view = None
        self._stack.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_for_send(
    path: str | os.PathLike[str], *, start: int = 0, deadline: float = SEND_SECONDS
) -> tuple[int, int, Iterator[bytes]]:
    """(bytes before the tensors, bytes in all, pieces from `start` on). The segment is pinned until the pieces are used up or closed."""
    outgoing = Outgoing(path, start=start, deadline=deadline)

    def pieces() -> Iterator[bytes]:
        with outgoing:
            yield from outgoing

    started = _Started(pieces(), outgoing)
    return outgoing.header_bytes, outgoing.total_bytes, started


class _Started(Iterator[bytes]):
    """Pieces that unpin their segment even if nobody ever asked for the first one."""

    def __init__(self, pieces: Iterator[bytes], outgoing: Outgoing) -> None:
        self._pieces = pieces
        self._outgoing = outgoing

    def __next__(self) -> bytes:
        return next(self._pieces)

    def close(self) -> None:
        self._outgoing.close()

    def __del__(self) -> None:
        self._outgoing.close()


class Incoming:
    """A segment on its way in, for a member of another node. `feed` pieces in order, then `commit`; or `abort`."""

    def __init__(self, folder: str | os.PathLike[str], name: str | None = None) -> None:
        """`name` is the file's name at the sender; it has to agree with the header that arrives."""
        self._folder = shm.open_folder(Path(folder))
        self._name = layout.parse_name(name) if name is not None else None
        if name is not None and self._name is None:
            raise Foreign(f"{name!r} is not the name of a segment; the copy is refused")
        self._head = bytearray()
        self._fd = -1
        self._check: StreamCheck | None = None
        self._writer: Path | None = None
        self._prefix = b""
        self.path: Path | None = None
        self.header: SegmentHeader | None = None
        self.received_bytes = 0

    @property
    def total_bytes(self) -> int | None:
        """Known once the header is here."""
        return None if self.header is None else len(self._prefix) + self.header.data_bytes

    def feed(self, piece: bytes | bytearray | memoryview) -> None:
        """Raises Corrupt, Foreign, NoRoom or Pinned; then `abort`."""
        self.received_bytes += len(piece)
        if self._check is None:
            self._head += piece
            tensors = self._open_when_complete()
            if tensors is None:
                return
            piece = tensors
        check = self._check
        if check is not None and len(piece):
            at = len(self._prefix) + check.fed_bytes
            check.feed(piece)
            _write_all(self._fd, memoryview(piece).cast("B"), at)

    def resume(self, prefix_digest: str, prefix_bytes: int, nbytes: int, give_up_at: float) -> None:
        """Takes up what a killed process left of this very segment (by the digest of its header), up to the first byte that is not proven."""
        if self._name is None or self._check is not None:
            return
        prefix = self._take_left_over(prefix_digest, prefix_bytes, nbytes)
        if prefix is None:
            return
        header = self._take_header(prefix)
        check = self._check = StreamCheck(header, where=f"the copy of {self._name.stem}")
        self.received_bytes = prefix_bytes
        for piece in pieces(header):
            block = os.pread(self._fd, piece.end - piece.begin, prefix_bytes + piece.begin)
            if digest_bytes(block) != piece.digest or time.monotonic() > give_up_at:
                return
            check.feed(block)
            self.received_bytes += len(block)

    def commit(self) -> Segment:
        """Seals what arrived, if it is complete."""
        if self._check is None or self.header is None or self.path is None:
            raise Corrupt(f"the copy ended after {self.received_bytes} bytes, inside its header; it is dropped")
        self._check.finish()
        os.pwrite(self._fd, self._prefix[:8], 0)
        segment = Segment(
            path=self.path,
            header=self.header,
            tier="peer",
            nbytes=len(self._prefix) + self.header.data_bytes,
            opening=self._prefix[: layout.PEEK_BYTES],
        )
        self._close()
        return segment

    def abort(self) -> None:
        """Drops what arrived; the memory stays for the next copy. May be called at any time, also after `commit`."""
        self._close()

    def _open_when_complete(self) -> memoryview | None:
        """Once the whole header is there: opens a slot, and returns the tensor bytes that came with it."""
        where = "the arriving copy"
        if len(self._head) < 8:
            return None
        prefix_bytes = layout.prefix_length(self._head[:8], file_bytes=1 << 62, where=where)
        if len(self._head) < prefix_bytes:
            return None
        header = self._take_header(bytes(self._head[:prefix_bytes]))
        name = SegmentName(member=header.member, rank=header.rank, slot=0, peer=True)
        self._open_slot(name, header)
        self._check = StreamCheck(header, where=f"the copy of {name.stem}")
        return memoryview(self._head)[prefix_bytes:]

    def _take_header(self, prefix: bytes) -> SegmentHeader:
        """All bytes before the tensors. Raises Corrupt, or Foreign where they are not of the segment that was named."""
        header = layout.decode(prefix, where="the arriving copy")
        name = SegmentName(member=header.member, rank=header.rank, slot=0, peer=True)
        if layout.parse_name(str(name)) is None:
            raise Foreign(f"{header.member!r} is not the name of a member; the copy is refused")
        if self._name is not None and (self._name.member, self._name.rank) != (header.member, header.rank):
            raise Foreign(f"{self._name} arrived with the header of {name.stem}; the copy is refused")
        self._prefix, self.header = prefix, header
        return header

    def _take_left_over(self, prefix_digest: str, prefix_bytes: int, nbytes: int) -> bytes | None:
        """Opens the slot in which the segment with this header was arriving, and returns the header's bytes."""
        if self._name is None or not 8 < prefix_bytes <= layout.HEADER_LIMIT_BYTES:
            return None
        with _choosing:
            for slot in range(PEER_SLOTS):
                path = self._folder / str(msgspec.structs.replace(self._name, slot=slot, peer=True))
                if path in _receiving or shm.living_writer(self._folder, path.name) is not None:
                    continue
                with contextlib.suppress(OSError):
                    self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                    prefix = _left_over(self._fd, prefix_bytes, nbytes)
                    if digest_bytes(prefix) == prefix_digest:
                        self.path = path
                        self._writer = shm.claim_writer(self._folder, path.name, wait_seconds=0)
                        _receiving.add(path)
                        shm.allocate(self._fd, nbytes, str(path))
                        return prefix
                self._close()
        return None

    def _open_slot(self, name: SegmentName, header: SegmentHeader) -> None:
        """An unsealed or older slot, claimed; the newest copy that is whole stays."""
        with _choosing:
            slots = {
                state.slot: state for state in shm.slot_states(self._folder, name.member, peer=True).get(name.rank, [])
            }
            own = [slots.get(slot, SlotState(slot=slot, version=None)) for slot in range(PEER_SLOTS)]
            paths = [self._folder / str(msgspec.structs.replace(name, slot=slot)) for slot in range(PEER_SLOTS)]
            chosen = retain.choose_slot(
                [msgspec.structs.replace(one, pinned=one.pinned or paths[one.slot] in _receiving) for one in own]
            )
            if chosen is None:
                raise Pinned(f"every copy of {name.stem} is in use: this one is refused, the next one is taken")
            self.path = paths[chosen]
            self._writer = shm.claim_writer(self._folder, self.path.name, wait_seconds=0)
            _receiving.add(self.path)
        self._fd = _claim(self.path, len(self._prefix) + header.data_bytes)
        _write_all(self._fd, memoryview(self._prefix)[8:], 8)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._writer is not None and self.path is not None:
            shm.unpin(self._writer)
            self._writer = None
            _receiving.discard(self.path)


def _left_over(fd: int, prefix_bytes: int, nbytes: int) -> bytes:
    """What stands before the tensors of a file that was never sealed, with the seal that it would have had; nothing of any other."""
    if os.fstat(fd).st_size != nbytes or os.pread(fd, 8, 0) != layout.UNSEALED:
        return b""
    return (prefix_bytes - 8).to_bytes(8, "little") + os.pread(fd, prefix_bytes - 8, 8)


def _claim(path: Path, nbytes: int) -> int:
    """The slot's file, unsealed, with all its memory. One of another size is replaced: who has the old one mapped keeps it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags, 0o600)
    try:
        with shm.locked(fd, str(path)):
            shm.refuse_pinned(path)
            _must_lead_to(fd, path)
            os.pwrite(fd, layout.UNSEALED, 0)
        if os.fstat(fd).st_size > nbytes:
            path.unlink()
            os.close(fd)
            fd = os.open(path, flags | os.O_EXCL, 0o600)
        shm.allocate(fd, nbytes, str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _must_lead_to(fd: int, path: Path) -> None:
    """A damaged copy is removed under the same lock: what was written to a file without a name would be lost."""
    try:
        is_same = os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        is_same = False
    if not is_same:
        raise Pinned(f"{path} was removed just now: the next try makes a new one")


def receive(folder: str | os.PathLike[str], pieces: Iterator[bytes], name: str | None = None) -> Segment:
    """Takes a whole segment from an iterator of pieces; aborted if it fails."""
    incoming = Incoming(folder, name)
    with contextlib.ExitStack() as stack:
        stack.callback(incoming.abort)
        for piece in pieces:
            incoming.feed(piece)
        return incoming.commit()


def _write_all(fd: int, block: memoryview, at: int) -> None:
    done = 0
    while done < len(block):
        # One call moves at most 0x7ffff000 bytes.
        done += os.pwrite(fd, block[done : done + (1 << 30)], at + done)
