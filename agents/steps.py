"""Progress of a program that reports none, learnt from its log: `step 123`, `iteration 7/100`, a progress bar.

Each new number is a beat. A line that announces another phase (evaluation, a checkpoint, compilation) begins that phase, whose lease is
its own and unlearnt at first: so the first evaluation is not measured by the pace of the steps. Only the end of what was written is
looked at, so that a flood costs nothing.
"""

import re

from aimaster.catalogue.lines import Progress, may_hold_progress, read_progress
from aimaster.client import Leases, ProgressReading

WINDOWS_BYTES = (512, 2 << 10, 8 << 10)
"""The end of what was written, looked at further back only while no step is in it."""
PHASE_BYTES = 2 << 10
REST_SECONDS = 1.0
"""A log that floods and holds no step is looked at again after this long."""
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
        self._rest_until = 0.0

    def feed(self, fresh: bytes, now: float, wall: float) -> None:
        """Take what was written since the last call (its end at least); times are monotonic and Unix seconds of now."""
        if now < self._rest_until:
            return
        steps, piece = _last_steps(fresh)
        if not steps and len(fresh) > WINDOWS_BYTES[-1]:
            self._rest_until = now + REST_SECONDS
        if steps and steps[-1].number != self._number:
            self._number = steps[-1].number
            self._beat(STEPS, now, wall)
        after = piece[steps[-1].at + len(steps[-1].line) :] if steps else piece
        rest = after[-PHASE_BYTES:]
        phase = next((name for name, words in PHASES.items() if words.search(rest)), None)
        if phase is not None and phase != self._phase and self._beats:
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


def _last_steps(fresh: bytes) -> tuple[list[Progress], bytes]:
    """The steps in the shortest end of a log that has any, and that end."""
    piece = fresh
    for size in WINDOWS_BYTES:
        piece = fresh[-size:]
        cut = piece.find(b"\n") + 1 if len(piece) < len(fresh) else 0  # the rest of a number is another number
        piece = piece[cut:]
        steps = read_progress(piece) if may_hold_progress(piece) else []
        if steps or len(fresh) <= size:
            return steps, piece
    return [], piece
