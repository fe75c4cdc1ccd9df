"""How often a thing may be restarted: so many times within a window, with pauses when it dies young."""

import msgspec

YOUNG_SECONDS = 20.0
"""A death before this age is a quick one; quick ones in a row make the pause before the next start longer."""
LONGEST_PAUSE_SECONDS = 16.0


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """Restarts already spent. Pure; the window slides with `now`."""

    spent_at: tuple[float, ...] = ()

    def used(self, *, now: float, window_seconds: float) -> int:
        """Restarts within the window."""
        return sum(at > now - window_seconds for at in self.spent_at)

    def spend(self, *, now: float, window_seconds: float) -> "Budget":
        """One restart more; those outside the window are forgotten."""
        return Budget(spent_at=(*(at for at in self.spent_at if at > now - window_seconds), now))

    def room_at(self, *, window_seconds: float) -> float | None:
        """When the oldest restart leaves the window; None when none was spent, so that waiting gives no room."""
        return min(self.spent_at) + window_seconds if self.spent_at else None


def has_budget(*, used: int, allowed: int) -> bool:
    """Whether one more restart is within the budget."""
    return used < allowed


def pause_seconds(*, quick_deaths: int) -> float:
    """Pause before the next start: none after the first quick death, then 1, 2, 4 … seconds."""
    return 0.0 if quick_deaths < 2 else min(2.0 ** (quick_deaths - 2), LONGEST_PAUSE_SECONDS)
