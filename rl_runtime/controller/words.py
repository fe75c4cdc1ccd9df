"""The answer to a turn, looked up in what is true now. Pure, and changes nothing: a turn may be answered any number of times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import MemberId
from aimaster.wire.training import (
    Aborted,
    Committed,
    Compute,
    Computed,
    Fresh,
    Held,
    Hold,
    Host,
    Hosting,
    Leave,
    Ready,
    Reduce,
    Reduced,
    Rehearse,
    Rehearsed,
    Stop,
    Take,
    Taken,
    Turn,
    Wait,
    Word,
)
from rl_runtime.controller.founding import best_version
from rl_runtime.controller.roll import state_in_place
from rl_runtime.controller.settings import learning_rate
from rl_runtime.records import Dealt

if TYPE_CHECKING:
    from rl_runtime.controller.group import Group


def answer(group: Group, turn: Turn, now: float) -> Word:
    """Return what the member is to do now; Wait where there is nothing yet."""
    committed = _committed(group, turn)
    if committed is not None:
        return committed
    if group.roll.is_past(turn.member, turn.incarnation):
        return Leave(reason="a newer start of this member is known")
    if group.account.finished:
        return Stop(reason="finished")
    if group.stopping:
        return Stop(reason=group.stopping)
    return _inside(group, turn, now) if group.is_in(turn.member, turn.incarnation) else _outside(group, turn, now)


def is_at_head(group: Group, turn: Turn) -> bool:
    """Tell whether the member's state is the newest committed one."""
    return state_in_place(turn) == group.account.head and turn.chain == group.account.chain


def has_state(turn: Turn) -> bool:
    """Tell whether the member has a state at all."""
    return not isinstance(turn.stage, (Fresh, Rehearsed))


def has_computed(group: Group, member: MemberId) -> bool:
    """Tell whether a member said in this epoch that all its shares of the open deal are in hand."""
    turn, deal = group.spoke(member), group.account.open_deal
    if turn is None or deal is None or not isinstance(turn.stage, (Computed, Hosting)):
        return False
    return _is_of(deal, turn.stage) and set(turn.stage.shares) == set(group.account.assignment[member])


def _committed(group: Group, turn: Turn) -> Committed | None:
    """A vote is looked up in the ledger before anything else: whoever voted for the step that was committed may apply it."""
    if not isinstance(turn.stage, Reduced) or turn.version is None:
        return None
    commit = group.account.commits.get(turn.stage.step)
    if commit is None or (commit.lineage, commit.epoch, commit.gradient_digest) != (
        turn.version.lineage,
        turn.stage.epoch,
        turn.stage.digest,
    ):
        return None
    return Committed(
        version=Version(commit.lineage, commit.step),
        epoch=commit.epoch,
        chain=commit.chain,
        flush=commit.flusher == turn.member,
    )


def _outside(group: Group, turn: Turn, now: float) -> Word:
    founder, hold = group.founder, group.joining.hold
    if (
        founder is not None
        and (founder.member, founder.incarnation) == (turn.member, turn.incarnation)
        and isinstance(turn.stage, Fresh)
    ):
        return founder.word
    somebody = bool(group.account.epoch.members)
    if isinstance(turn.stage, Fresh):
        if not somebody and founder is None:
            return Wait(reason="the candidates for a restore are compared")
        return _rehearse(group, turn)
    if isinstance(turn.stage, Rehearsed):
        if not somebody and founder is None:
            return Leave(reason="nobody is in any more: show your candidates again")
        if hold is not None and turn.member in hold.joiners and hold.take_at is not None:
            return Take(
                version=hold.version,
                lineage=hold.version.lineage,
                state_digest=hold.state_digest,
                deadline_seconds=hold.take_seconds_left(now),
            )
        return Wait(reason="the next step boundary")
    if isinstance(turn.stage, Taken) and somebody:
        if hold is not None and turn.member in hold.joiners and turn.stage.version == hold.version:
            return Wait(reason="the others that join")
        return _rehearse(group, turn)
    return Leave(reason=f"not in epoch {group.account.epoch.number}: {group.account.epoch.cause}")


