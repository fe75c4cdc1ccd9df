"""SIGINT, SIGTERM and SIGHUP as facts to be taken when the loop is ready, not as exceptions in the middle of anything.

A descriptor becomes readable with each, so that a waiting loop wakes at once. SIGHUP stays ignored where it was (nohup).
"""

import signal
import socket
import time
from types import FrameType, TracebackType
from typing import Any, Self


class Signals:
    """Caught while entered."""

    def __init__(self) -> None:
        self._taken: list[str] = []
        self._before: dict[signal.Signals, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.first_at = float("inf")
        """Monotonic time of the first one."""

    def fileno(self) -> int:
        return self._reader.fileno()

    @property
    def waiting(self) -> bool:
        """Whether one has come that nobody has taken."""
        return bool(self._taken)

    def take(self) -> list[str]:
        """Names of those that came since the last call."""
        try:
            while self._reader.recv(64):
                pass
        except BlockingIOError:
            pass
        taken, self._taken = self._taken, []
        return taken

    def _catch(self, number: int, _frame: FrameType | None) -> None:
        self.first_at = min(self.first_at, time.monotonic())
        self._taken.append(signal.Signals(number).name)

    def __enter__(self) -> Self:
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()
