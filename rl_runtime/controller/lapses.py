"""When the current epoch can no longer do its step, and who is not in the next one. Pure, in memory only.

a death is known          the epoch without the dead, as soon as the master proposes it or has been silent for so long
a state was lost          the epoch without that member
an abort, no death known  the same members again, twice; then without the one that evidence names
silence after an abort    the epoch without the silent, once the group timeout has gone too
digests differ            the same members again, once; then without the minority, without a majority nobody stays
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from aimaster.wire.ids import MemberId
from aimaster.wire.training import Aborted, Fresh, Reduced, Rehearsed, Turn
from rl_runtime.controller.trouble import SAME_DIGEST_TRIES, SAME_MEMBERS_TRIES, minority, named_by_evidence

if TYPE_CHECKING:
    from rl_runtime.controller.group import Group


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """The next epoch: without these, or (nobody named) with the same members."""

    leave: tuple[MemberId, ...] = ()
    cause: str
    finding: tuple[str, str] | None = None
    """Category and text, where people should know."""


class Lapses:
    """What went wrong in the current epoch so far."""

    def __init__(self, now: float) -> None:
        self._epoch_opened_at = now
        self._due: dict[MemberId, float] = {}
        """Members known to be dead, and when the epoch is opened without them at the latest."""
        self._aborted_at: float | None = None
        self._aborts = 0
        """Epochs in a row that ended without a known death, at this step."""
        self._differences = 0
        """Epochs in a row whose digests differed, at this step."""

    # -- what happens --------------------------------------------------------------------------------------------------

    def note_death(self, member: MemberId, due: float) -> None:
        """A member of the epoch is dead; an earlier time counts."""
        self._due[member] = min(due, self._due.get(member, due))

    def note_turn(self, turn: Turn, epoch: int, now: float) -> None:
        """A member of the epoch said something."""
        if isinstance(turn.stage, Aborted) and turn.stage.epoch == epoch and self._aborted_at is None:
            self._aborted_at = now

    def begin_epoch(self, members: tuple[MemberId, ...], now: float) -> None:
        """A new epoch was opened."""
        self._epoch_opened_at, self._aborted_at = now, None
        self._due = {member: due for member, due in self._due.items() if member in members}

    def begin_step(self) -> None:
        """The head moved: earlier failures are forgiven."""
        self._aborts = self._differences = 0

    @property
    def epoch_opened_at(self) -> float:
        """When the epoch was opened, as far as this controller knows."""
        return self._epoch_opened_at

    # -- what follows --------------------------------------------------------------------------------------------------

    def change(self, group: Group, now: float) -> Change | None:
        """Return the epoch that is called for now."""
        lost = tuple(member for member in group.account.epoch.members if _lost_state(group, member))
        if lost:
            return Change(leave=lost, cause=f"{', '.join(lost)} came back without state")
        if any(due <= now for due in self._due.values()):
            return Change(leave=tuple(self._due), cause=f"{', '.join(self._due)} died")
        if self._due or group.account.open_deal is None:
            return None
        if self._aborted_at is not None and now >= self._aborted_at + group.settings.abort_settle_seconds:
            return self._after_abort(group)
        return self._after_silence(group, now)

    def differing(self, digests: Mapping[MemberId, str], step: int) -> Change:
        """Return the epoch after votes that differ."""
        self._differences += 1
        if self._differences <= SAME_DIGEST_TRIES:
            return Change(cause="gradient digests differ")
        leave = minority(digests)
        cause = f"gradient digests differed twice at step {step}"
        return Change(
            leave=leave, cause=cause, finding=("reduction.differs", f"{cause}; {', '.join(leave)}: back to a snapshot")
        )

    def _after_abort(self, group: Group) -> Change:
        self._aborts += 1
        if self._aborts <= SAME_MEMBERS_TRIES:
            return Change(cause="the reduction was aborted and no death is known")
        members = group.account.epoch.members
        turns = {member: turn for member in members if (turn := group.spoke(member)) is not None}
        over = {member: turn.stage for member, turn in turns.items() if isinstance(turn.stage, (Aborted, Reduced))}
        silent = [member for member in members if member not in over]
        reasons = {member: stage.reason for member, stage in over.items() if isinstance(stage, Aborted)}
        accused = named_by_evidence(members, silent, reasons)
        text = f"{self._aborts} reductions failed at step {group.account.head.step + 1}; going on without {accused}"
        return Change(leave=(accused,), cause=text, finding=("reduction.fails", text))

    def _after_silence(self, group: Group, now: float) -> Change | None:
        members = group.account.epoch.members
        silent = tuple(member for member in members if group.spoke(member) is None)
        patience = group.settings.group_timeout_seconds + group.settings.abort_settle_seconds
        if not self._aborts or not silent or len(silent) == len(members) or now < self._epoch_opened_at + patience:
            return None
        text = f"{', '.join(silent)} silent since an aborted reduction"
        return Change(leave=silent, cause=text, finding=("member.silent", f"{text}; going on without"))


def _lost_state(group: Group, member: MemberId) -> bool:
    """Whether a member of the epoch says that it has no state, and says it again: once may be a late message."""
    seen = group.roll.seen.get(member)
    if seen is None or not group.is_in(member, seen.turn.incarnation):
        return False
    return isinstance(seen.turn.stage, (Fresh, Rehearsed)) and seen.repeats > 1
