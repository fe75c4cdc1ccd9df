"""Whether a flush that is under way still gets on: storage that hangs raises no error, and would be noticed by nobody. No I/O."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

STALLED_SECONDS = 120.0
"""A storage that takes no 64 MiB, or ends no fsync, in so long is said to hang."""


class Progress:
    """Of one thread that works; others look on."""

    def __init__(self) -> None:
        self._moved_at: float | None = None
        """Monotonic; None while nothing is under way."""
        self._told_at: float | None = None
        """`_moved_at` of the stall that was told last."""

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        self.moved()
        try:
            yield
        finally:
            self._moved_at = None

    def moved(self) -> None:
        self._moved_at = time.monotonic()

    def silent_seconds(self, now: float) -> float:
        """How long the work under way has not got on; 0 where there is none."""
        moved_at = self._moved_at
        return 0.0 if moved_at is None else max(0.0, now - moved_at)

    def news(self, now: float, after_seconds: float) -> str:
        """A sentence for people, once for each stall of so long."""
        moved_at = self._moved_at
        if moved_at is None or now - moved_at < after_seconds or moved_at == self._told_at:
            return ""
        self._told_at = moved_at
        return (
            f"a flush has not got on for {now - moved_at:.0f} s: the storage hangs, or is very slow."
            " Memory holds the newest steps, training goes on, and so does the flush when the storage does"
        )
