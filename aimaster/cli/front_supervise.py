"""Keeping one program of the engine up: started, started again with a growing pause when it ends, given up when it never stands.

waiting → up → ended → waiting (its pause doubles while its lives are short) … → given up, after GIVE_UP_ENDS short lives in a row
"""

from collections.abc import Callable
from typing import Final

from aimaster.clusters.base import Cluster, Placed, Program

FIRST_PAUSE_SECONDS: Final = 0.2
LONGEST_PAUSE_SECONDS: Final = 5.0
SHORT_LIFE_SECONDS: Final = 5.0
"""A program that lived longer stood; its end starts a new count."""
GIVE_UP_ENDS: Final = 6


def pause_seconds(short_lives: int) -> float:
    """Pause before the next start, after so many short lives in a row; the first restart comes at once."""
    if short_lives <= 1:
        return 0.0
    return float(min(FIRST_PAUSE_SECONDS * 2 ** (short_lives - 2), LONGEST_PAUSE_SECONDS))


class Supervised:
    """One program and its lives."""

    def __init__(self, program: Program, cluster: Cluster) -> None:
        self.program = program
        self.placed: Placed | None = None
        self.last_code: int | None = None
        self.keep = True
        """False: let it end."""
        self.starts = 0
        self._cluster = cluster
        self._started_at = 0.0
        self._start_at = 0.0
        self._short_lives = 0

    @property
    def up(self) -> bool:
        return self.placed is not None

    @property
    def has_ended(self) -> bool:
        """Whether it has ended and `mind` has not noticed yet."""
        return self.placed is not None and self.placed.poll() is not None

    @property
    def given_up(self) -> bool:
        return self._short_lives >= GIVE_UP_ENDS

    @property
    def up_since(self) -> float:
        """Monotonic time of the present life's start."""
        return self._started_at

    def mind(self, now: float, say: Callable[[str], None]) -> None:
        """Notice its end, and start it when that is due."""
        if self.placed is not None:
            code = self.placed.poll()
            if code is None:
                return
            self._ended(code, now, say)
        if self.keep and not self.given_up and self.placed is None and now >= self._start_at:
            self.placed = self._cluster.start(self.program)
            self._started_at = now
            self.starts += 1

    def _ended(self, code: int, now: float, say: Callable[[str], None]) -> None:
        self.placed, self.last_code = None, code
        lived_seconds = now - self._started_at
        self._short_lives = self._short_lives + 1 if lived_seconds < SHORT_LIFE_SECONDS else 1
        self._start_at = now + pause_seconds(self._short_lives)
        if self.keep:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            then = "given up" if self.given_up else "started again"
            say(f"{self.program.name} ended ({how}); {then}")
