"""Joins: a member without state comes in at a step boundary while the others hold still for a bounded time.

    Rehearsed --boundary--> Hold to those in --all Held, equal--> Take to the joiners --Taken, equal--> a new epoch
                              `-- too late, or a member died --> training goes on; the joiner tries again later, each time later

Pure, in memory only: a restarted controller begins a hold anew.
"""

import msgspec

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import MemberId
from aimaster.wire.training import Held, Rehearsed, Taken
from rl_runtime.controller.roll import Roll
from rl_runtime.controller.settings import ControllerSettings

REHEARSAL_FACTOR = 1.5
FIRST_INTERVAL_SECONDS = 5.0
LONGEST_INTERVAL_SECONDS = 600.0


class Hold(msgspec.Struct, kw_only=True):
    """The others hold still."""

    version: Version
    joiners: tuple[MemberId, ...]
    began_at: float
    allowance_seconds: float
    """From the moment the last of those in holds."""
    take_at: float | None = None
    state_digest: str = ""

    def take_seconds_left(self, now: float) -> float:
        """Time the joiners still have."""
        return 0.0 if self.take_at is None else max(0.0, self.take_at + self.allowance_seconds - now)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a hold ended."""

    joined: tuple[MemberId, ...] = ()
    late: tuple[MemberId, ...] = ()
    refused: tuple[MemberId, ...] = ()
    """Took a state that is not the others'."""
    differing: dict[MemberId, str] = {}
    """Digests of those in, when they are not all equal."""


class Joining:
    """See the module."""

    def __init__(self, settings: ControllerSettings, roll: Roll) -> None:
        self._settings = settings
        self._roll = roll
        self.hold: Hold | None = None
        self._tries: dict[MemberId, tuple[float, float]] = {}
        """Not before this time, and the interval after the next failure."""
        self._rehearsed: dict[MemberId, float] = {}
        """Slowest rehearsal of each: a try that failed says nothing of its own."""

    def note(self, member: MemberId, rehearsed_seconds: float) -> None:
        """A member has rehearsed."""
        self._rehearsed[member] = max(rehearsed_seconds, self._rehearsed.get(member, 0.0))

    def begin(self, members: tuple[MemberId, ...], head: Version, *, costs_nothing: bool, now: float) -> bool:
        """Begin a hold if somebody is ready to join."""
        ready = {
            member: self._rehearsed.get(member, 0.0)
            for member, _ in self._roll.waiting(Rehearsed, now)
            if member not in members and self._tries.get(member, (0.0, 0.0))[0] <= now
        }
        if not ready:
            return False
        allowance = self._settings.join_hold_seconds if costs_nothing else self.allowance_seconds(max(ready.values()))
        self.hold = Hold(version=head, joiners=tuple(ready), began_at=now, allowance_seconds=allowance)
        return True

    def allowance_seconds(self, rehearsed_seconds: float) -> float:
        """Return how long the others may be held for a copy that took so long in the rehearsal."""
        wanted = max(rehearsed_seconds * REHEARSAL_FACTOR, self._settings.join_hold_shortest_seconds)
        return min(wanted, self._settings.join_hold_seconds)

    def needs_more_than_allowed(self, rehearsed_seconds: float) -> bool:
        """Tell whether join_hold_seconds is too small for this member."""
        return rehearsed_seconds * REHEARSAL_FACTOR > self._settings.join_hold_seconds

    def go_on(self, members: tuple[MemberId, ...], now: float) -> Verdict | None:
        """Let the hold take its course; a verdict ends it."""
        hold = self.hold
        if hold is None:
            return None
        hold.joiners = tuple(member for member in hold.joiners if self._roll.is_live(member))
        if not hold.joiners:
            return self._end(Verdict())
        if hold.take_at is None:
            return self._seal(hold, members, now)
        return self._take(hold, now)

    def cancel(self) -> None:
        """Somebody else's change ends the hold; nobody is to blame."""
        self.hold = None

    def _seal(self, hold: Hold, members: tuple[MemberId, ...], now: float) -> Verdict | None:
        digests = {}
        for member in members:
            stage = self._roll.seen[member].turn.stage if member in self._roll.seen else None
            if isinstance(stage, Held) and stage.version == hold.version:
                digests[member] = stage.state_digest
        if len(digests) == len(members):
            if len(set(digests.values())) > 1:
                return self._end(Verdict(differing=digests))
            hold.take_at, hold.state_digest = now, next(iter(digests.values()))
            return None
        if now >= hold.began_at + self._settings.join_hold_seconds:
            return self._end(Verdict(late=hold.joiners))
        return None

    def _take(self, hold: Hold, now: float) -> Verdict | None:
        taken: dict[MemberId, str] = {}
        for member in hold.joiners:
            stage = self._roll.seen[member].turn.stage
            if isinstance(stage, Taken) and stage.version == hold.version:
                taken[member] = stage.state_digest
        if len(taken) < len(hold.joiners) and hold.take_seconds_left(now) > 0.0:
            return None
        return self._end(
            Verdict(
                joined=tuple(member for member in taken if taken[member] == hold.state_digest),
                refused=tuple(member for member in taken if taken[member] != hold.state_digest),
                late=tuple(member for member in hold.joiners if member not in taken),
            ),
            now=now,
        )

    def _end(self, verdict: Verdict, *, now: float = 0.0) -> Verdict:
        began = self.hold.began_at if self.hold is not None else now
        self.hold = None
        for member in verdict.joined:
            self._tries.pop(member, None)
        for member in verdict.late + verdict.refused:
            interval = self._tries.get(member, (0.0, FIRST_INTERVAL_SECONDS))[1]
            self._tries[member] = (max(now, began) + interval, min(2 * interval, LONGEST_INTERVAL_SECONDS))
        return verdict
