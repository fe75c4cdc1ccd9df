"""What the next step waits for, in words, for people and for the master. Pure.

A member of the epoch is named only when others have done their part and it has not: the master takes that as evidence that a
member whose progress lease is broken hangs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aimaster.wire.ids import MemberId
from aimaster.wire.training import Held, Reduced
from rl_runtime.controller.words import has_computed

if TYPE_CHECKING:
    from rl_runtime.controller.group import Group


def waiting_for(group: Group) -> str:
    """Return what is waited for; empty while members compute."""
    account = group.account
    if account.finished or group.stopping:
        return ""
    if not account.epoch.members:
        return f"{group.founder.member} to bring up the state" if group.founder else "a policy member"
    if group.joining.hold is not None:
        held = [member for member in account.epoch.members if _has_held(group, member)]
        return _behind(group, held, "hold") or f"{', '.join(group.joining.hold.joiners)} to join"
    if account.open_deal is not None:
        voted = [member for member in account.epoch.members if _has_voted(group, member)]
        computed = [member for member in account.epoch.members if has_computed(group, member)]
        return _behind(group, voted, "vote") or _behind(group, computed, "compute")
    if account.head.step >= group.settings.steps:
        return "the last snapshot"
    missing = group.settings.n_init - len(account.epoch.members)
    if not group.has_started and missing > 0:
        return f"{missing} more policy member(s)"
    return f"rollouts: {len(account.waiting)} of {group.settings.groups} groups"


def _behind(group: Group, done: Iterable[MemberId], deed: str) -> str:
    done = list(done)
    behind = [member for member in group.account.epoch.members if member not in done]
    return f"{', '.join(behind)} to {deed}" if done and behind else ""


def _has_held(group: Group, member: MemberId) -> bool:
    turn = group.spoke(member)
    return turn is not None and isinstance(turn.stage, Held)


def _has_voted(group: Group, member: MemberId) -> bool:
    turn = group.spoke(member)
    return turn is not None and isinstance(turn.stage, Reduced) and turn.stage.epoch == group.account.epoch.number