def _rehearse(group: Group, turn: Turn) -> Rehearse:
    seen = group.roll.seen.get(turn.member)
    version = best_version(group.account, seen.candidates) if seen is not None else None
    offer = group.offer()
    return Rehearse(version=version or (offer.version if offer is not None else None))


def _inside(group: Group, turn: Turn, now: float) -> Word:
    if not has_state(turn) or not is_at_head(group, turn):
        return Leave(
            reason=f"your state is not that of step {group.account.head.step}, lineage {group.account.head.lineage}"
        )
    hold = group.joining.hold
    if hold is not None:
        return (
            Wait(reason=f"{', '.join(hold.joiners)} to join")
            if _holds(turn, hold.version)
            else Hold(version=hold.version)
        )
    deal = group.account.open_deal
    if deal is not None:
        return _training(group, turn, deal)
    if group.needs_seal(now) and not _holds(turn, group.account.head):
        return Hold(version=group.account.head)
    return Wait(reason="the next batch")


def _holds(turn: Turn, version: Version) -> bool:
    return isinstance(turn.stage, Held) and turn.stage.version == version


def _training(group: Group, turn: Turn, deal: Dealt) -> Word:
    stage, mine = turn.stage, set(group.account.assignment[turn.member])
    epoch = group.account.epoch.number
    in_hand: set[int] = set()
    if isinstance(stage, (Computed, Hosting, Reduced, Aborted)) and _is_of(deal, stage):
        in_hand = set(stage.shares)
    if in_hand - mine:
        return Leave(reason=f"shares {sorted(in_hand - mine)} of step {deal.step} are another member's")
    if mine - in_hand or isinstance(stage, (Ready, Held, Taken)):
        return _compute(group, deal, sorted(mine - in_hand))
    if isinstance(stage, (Reduced, Aborted)):
        if stage.epoch == epoch:
            return Wait(reason="the others' votes" if isinstance(stage, Reduced) else "the next epoch")
        return _compute(group, deal, [])
    return _reduction(group, turn, deal)


def _is_of(deal: Dealt, stage: Computed | Hosting | Reduced | Aborted) -> bool:
    """Whether the gradients in hand are of this deal; a vote tells no digest, its step and the member's state stand for it."""
    return stage.step == deal.step and getattr(stage, "batch_digest", deal.batch_digest) == deal.batch_digest


def _compute(group: Group, deal: Dealt, shares: list[int]) -> Compute:
    batch = group.batch
    assert batch is not None  # noqa: S101 - the deal is open
    return Compute(
        step=deal.step,
        lineage=deal.lineage,
        epoch=group.account.epoch.number,
        batch_digest=deal.batch_digest,
        shares=batch.shares(shares),
        loss_tokens=batch.loss_tokens,
        sequences=len(batch.samples),
        learning_rate=learning_rate(group.settings, deal.step),
    )


def _reduction(group: Group, turn: Turn, deal: Dealt) -> Word:
    """All its shares are in hand: host the store, or begin once everybody has computed."""
    epoch = group.account.epoch
    world, rank = len(epoch.members), epoch.members.index(turn.member)
    if world > 1 and not group.address:
        if rank == 0:
            return Host(epoch=epoch.number)
        return Wait(reason=f"{epoch.members[0]} to host the group's store")
    if any(_has_aborted(group, member) for member in epoch.members):
        # Whoever is inside the reduction and asks whether it is still wanted learns here that it is not.
        return Wait(reason="the next epoch")
    behind = [member for member in epoch.members if not _may_reduce(group, member)]
    if behind:
        return Wait(reason=f"{', '.join(behind)} to compute")
    return Reduce(
        step=deal.step,
        epoch=epoch.number,
        rank=rank,
        world=world,
        address=group.address if world > 1 else "",
        timeout_seconds=group.settings.group_timeout_seconds,
    )


def _may_reduce(group: Group, member: MemberId) -> bool:
    """A member that voted already was told to reduce, so everybody had computed."""
    turn = group.spoke(member)
    voted = turn is not None and isinstance(turn.stage, Reduced) and turn.stage.epoch == group.account.epoch.number
    return voted or has_computed(group, member)


def _has_aborted(group: Group, member: MemberId) -> bool:
    turn = group.spoke(member)
    return turn is not None and isinstance(turn.stage, Aborted) and turn.stage.epoch == group.account.epoch.number
