"""Seconds since the epoch that never jump: wall time at the start, monotonic from there. A corrected wall clock must lose no node."""

import time


class Clock:
    """Callable: now."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()
