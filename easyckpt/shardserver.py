"""Segments over plain sockets and threads, at wire speed: give a peer a copy, take one, or restore straight out of a peer's memory.

Verbs: `list` (names of sealed segments), `open` + `range` (read a pinned segment), `put` (send a segment; after a cut it goes on where the
receiver is), `drop` (take copies back). Loopback by default; anything wider needs a token, which is compared in constant time. Every wait has a deadline, the number
of connections a bound. The receiver proves every byte before it seals.
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
from easyckpt.arrivals import Arrivals
from easyckpt.digest import digest_bytes
from easyckpt.errors import Corrupt, EasyckptError, Pinned, StorageError, Torn
from easyckpt.events import Events
from easyckpt.layout import SegmentHeader
from easyckpt.replica import Outgoing
from easyckpt.shardwire import Answer, Bandwidth, Lines, Request, hear, say
from easyckpt.shm import Segment

TIMEOUT_SECONDS = 30.0
PATIENCE_SECONDS = 10.0
AGAIN_SECONDS = 0.1
CONNECTIONS = 64
PIECE_BYTES = 4 << 20


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
        self._arrivals = Arrivals(folder, self._events)
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
        self._arrivals.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed; or this process has no descriptor left just now, and will have
                self._closing.wait(AGAIN_SECONDS)
                continue
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
                lines = Lines(connection)
                opened: Outgoing | None = None
                while (line := lines.read()) is not None:
                    request = msgspec.json.decode(line, type=Request)
                    if not hmac.compare_digest(request.token.encode(), self._token.encode()):
                        say(connection, Answer(error="the token is wrong"))
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
        lines: Lines,
        request: Request,
        opened: Outgoing | None,
        stack: contextlib.ExitStack,
    ) -> Outgoing | None:
        try:
            if request.verb == "list":
                say(connection, Answer(names=tuple(segment.path.name for segment in shm.scan(self._folder))))
            elif request.verb == "open" and layout.parse_name(request.name) is not None:
                opened = stack.enter_context(Outgoing(self._folder / request.name))
                say(connection, Answer(nbytes=opened.total_bytes, prefix_bytes=opened.header_bytes))
            elif request.verb == "range" and opened is not None:
                say(connection, Answer(nbytes=request.nbytes))
                opened.send_range(connection, request.at, request.nbytes)
            elif request.verb == "put":
                self._arrivals.take(connection, lines, request)
            elif request.verb == "drop":
                say(connection, Answer(names=tuple(self._arrivals.drop(request.name))))
            else:
                say(connection, Answer(error=f"cannot {request.verb!r} {request.name!r}"))
        except (EasyckptError, FileNotFoundError) as error:
            again, corrupt = isinstance(error, Pinned), isinstance(error, Corrupt)
            say(connection, Answer(error=str(error), again=again, corrupt=corrupt))
        return opened


class Peer:
    """A client of one server. Each call may raise EasyckptError (the server's words) or OSError (the wire's)."""

    def __init__(self, address: tuple[str, int], *, token: str = "", timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.address = address
        self._token = token
        self._timeout = timeout_seconds

    def names(self) -> list[str]:
        """Sealed segments there, newest first."""
        with self._connect() as connection:
            return list(self._ask(connection, Lines(connection), Request(verb="list")).names)

    def push(
        self,
        path: Path,
        *,
        expected: SegmentHeader | None = None,
        bandwidth: Bandwidth | None = None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> int:
        """Gives the peer a copy; returns the bytes that were sent in all tries together.

        A peer that cannot be reached at first raises OSError at once. After a cut the copy goes on at the byte where the receiver is, until
        nothing has moved for `patience_seconds`. Raises Torn when the file is no longer the `expected` one.
        """
        with Outgoing(path) as outgoing:
            if expected is not None and outgoing.segment.header != expected:
                raise Torn(f"{path} was overwritten before it was sent; a newer one is there")
            prefix = outgoing.read(0, outgoing.header_bytes)
            sending = _Sending(outgoing, digest_bytes(prefix), bandwidth)
            while True:
                try:
                    with self._connect() as connection:
                        sending.move(connection, self._token)
                        return sending.sent_bytes
                except (OSError, Pinned):
                    if not sending.may_go_on(time.monotonic(), patience_seconds):
                        raise
                time.sleep(AGAIN_SECONDS)

    def drop(self, name: str) -> list[str]:
        """Takes back the copies held there of the segments of which `name` is one; returns their names."""
        with self._connect() as connection:
            return list(self._ask(connection, Lines(connection), Request(verb="drop", name=name)).names)

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

    def _ask(self, connection: socket.socket, lines: Lines, request: Request) -> Answer:
        say(connection, msgspec.structs.replace(request, token=self._token))
        return hear(lines)


class _Sending:
    """One segment on its way to a peer, over one connection after the other."""

    def __init__(self, outgoing: Outgoing, prefix_digest: str, bandwidth: Bandwidth | None) -> None:
        self._outgoing = outgoing
        self._request = Request(
            verb="put",
            name=outgoing.path.name,
            nbytes=outgoing.total_bytes,
            prefix_digest=prefix_digest,
            prefix_bytes=outgoing.header_bytes,
        )
        self._bandwidth = bandwidth
        self.sent_bytes = 0
        self._reached = -1
        """The byte that the receiver last asked for; -1 while it never answered."""
        self._stuck_since: float | None = None
        """The first cut since the receiver had more than before."""

    def move(self, connection: socket.socket, token: str) -> None:
        """From where the receiver is to the end, and the receiver's word that every byte was proven."""
        lines = Lines(connection)
        say(connection, msgspec.structs.replace(self._request, token=token))
        at = hear(lines).at
        if at > self._reached:
            self._reached, self._stuck_since = at, None
        most = PIECE_BYTES if self._bandwidth is None else min(PIECE_BYTES, self._bandwidth.piece_bytes)
        while at < self._request.nbytes:
            count = min(most, self._request.nbytes - at)
            if self._bandwidth is not None:
                self._bandwidth.take(count)
            self._outgoing.send_range(connection, at, count)
            at += count
            self.sent_bytes += count
        hear(lines)

    def may_go_on(self, now: float, patience_seconds: float) -> bool:
        """After a cut: whether the peer has answered before, and has got on within the time."""
        if self._stuck_since is None:
            self._stuck_since = now
        return self._reached >= 0 and now - self._stuck_since <= patience_seconds


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

    def _wire(self) -> tuple[socket.socket, Lines, Answer]:
        wire: tuple[socket.socket, Lines, Answer] | None = getattr(self._local, "wire", None)
        if wire is None:
            connection = self._peer._connect()  # noqa: SLF001 - one module
            self._connections.append(connection)
            lines = Lines(connection)
            answer = self._peer._ask(connection, lines, Request(verb="open", name=self._name))  # noqa: SLF001 - one module
            wire = self._local.wire = (connection, lines, answer)
        return wire
