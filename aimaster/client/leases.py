"""How long each phase of a member may stay silent, learnt from how long it did. Pure: no clock, no I/O.

A lease is ten times (`factor`) the second longest of the last 64 silences of a phase, never below the floor; None until 8 were seen.
One outlier is thus forgiven, and the very first silence is not counted: they hold imports, compilation, first allocations or a busy
machine, and would stretch the lease for long.
"""

from collections import deque

ENOUGH = 8
REMEMBERED = 64
FACTOR = 10.0


class Leases:
    """One member's leases, by phase."""

    def __init__(self, floor_seconds: float = 5.0, factor: float = FACTOR) -> None:
        self.floor_seconds = floor_seconds
        self.factor = factor
        self._silences: dict[str, deque[float]] = {}

    def observe(self, phase: str, silence_seconds: float) -> None:
        """Note that `phase` was followed by the next beat after this long."""
        known = self._silences.get(phase)
        if known is None:
            self._silences[phase] = deque(maxlen=REMEMBERED)
        else:
            known.append(silence_seconds)

    def seen(self, phase: str) -> int:
        """How many silences of the phase count."""
        return len(self._silences.get(phase, ()))

    def lease_seconds(self, phase: str) -> float | None:
        """The silence that `phase` is allowed; None while too little is known."""
        known = self._silences.get(phase)
        if known is None or len(known) < ENOUGH:
            return None
        return max(self.floor_seconds, self.factor * sorted(known)[-2])
