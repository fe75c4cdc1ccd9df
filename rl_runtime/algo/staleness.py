"""The three questions about staleness, in steps. Plain numbers, so that the controller needs no torch.

At dispatch a bound, at admission a check; what staleness is left is corrected in the loss (`loss.py`) by the engine's log-probs.
"""

from collections.abc import Iterable

from aimaster.wire.checkpoint import Version


def may_lease(*, admitted_not_dealt: int, leased: int, dealt_batch: int, allowed_outdated_steps: int) -> bool:
    """Whether one more sample may be begun without some sample growing older than allowed before it is trained."""
    return admitted_not_dealt + leased < (allowed_outdated_steps + 1) * dealt_batch


def is_stale(*, trained_at_step: int, oldest_step: int, allowed_outdated_steps: int) -> bool:
    """Whether a sample whose oldest token was made at `oldest_step` is too old for the batch that leads to `trained_at_step`.

    The batch of step s is trained on the weights after s - 1: tokens of that version are zero steps old.
    """
    return trained_at_step - 1 - oldest_step > allowed_outdated_steps


def oldest_step(versions: Iterable[Version]) -> int:
    """Return the step of the oldest token."""
    return min((version.step for version in versions), default=0)
