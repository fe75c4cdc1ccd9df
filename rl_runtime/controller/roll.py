"""The roll of policy members: what each last said, and which starts of them are known to be dead. Pure, in memory only.

A restarted controller begins with an empty roll; members resend what they have, which fills it. Nothing here decides.
"""

from collections.abc import Iterable, Iterator

import msgspec

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.training import Candidate, Fresh, Held, Taken, Turn

RECENT_SECONDS = 5.0
"""A member that waits asks at least once a second; one that was not heard for so long is not counted on."""


class Seen(msgspec.Struct, kw_only=True):
    """One member as last heard."""

    turn: Turn
    at: float
    epoch: int
    """Epoch that was current when it was heard."""
    since: float
    """Since when it has said this kind of stage."""
    repeats: int = 1
    """How often in a row it said this kind of stage."""
    candidates: tuple[Candidate, ...] = ()
    """Of its newest Fresh."""

    @property
    def in_place(self) -> Version | None:
        """Version of the state it has."""
        return state_in_place(self.turn)


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """A member's newest sealed snapshot."""

    version: Version
    state_digest: str
    node: str


class Roll:
    """See the module."""

    def __init__(self) -> None:
        self.seen: dict[MemberId, Seen] = {}
        self.seals: dict[MemberId, Seal] = {}
        """Of dead members too: a snapshot outlives the process that wrote it."""
        self._dead: dict[MemberId, Incarnation] = {}
        """Newest start of each that is known to be dead."""

    def hear(self, turn: Turn, epoch: int, now: float) -> bool:
        """Note a turn; False for one of an older or dead start of the member."""
        before = self.seen.get(turn.member)
        if self.is_past(turn.member, turn.incarnation):
            return False
        same = (
            before is not None
            and before.turn.incarnation == turn.incarnation
            and type(before.turn.stage) is type(turn.stage)
        )
        candidates = turn.stage.candidates if isinstance(turn.stage, Fresh) else before.candidates if before else ()
        self.seen[turn.member] = Seen(
            turn=turn,
            at=now,
            epoch=epoch,
            since=before.since if same and before else now,
            repeats=before.repeats + 1 if same and before else 1,
            candidates=candidates,
        )
        if turn.sealed is not None:
            self.seals[turn.member] = Seal(version=turn.sealed, state_digest=turn.sealed_digest, node=turn.node)
        if isinstance(turn.stage, Held):
            self.seals[turn.member] = Seal(
                version=turn.stage.version, state_digest=turn.stage.state_digest, node=turn.node
            )
        return True

    def forget_seals(self, members: Iterable[MemberId]) -> None:
        """What these have sealed is not to be relied on."""
        for member in members:
            self.seals.pop(member, None)

    def bury(self, member: MemberId, incarnation: Incarnation) -> None:
        """This start of the member is dead."""
        self._dead[member] = max(incarnation, self._dead.get(member, incarnation))

    def is_past(self, member: MemberId, incarnation: Incarnation) -> bool:
        """Tell whether this start of the member is dead, or a newer one is known."""
        seen = self.seen.get(member)
        if seen is not None and seen.turn.incarnation > incarnation:
            return True
        return member in self._dead and incarnation <= self._dead[member]

    def is_live(self, member: MemberId) -> bool:
        """Tell whether the newest start of it that was heard is not known to be dead."""
        seen = self.seen.get(member)
        return seen is not None and not self.is_past(member, seen.turn.incarnation)

    def waiting(self, kind: type, now: float) -> Iterator[tuple[MemberId, Seen]]:
        """Yield live members, in order of name, that said this kind of stage just now."""
        for member in sorted(self.seen):
            seen = self.seen[member]
            if isinstance(seen.turn.stage, kind) and self.is_live(member) and now - seen.at <= RECENT_SECONDS:
                yield member, seen


def state_in_place(turn: Turn) -> Version | None:
    """Return the version of the state a member has by its own word."""
    return turn.stage.version if isinstance(turn.stage, Taken) else turn.version
