"""Which saves are marked for storage, pure: every so many, as often as measured times advise, or none but what the end brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from easyckpt.layout import Version

Every = int | Literal["auto"] | None


class Marks:
    """Of one rank."""

    def __init__(self, every: Every) -> None:
        self._every = every
        self._saves = 0
        self._last_step: int | None = None
        self._owed: Version | None = None
        """The save before, if it was marked."""

    @property
    def follow_advice(self) -> bool:
        return self._every == "auto"

    def is_due(self, step: int, sealed: Version | None, advised_steps: Callable[[], int]) -> bool:
        """`sealed`: the newest version that is whole in memory. `advised_steps`: how many steps should lie between two."""
        if self._every is None:
            return False
        if self._owed is not None and sealed != self._owed:
            return True  # it was not sealed: this one goes in its place
        if self._every == "auto":
            return self._last_step is None or step >= self._last_step + advised_steps()
        return self._saves % self._every == 0

    def begun(self, version: Version, *, marked: bool) -> None:
        """A save is on its way."""
        self._saves += 1
        self._last_step = version[1] if marked else self._last_step
        self._owed = version if marked else None

    def restart(self) -> None:
        """The state was restored: the next save counts as the first."""
        self._saves = 0
