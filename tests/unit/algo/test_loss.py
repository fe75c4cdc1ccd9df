"""Losses against values worked out by hand, against each other, and against finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_runtime.algo.loss import LossSettings, Normaliser, aggregate, policy_loss, sequence_log_ratio, token_logprobs

NORM = Normaliser(tokens=10, sequences=4)


def one_token(ratio, advantage, **settings):
    """Loss and its derivative by the log-prob, of one token with this ratio."""
    logprob = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    parts = policy_loss(
        logprob,
        torch.tensor([[-1.0]]),
        torch.tensor([advantage]),
        torch.ones(1, 1),
        norm=Normaliser(tokens=1, sequences=1),
        settings=LossSettings(**settings),
    )
    parts.loss.backward()
    return float(parts.loss.detach()), float(logprob.grad)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the range: -r A
        (1.5, 2.0, -2.6, 0.0),  # above 1 + 0.3: clipped, no gradient
        (0.5, 2.0, -1.0, -1.0),  # below, with A > 0: not clipped
        (0.5, -1.0, 0.8, 0.0),  # below 1 - 0.2 with A < 0: clipped
        (2.0, -1.0, 2.0, 2.0),  # above with A < 0: not clipped
        (5.0, -1.0, 3.0, 0.0),  # dual clip: never more than c |A|
    ],
)
def test_grpo_clips_as_the_papers_say(ratio, advantage, loss, slope):
    """PPO's clip with a higher upper bound (DAPO), and the dual clip for negative advantages."""
    got = one_token(ratio, advantage, epsilon_low=0.2, epsilon_high=0.3, lower_bound_ratio=3.0)
    assert got == pytest.approx((loss, slope), abs=1e-5)


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.1), (1.5, 1.5), (4.0, 2.0)])
def test_aipo_caps_the_weight_and_keeps_the_gradient(ratio, weight):
    """AIPO: the gradient of log p is weighted by min(r, rho), never cut off."""
    assert one_token(ratio, 3.0, aipo_rho=2.0)[1] == pytest.approx(-3.0 * weight, rel=1e-5)


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.8), (1.1, 1.1), (4.0, 1.3)])
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio, weight):
    """CISPO: the weight is clipped on both sides, every token keeps its gradient."""
    got = one_token(ratio, 3.0, variant="cispo", epsilon_low=0.2, epsilon_high=0.3)
    assert got[1] == pytest.approx(-3.0 * weight, rel=1e-5)


def test_gspo_uses_the_sequence_ratio():
    """GSPO: every token has the geometric mean of the sequence's ratios, and its own gradient."""
    logprobs = torch.tensor([[-1.0, -2.0, -3.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.3, -2.0, -9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    log_ratio = sequence_log_ratio((logprobs - behaviour) * mask, mask)
    assert log_ratio[0, :2].tolist() == pytest.approx([0.15, 0.15])
    (log_ratio * mask).sum().backward()
    assert logprobs.grad.tolist() == [[1.0, 1.0, 0.0]]


@pytest.mark.parametrize(
    ("loss_type", "longest", "expected"),
    [
        ("token-mean", None, (1 + 2 + 3) / 10),
        ("token-sum", None, 6.0),
        ("seq-mean-token-sum", None, 6 / 4),
        ("seq-mean-token-mean", None, (1.5 + 3.0) / 4),
        ("seq-mean-token-mean", 8, 6 / (8 * 4)),
    ],
)
def test_loss_types(loss_type, longest, expected):
    """Each mean is over the whole dealt batch, of which these rows are a part; Dr.GRPO divides by a constant."""
    settings = LossSettings(loss_type=loss_type, unbiased_loss_max_tokens=longest)
    objective, mask = torch.tensor([[1.0, 2.0], [3.0, 9.0]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert float(aggregate(objective, mask, norm=NORM, settings=settings)) == pytest.approx(expected)


@given(
    st.integers(0, 10_000), st.sampled_from(["grpo", "gspo"]), st.sampled_from(["token-mean", "seq-mean-token-mean"])
)
def test_gradients_agree_with_finite_differences(seed, variant, loss_type):
    """The gradient is that of the printed formula, wherever it is smooth."""
    dice = torch.Generator().manual_seed(seed)
    behaviour = -torch.rand(3, 4, generator=dice, dtype=torch.float64) * 3
    logprobs = behaviour + torch.randn(3, 4, generator=dice, dtype=torch.float64) * 0.3
    advantages = torch.randn(3, generator=dice, dtype=torch.float64)
    mask = (torch.rand(3, 4, generator=dice) > 0.3).double()
    settings = LossSettings(variant=variant, loss_type=loss_type)

    def loss(at):
        # GSPO's stop-gradient makes its gradient differ from the value's slope by token, not by sequence.
        return policy_loss(at, behaviour, advantages, mask, norm=NORM, settings=settings).loss

    at = logprobs.clone().requires_grad_()
    loss(at).backward()
    step = 1e-6
    direction = (
        torch.ones_like(logprobs) if variant == "gspo" else torch.randn(3, 4, generator=dice, dtype=torch.float64)
    )
    if variant == "gspo":
        direction = direction * mask
    measured = (loss(logprobs + step * direction) - loss(logprobs - step * direction)) / (2 * step)
    kinks = torch.exp(
        sequence_log_ratio((logprobs - behaviour) * mask, mask) if variant == "gspo" else (logprobs - behaviour) * mask
    )
    if min(float((kinks - edge).abs().min()) for edge in (0.8, 1.2, 3.0)) < 1e-4:
        return  # on a corner
    assert float((at.grad * direction).sum()) == pytest.approx(float(measured), abs=1e-6)


def test_parts_of_a_batch_add_up():
    """Losses of any split of the rows sum to the loss of all of them: shares may go to any member."""
    dice = torch.Generator().manual_seed(1)
    logprobs, behaviour = torch.randn(6, 5, generator=dice), torch.randn(6, 5, generator=dice)
    advantages, mask = torch.randn(6, generator=dice), torch.ones(6, 5)
    settings = LossSettings(loss_type="seq-mean-token-mean")

    def loss(rows):
        return policy_loss(
            logprobs[rows], behaviour[rows], advantages[rows], mask[rows], norm=NORM, settings=settings
        ).loss

    assert float(loss([0, 5]) + loss([1, 2, 3]) + loss([4])) == pytest.approx(float(loss(slice(None))), rel=1e-5)


def test_token_logprobs_are_at_the_sampling_temperature():
    """Log-probs are of logits divided by the temperature, as the engine samples."""
    logits = torch.tensor([[1.0, 2.0, 4.0]])
    expected = torch.log_softmax(logits / 0.5, -1)[0, 1]
    assert float(token_logprobs(logits, torch.tensor([1]), temperature=0.5)) == pytest.approx(float(expected), rel=1e-6)
