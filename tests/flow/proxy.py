"""A TCP proxy on loopback that can be cut (bytes stop, connections stay) and healed: a network that fails between two parties."""

import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Proxy:
    """Forwards connections on `url` to the address that `target` names at each connect."""

    def __init__(self) -> None:
        self.target: Callable[[], tuple[str, int]] | None = None
        self._open = threading.Event()
        self._open.set()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.2)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._open.set()
        self._listener.close()
        self._thread.join(5)

    def cut(self) -> None:
        """From now on no byte passes; nobody is told."""
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                near, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near:
            if not self._passes():
                return
            try:
                far = socket.create_connection(self._resolve(), timeout=5)
            except OSError:
                return
            with far:
                back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
                back.start()
                self._pump(near, far)
                back.join()

    def _resolve(self) -> tuple[str, int]:
        try:
            assert self.target is not None
            return self.target()
        except (ValueError, KeyError) as error:
            raise OSError("no address yet") from error

    def _passes(self) -> bool:
        """Wait until the network is whole; False when the proxy is closed meanwhile."""
        while not self._open.wait(0.2):
            if self._closed.is_set():
                return False
        return not self._closed.is_set()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        source.settimeout(0.2)
        while not self._closed.is_set():
            try:
                data = source.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                data = b""
            if not self._passes():
                return
            try:
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
            except OSError:
                return
