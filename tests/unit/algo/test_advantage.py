"""Advantages, staleness: plain numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_runtime.algo.advantage import GUARD, group_advantages, has_spread, overlong_penalty
from rl_runtime.algo.staleness import is_stale, may_lease


def test_grpo_advantages_by_hand():
    """GRPO divides the distance from the group's mean by its deviation."""
    assert group_advantages([1.0, 0.0, 0.0, 1.0]) == pytest.approx(
        [0.5 / (0.5 + GUARD), *[-0.5 / (0.5 + GUARD)] * 2, 0.5 / (0.5 + GUARD)]
    )


def test_unbiased_advantages_are_not_divided():
    """Dr.GRPO leaves the deviation out."""
    assert group_advantages([1.0, 0.0, 0.0, 1.0], unbiased=True) == (0.5, -0.5, -0.5, 0.5)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=16))
def test_advantages_are_bounded_and_centred(rewards):
    """No advantage leaves its bounds; without spread all are exactly zero; without bounds they sum to zero."""
    advantages = group_advantages(rewards, lowest=-2.0, highest=2.0)
    assert all(-2.0 <= one <= 2.0 for one in advantages)
    if not has_spread(rewards):
        assert set(advantages) == {0.0}
    assert sum(group_advantages(rewards, unbiased=True, lowest=-1e9, highest=1e9)) == pytest.approx(0.0, abs=1e-6)


def test_overlong_penalty_is_a_ramp():
    """DAPO: nothing up to the buffer, then a straight line down to the full factor at the limit."""
    ramp = [overlong_penalty(tokens, longest=100, buffer=20, factor=0.5) for tokens in (10, 80, 90, 100, 120)]
    assert ramp == [0.0, 0.0, -0.25, -0.5, -0.5]


@pytest.mark.parametrize(
    ("trained_at", "made_by", "allowed", "stale"),
    [(1, 0, 0, False), (2, 0, 0, True), (3, 0, 2, False), (4, 0, 2, True), (10, 9, 0, False)],
)
def test_staleness_counts_from_the_weights_that_are_trained(trained_at, made_by, allowed, stale):
    """The batch of step s trains the weights after s - 1: tokens of those are zero steps old."""
    assert is_stale(trained_at_step=trained_at, oldest_step=made_by, allowed_outdated_steps=allowed) is stale


def test_leases_stop_at_the_bound():
    """With N steps allowed, N + 1 batches may be under way."""
    assert may_lease(admitted_not_dealt=100, leased=91, dealt_batch=64, allowed_outdated_steps=2)
    assert not may_lease(admitted_not_dealt=100, leased=92, dealt_batch=64, allowed_outdated_steps=2)
