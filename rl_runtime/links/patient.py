"""HTTP from a training thread: a connection whose every wait is cut into slices, with a beat between them.

A socket's own timeout would be silence: the thread would look hung while it only waits for an answer. Here each wait polls for a
quarter of a second, beats, and gives up after `silence_seconds` without a byte, so that a half-open connection is noticed.
"""

import http.client
import io
import select
import socket
import time
from collections.abc import Callable

SLICE_SECONDS = 0.25
CONNECT_SECONDS = 2.0

Beat = Callable[[], None]


class PatientSocket:
    """What http.client needs of a socket, in slices. Given to it as its connection's `sock`."""

    def __init__(self, inner: socket.socket, *, beat: Beat, silence_seconds: float) -> None:
        inner.setblocking(False)
        self._inner = inner
        self._beat = beat
        self._silence_seconds = silence_seconds

    def sendall(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._inner.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def receive_into(self, buffer: bytearray | memoryview) -> int:
        while True:
            try:
                return self._inner.recv_into(buffer)
            except BlockingIOError:
                self._wait(select.POLLIN)

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb"  # noqa: S101 - http.client asks for nothing else
        return io.BufferedReader(_Incoming(self))

    def close(self) -> None:
        self._inner.close()

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._inner, event)
        give_up_at = time.monotonic() + self._silence_seconds
        while not poll.poll(SLICE_SECONDS * 1000):
            self._beat()
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"no byte for {self._silence_seconds:g} s")


class _Incoming(io.RawIOBase):
    def __init__(self, source: PatientSocket) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # BufferedReader passes nothing else
        return self._source.receive_into(buffer)


class PatientConnection(http.client.HTTPConnection):
    """Keep-alive HTTP over TCP, or over a Unix socket where `socket_path` is given."""

    def __init__(
        self, host: str, port: int | None = None, *, socket_path: str = "", beat: Beat, silence_seconds: float
    ) -> None:
        super().__init__(host, port)
        self._socket_path = socket_path
        self._beat = beat
        self._silence_seconds = silence_seconds

    def connect(self) -> None:
        if self._socket_path:
            inner = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            inner.settimeout(CONNECT_SECONDS)
            try:
                inner.connect(self._socket_path)
            except OSError:
                inner.close()
                raise
        else:
            inner = socket.create_connection((self.host, self.port), timeout=CONNECT_SECONDS)
            inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = PatientSocket(inner, beat=self._beat, silence_seconds=self._silence_seconds)
