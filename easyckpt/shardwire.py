"""What is said over a shard connection: one request a line (JSON), one answer a line, then bytes; and a cap that several transfers share."""

from __future__ import annotations

import socket
import threading
import time

import msgspec

from easyckpt.errors import Corrupt, EasyckptError, Pinned

LINE_BYTES = 64 << 10


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client asks for."""

    verb: str
    """list, open, range, put or drop."""
    token: str = ""
    """Shared secret; empty on loopback."""
    name: str = ""
    """File name of a segment."""
    at: int = 0
    """First byte of a range."""
    nbytes: int = 0
    """Of a range, or of the whole segment to put."""
    prefix_digest: str = ""
    """Of all bytes before the tensors: which segment a put is about, also after a cut."""
    prefix_bytes: int = 0
    """How many those are."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server says before any bytes."""

    error: str = ""
    """Why not."""
    again: bool = False
    """Whether the same request may succeed in a moment."""
    corrupt: bool = False
    """Whether bytes and digests disagreed."""
    at: int = 0
    """Where a put goes on; its whole length where the segment is here already."""
    nbytes: int = 0
    """Bytes that follow, or length of an opened segment."""
    prefix_bytes: int = 0
    """Bytes before the tensors of an opened segment."""
    names: tuple[str, ...] = ()
    """Sealed segments."""


class Lines:
    """Lines and bytes from one socket, in turn."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._pending = bytearray()

    def read(self) -> bytes | None:
        """The next line; None at the end."""
        while (end := self._pending.find(b"\n")) < 0:
            if len(self._pending) > LINE_BYTES:
                raise ConnectionAbortedError("a line is too long")
            block = self._connection.recv(LINE_BYTES)
            if not block:
                return None
            self._pending += block
        line = bytes(self._pending[:end])
        del self._pending[: end + 1]
        return line

    def receive_some_into(self, target: memoryview) -> int:
        """At least one byte; an end of the connection is an error here."""
        if self._pending:
            count = min(len(target), len(self._pending))
            target[:count] = self._pending[:count]
            del self._pending[:count]
            return count
        count = self._connection.recv_into(target)
        if count == 0:
            raise ConnectionResetError("the connection was cut")
        return count


def say(connection: socket.socket, record: Request | Answer) -> None:
    connection.sendall(msgspec.json.encode(record) + b"\n")


def hear(lines: Lines) -> Answer:
    """The server's answer. Raises Pinned where a later try may do, Corrupt where bytes did not prove themselves, else EasyckptError."""
    line = lines.read()
    if line is None:
        raise ConnectionResetError("the peer closed the connection")
    answer = msgspec.json.decode(line, type=Answer)
    if answer.error:
        kind = Pinned if answer.again else Corrupt if answer.corrupt else EasyckptError
        raise kind(f"the peer refused: {answer.error}")
    return answer


class Bandwidth:
    """A cap on bytes a second, over all transfers that share it."""

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"a cap of {bytes_per_second} bytes a second lets nothing pass")
        self.bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    @property
    def piece_bytes(self) -> int:
        """Small enough that a transfer moves about ten times a second."""
        return max(1, int(self.bytes_per_second / 10))

    def take(self, nbytes: int) -> None:
        """Returns when that many bytes may have been sent, those of all other transfers before them."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self.bytes_per_second
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)
