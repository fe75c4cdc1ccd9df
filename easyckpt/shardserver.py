"""Segments over plain sockets and threads, at wire speed: give a peer a copy, take one, or restore straight out of a peer's memory.

One request a line (JSON), one answer a line, then bytes. Verbs: `list` (headers' versions), `open` + `range` (read a pinned segment),
`put` (send a segment; after a cut it goes on where the receiver is). Loopback by default; anything wider needs a token, which is compared
in constant time. Every wait has a deadline, the number of connections a bound. The receiver proves every byte before it seals.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from easyckpt import layout, replica, shm
from easyckpt.digest import digest_bytes
from easyckpt.errors import EasyckptError, StorageError, Torn
from easyckpt.events import Event, Events
from easyckpt.layout import SegmentHeader
from easyckpt.replica import Incoming, Outgoing
from easyckpt.shm import Segment

TIMEOUT_SECONDS = 30.0
SUSPENDED_SECONDS = 120.0
CONNECTIONS = 64
LINE_BYTES = 64 << 10
PIECE_BYTES = 4 << 20


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a client asks for."""

    verb: str
    """list, open, range or put."""
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


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server says before any bytes."""

    error: str = ""
    """Why not."""
    at: int = 0
    """Where a put goes on."""
    nbytes: int = 0
    """Bytes that follow, or length of an opened segment."""
    prefix_bytes: int = 0
    """Bytes before the tensors of an opened segment."""
    names: tuple[str, ...] = ()
    """Sealed segments."""


class ShardServer:
    """Serves one folder until `close`."""

    def __init__(
        self, folder: Path, *, host: str = "127.0.0.1", port: int = 0, token: str = "", events: Events | None = None
    ) -> None:
        if not token and host not in ("127.0.0.1", "localhost", "::1"):
            raise EasyckptError(f"serving segments on {host} needs a token: anyone could read the weights")
        self._folder = folder
        self._token = token
        self._events = events or Events()
        self._suspended: dict[str, tuple[Incoming, float]] = {}
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        self._listener = socket.create_server((host, port), backlog=CONNECTIONS)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._closing = threading.Event()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="easyckpt-shards", daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for incoming, _ in self._suspended.values():
                incoming.abort()
            self._suspended.clear()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                connection.close()  # the client tries again; more threads would only share the same wire
                continue
            threading.Thread(target=self._serve, args=(connection,), name="easyckpt-shard", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_SECONDS)
        # An answer and its bytes are two sends: neither may wait for the other's acknowledgement.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            self._open.add(connection)
        try:
            with connection, contextlib.ExitStack() as stack:
                lines = _Lines(connection)
                opened: Outgoing | None = None
                while (line := lines.read()) is not None:
                    request = msgspec.json.decode(line, type=Request)
                    if not hmac.compare_digest(request.token.encode(), self._token.encode()):
                        _say(connection, Answer(error="the token is wrong"))
                        return
                    opened = self._answer(connection, lines, request, opened, stack)
        except (OSError, msgspec.MsgspecError):
            pass  # the client went away or talks something else: it is its turn
        finally:
            with self._lock:
                self._open.discard(connection)
            self._slots.release()

    def _answer(
        self,
        connection: socket.socket,
        lines: _Lines,
        request: Request,
        opened: Outgoing | None,
        stack: contextlib.ExitStack,
    ) -> Outgoing | None:
        try:
            if request.verb == "list":
                _say(connection, Answer(names=tuple(segment.path.name for segment in shm.scan(self._folder))))
            elif request.verb == "open" and layout.parse_name(request.name) is not None:
                opened = stack.enter_context(Outgoing(self._folder / request.name))
                _say(connection, Answer(nbytes=opened.total_bytes, prefix_bytes=opened.header_bytes))
            elif request.verb == "range" and opened is not None:
                _say(connection, Answer(nbytes=request.nbytes))
                opened.send_range(connection, request.at, request.nbytes)
            elif request.verb == "put":
                self._take(connection, lines, request)
            else:
                _say(connection, Answer(error=f"cannot {request.verb!r} {request.name!r}"))
        except (EasyckptError, FileNotFoundError) as error:
            _say(connection, Answer(error=str(error)))
        return opened

    def _take(self, connection: socket.socket, lines: _Lines, request: Request) -> None:
        incoming = self._resume(request)
        try:
            _say(connection, Answer(at=incoming.received_bytes))
            block = memoryview(bytearray(PIECE_BYTES))
            while incoming.received_bytes < request.nbytes:
                count = lines.receive_some_into(block[: request.nbytes - incoming.received_bytes])
                incoming.feed(block[:count])
            segment = incoming.commit()
        except OSError:
            with self._lock:
                self._suspended[request.prefix_digest] = (incoming, time.monotonic())
            raise
        except BaseException as error:
            incoming.abort()
            self._events.emit(Event(kind="copy_refused", tier="peer", text=str(error)))
            raise
        header = segment.header
        self._events.emit(
            Event(kind="copy_received", tier="peer", lineage=header.lineage, step=header.step, nbytes=segment.nbytes)
        )
        _say(connection, Answer(nbytes=segment.nbytes))

    def _resume(self, request: Request) -> Incoming:
        """What a cut left of this segment, or a new start. What nobody came back for is dropped."""
        now = time.monotonic()
        with self._lock:
            for key, (incoming, since) in list(self._suspended.items()):
                if now - since > SUSPENDED_SECONDS:
                    incoming.abort()
                    del self._suspended[key]
            found = self._suspended.pop(request.prefix_digest, None)
        return found[0] if found is not None else Incoming(self._folder, request.name)


class Peer:
    """A client of one server. Each call may raise EasyckptError (the server's words) or OSError (the wire's)."""

    def __init__(self, address: tuple[str, int], *, token: str = "", timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.address = address
        self._token = token
        self._timeout = timeout_seconds

    def names(self) -> list[str]:
        """Sealed segments there, newest first."""
        with self._connect() as connection:
            return list(self._ask(connection, _Lines(connection), Request(verb="list")).names)

    def push(self, path: Path, *, bytes_per_second: float | None = None, tries: int = 3) -> int:
        """Gives the peer a copy; after a cut goes on where it was. Returns the bytes that were sent in all tries together."""
        sent = 0
        with Outgoing(path) as outgoing:
            prefix = outgoing.read(0, outgoing.header_bytes)
            request = Request(
                verb="put", name=path.name, nbytes=outgoing.total_bytes, prefix_digest=digest_bytes(prefix)
            )
            for attempt in range(tries):
                try:
                    with self._connect() as connection:
                        lines = _Lines(connection)
                        at = self._ask(connection, lines, request).at
                        for piece in _paced(outgoing, at, bytes_per_second):
                            connection.sendall(piece)
                            sent += len(piece)
                        _hear(lines)
                        return sent
                except OSError:
                    if attempt == tries - 1:
                        raise
        return sent

    def pull(self, name: str, folder: Path) -> Segment:
        """Takes a copy of a segment into a folder."""
        with self.open(name) as shard:
            return replica.receive(folder, shard.pieces(), name)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[RemoteShard]:
        """A segment there, pinned, to restore straight from it."""
        shard = RemoteShard(self, name)
        try:
            yield shard
        finally:
            shard.close()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=self._timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _ask(self, connection: socket.socket, lines: _Lines, request: Request) -> Answer:
        connection.sendall(msgspec.json.encode(msgspec.structs.replace(request, token=self._token)) + b"\n")
        return _hear(lines)


class RemoteShard:
    """A shard read over the wire, proven like any other. Each thread has its own connection."""

    def __init__(self, peer: Peer, name: str) -> None:
        self._peer = peer
        self._name = name
        self._local = threading.local()
        self._connections: list[socket.socket] = []
        self.where = f"{name} at {peer.address[0]}:{peer.address[1]}"
        try:
            answer = self._wire()[2]
            self.nbytes, self._prefix_bytes = answer.nbytes, answer.prefix_bytes
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> SegmentHeader:
        prefix = bytearray(self._prefix_bytes)
        self._read(memoryview(prefix), 0)
        header = layout.decode(prefix, where=self.where)
        if self._prefix_bytes + header.data_bytes != self.nbytes:
            raise Torn(f"{self.where} changed while it was opened; try again")
        return header

    def view(self) -> memoryview | None:
        return None

    def read_into(self, target: memoryview, at: int) -> None:
        self._read(target, self._prefix_bytes + at)

    def explain(self, error: Exception) -> Exception:
        return error

    def pieces(self) -> Iterator[bytes]:
        """The whole file in order."""
        for at in range(0, self.nbytes, PIECE_BYTES):
            block = bytearray(min(PIECE_BYTES, self.nbytes - at))
            self._read(memoryview(block), at)
            yield bytes(block)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()

    def _read(self, target: memoryview, at: int) -> None:
        connection, lines, _ = self._wire()
        try:
            self._peer._ask(connection, lines, Request(verb="range", at=at, nbytes=len(target)))  # noqa: SLF001 - one module
            done = 0
            while done < len(target):
                done += lines.receive_some_into(target[done:])
        except OSError as error:
            raise StorageError(f"{self.where}: {error}; another copy is tried") from error

    def _wire(self) -> tuple[socket.socket, _Lines, Answer]:
        wire: tuple[socket.socket, _Lines, Answer] | None = getattr(self._local, "wire", None)
        if wire is None:
            connection = self._peer._connect()  # noqa: SLF001 - one module
            self._connections.append(connection)
            lines = _Lines(connection)
            answer = self._peer._ask(connection, lines, Request(verb="open", name=self._name))  # noqa: SLF001 - one module
            wire = self._local.wire = (connection, lines, answer)
        return wire


class _Lines:
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


def _say(connection: socket.socket, answer: Answer) -> None:
    connection.sendall(msgspec.json.encode(answer) + b"\n")


def _hear(lines: _Lines) -> Answer:
    line = lines.read()
    if line is None:
        raise ConnectionResetError("the peer closed the connection")
    answer = msgspec.json.decode(line, type=Answer)
    if answer.error:
        raise EasyckptError(f"the peer refused: {answer.error}")
    return answer


def _paced(outgoing: Outgoing, at: int, bytes_per_second: float | None) -> Iterator[bytes]:
    """The segment's bytes from `at` on, no faster than the cap."""
    started, sent = time.monotonic(), 0
    for piece in outgoing.pieces(at):
        yield piece
        sent += len(piece)
        if bytes_per_second:
            ahead = sent / bytes_per_second - (time.monotonic() - started)
            if ahead > 0:
                time.sleep(ahead)
