"""Progress of a program that reports none, learnt from its log: `step 123`, `iteration 7/100`, a progress bar.

Each new number is a beat. A line that announces another phase (evaluation, a checkpoint, compilation) begins that phase, whose lease is
its own and unlearnt at first: so the first evaluation is not measured by the pace of the steps. Only the end of what was written is
looked at, so that a flood costs nothing.
"""

import re

from aimaster.catalogue.lines import may_hold_progress, read_progress
from aimaster.client import Leases, ProgressReading

LOOKED_AT_BYTES = 8 << 10
PHASES = {
    "evaluation": re.compile(rb"(?i)\b(?:evaluat\w+|eval|validat\w+|running test)\b"),
    "save": re.compile(
        rb"(?i)\b(?:sav(?:e|ing)|writing|loading)\b.{0,40}\b(?:checkpoint|model|state)\b|\bcheckpoint(?:ing)\b"
    ),
    "compile": re.compile(rb"(?i)\b(?:compil(?:e|ing|ation)|capturing|autotun\w+|warm(?:ing)?[ -]?up)\b"),
}
STEPS = "compute"


class LogSteps:
    """One member's log."""

    def __init__(self, pid: int, leases: Leases) -> None:
        self.leases = leases
        self._pid = pid
        self._beats = 0
        self._last = 0.0
        self._wall = 0.0
        self._number: float | None = None
        self._phase = "startup"

    def feed(self, fresh: bytes, now: float, wall: float) -> None:
        """Take what was written since the last call (its end at least); times are monotonic and Unix seconds of now."""
        piece = fresh[-LOOKED_AT_BYTES:]
        steps = read_progress(piece) if may_hold_progress(piece) else []
        after = steps[-1].at + len(steps[-1].line) if steps else 0
        if steps and steps[-1].number != self._number:
            self._number = steps[-1].number
            self._beat(STEPS, now, wall)
        rest = piece[after:]
        phase = next((name for name, words in PHASES.items() if words.search(rest)), None)
        if phase is not None and phase != self._phase and (self._beats or steps):
            self._beat(phase, now, wall)

    def reading(self) -> ProgressReading | None:
        """The progress as a member of ours would have written it; None before the first step."""
        if not self._beats:
            return None
        return ProgressReading(
            pid=self._pid,
            beats=self._beats,
            monotonic=self._last,
            wall=self._wall,
            step=int(self._number or 0),
            lineage=0,
            phase=self._phase,
            lease_hint_seconds=self.leases.lease_seconds(self._phase),
            seen=self.leases.seen(self._phase),
            thread=0,
        )

    def _beat(self, phase: str, now: float, wall: float) -> None:
        if self._beats:
            self.leases.observe(self._phase, now - self._last)
        self._beats += 1
        self._last, self._wall, self._phase = now, wall, phase
