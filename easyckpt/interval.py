"""How often to save and to flush, pure: from what was measured, with the reason in words.

A copy that costs `save_seconds` and failures that come every `failure_seconds` on average are balanced at sqrt(2 x cost x time between
failures) (Young 1974): more often wastes saving, less often wastes recomputing. A flush is never asked for faster than one takes, since a
slot is pinned meanwhile, and never so often that it takes more than `share` of the time.
"""

from __future__ import annotations

import math

import msgspec


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has seen so far."""

    step_seconds: float
    """Of one step without saving."""
    save_seconds: float
    """That one save takes from training: its stall, or the slowdown it causes."""
    busy_seconds: float = 0.0
    """That the next one cannot begin before: the length of a flush."""
    failure_seconds: float = 86_400.0
    """Between failures that cost this tier, on average; a day where none was seen yet."""


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    steps: int
    """Save at every so many steps."""
    reason: str
    """Why not more or less often."""


def choose(measured: Measured, *, most_steps: int = 10_000, share: float = 0.02) -> Interval:
    """The interval in steps, between 1 and `most_steps`."""
    step = max(measured.step_seconds, 1e-6)
    cost = max(measured.save_seconds, 0.0)
    balanced = math.sqrt(2 * cost * max(measured.failure_seconds, 0.0)) / step
    limits = {
        f"a save costs {cost:.3g} s and a failure comes every {measured.failure_seconds:.3g} s": balanced,
        f"one takes {measured.busy_seconds:.3g} s, a step {step:.3g} s": measured.busy_seconds / step,
        f"saving may take {share:.0%} of the time": cost / share / step if share > 0 else 0.0,
    }
    reason, wanted = max(limits.items(), key=lambda item: item[1])
    if wanted <= 1:
        return Interval(steps=1, reason="every step: saving costs next to nothing")
    steps = min(math.ceil(wanted), most_steps)
    if steps == most_steps:
        reason = f"no less often than every {most_steps} steps"
    return Interval(steps=steps, reason=reason)


class Pace:
    """Measures a run as it goes and chooses its flush interval. Time is an argument."""

    FLUSH_COST = 0.15
    """Share of a flush's time that training is taken to lose to it."""

    def __init__(self, *, failure_seconds: float = 86_400.0) -> None:
        self._failure_seconds = failure_seconds
        self._last: tuple[int, float] | None = None
        self._step_seconds: float | None = None
        self._flush_seconds: float | None = None

    def saw_save(self, step: int, now: float) -> None:
        if self._last is not None and step > self._last[0]:
            self._step_seconds = _smooth(self._step_seconds, (now - self._last[1]) / (step - self._last[0]))
        self._last = (step, now)

    def saw_flush(self, seconds: float) -> None:
        self._flush_seconds = _smooth(self._flush_seconds, seconds)

    @property
    def interval(self) -> Interval:
        if self._step_seconds is None or self._flush_seconds is None:
            return Interval(steps=1, reason="every step until a step and a flush were measured")
        return choose(
            Measured(
                step_seconds=self._step_seconds,
                save_seconds=self.FLUSH_COST * self._flush_seconds,
                busy_seconds=self._flush_seconds,
                failure_seconds=self._failure_seconds,
            )
        )


def _smooth(before: float | None, seen: float) -> float:
    """A running mean over about the last ten."""
    return seen if before is None else 0.9 * before + 0.1 * seen
