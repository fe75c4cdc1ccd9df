"""How often to save and to flush, pure: from what was measured, with the reason in words.

A copy that costs `save_seconds` and failures that come every `failure_seconds` on average are balanced at sqrt(2 x cost x time between
failures) (Young 1974): more often wastes saving, less often wastes recomputing. A flush is never asked for faster than one takes, since a
slot is pinned meanwhile, and never so often that it takes more than `share` of the time.
"""

from __future__ import annotations

import math

import msgspec

NO_FAILURE_SEEN_SECONDS = 86_400.0


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


class Life(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a run knows of its own failures; it travels in every snapshot, so that a restarted process knows it too."""

    trained_seconds: float = 0.0
    """By all processes so far, up to the snapshot."""
    interruptions: int = 0
    """How often a new process had to restore and go on."""

    @property
    def failure_seconds(self) -> float:
        """Between failures, on average: a day is taken for granted before there is evidence."""
        return (NO_FAILURE_SEEN_SECONDS + self.trained_seconds) / (1 + self.interruptions)


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
        reason = f"no less often than every {most_steps} steps, though {reason}"
    return Interval(steps=steps, reason=reason)


class Pace:
    """Measures a run as it goes and advises how often to save and to flush. Time is an argument."""

    FLUSH_COST = 0.15
    """Share of a flush's time that training is taken to lose to it."""

    def __init__(self, now: float, *, failure_seconds: float | None = None) -> None:
        """`failure_seconds` is what somebody knows better than this run's own life."""
        self._began_at = now
        self._before = Life()
        self._known_failure_seconds = failure_seconds
        self._last: tuple[int, float] | None = None
        self._step_seconds: float | None = None
        self._stall_seconds: float | None = None
        self._stalled_seconds = 0.0
        self._flush_seconds: float | None = None
        self._told: Interval | None = None

    def resume(self, life: Life) -> None:
        """A new process goes on where one was interrupted."""
        self._before = msgspec.structs.replace(life, interruptions=life.interruptions + 1)

    def life(self, now: float) -> Life:
        trained = self._before.trained_seconds + max(0.0, now - self._began_at)
        return msgspec.structs.replace(self._before, trained_seconds=round(trained, 1))

    def saw_save(self, step: int, now: float) -> None:
        """A save begins; what the one before made training wait is known by now."""
        if self._last is not None:
            self._stall_seconds = _smooth(self._stall_seconds, self._stalled_seconds)
            if step > self._last[0]:
                apart = max(0.0, now - self._last[1] - self._stalled_seconds)
                self._step_seconds = _smooth(self._step_seconds, apart / (step - self._last[0]))
        self._stalled_seconds = 0.0
        self._last = (step, now)

    def saw_stall(self, seconds: float) -> None:
        """Training waited so long for the present save."""
        self._stalled_seconds += seconds

    def saw_flush(self, seconds: float) -> None:
        self._flush_seconds = _smooth(self._flush_seconds, seconds)

    def save_interval(self, now: float) -> Interval:
        """How often to save to memory."""
        if self._step_seconds is None or self._stall_seconds is None:
            return Interval(steps=1, reason="every step until a step and a save were measured")
        return self._choose(self._stall_seconds, 0.0, now)

    def flush_interval(self, now: float) -> Interval:
        """How often to flush to storage."""
        if self._step_seconds is None or self._flush_seconds is None:
            return Interval(steps=1, reason="every step until a step and a flush were measured")
        return self._choose(self.FLUSH_COST * self._flush_seconds, self._flush_seconds, now)

    def news(self, now: float) -> Interval | None:
        """The flush interval, if it has changed by more than a quarter since it was last told."""
        chosen = self.flush_interval(now)
        if self._told is not None and abs(chosen.steps - self._told.steps) * 4 <= self._told.steps:
            return None
        self._told = chosen
        return chosen

    def _choose(self, cost_seconds: float, busy_seconds: float, now: float) -> Interval:
        return choose(
            Measured(
                step_seconds=self._step_seconds or 0.0,
                save_seconds=cost_seconds,
                busy_seconds=busy_seconds,
                failure_seconds=self._known_failure_seconds or self.life(now).failure_seconds,
            )
        )


def _smooth(before: float | None, seen: float) -> float:
    """A running mean over about the last ten."""
    return seen if before is None else 0.9 * before + 0.1 * seen
