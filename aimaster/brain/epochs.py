"""Proposals of epochs: what the master asks the controller when a policy member is gone. The ledger decides; the master only proposes."""

from collections.abc import Iterable

from aimaster.wire.ids import MemberId, Term
from aimaster.wire.messages import ControllerPulse
from aimaster.wire.topology import EpochProposal


def proposal(
    pulse: ControllerPulse | None, leave: Iterable[MemberId], *, term: Term, cause: str
) -> EpochProposal | None:
    """The proposal that replaces the epoch the controller told of last; None when nobody of `leave` is in it."""
    if pulse is None:
        return None
    leaving = tuple(member for member in leave if member in pulse.in_epoch)
    return EpochProposal(term=term, replaces=pulse.epoch, leave=leaving, cause=cause) if leaving else None
