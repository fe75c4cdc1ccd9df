"""Gradients of shares: whoever computes them, in whatever order, on however many members, the step is the same."""

import itertools
import random

import pytest
import torch

from aimaster.wire.checkpoint import Version
from aimaster.wire.training import Sample, Share
from rl_runtime.algo.loss import LossSettings, Normaliser
from rl_runtime.config import OptimizerChoice, WarmStart
from rl_runtime.models.load import ModelChoice, load_model
from rl_runtime.models.tiny import Shape, TinyLlama
from rl_runtime.policy.trainer import Batch, Trainer, digest
from rl_runtime.policy.warm_start import warm_start

SHAPE = Shape(vocab_size=24, hidden_size=16, intermediate_size=32, max_position_embeddings=16)
NORM = Normaliser(tokens=60, sequences=16)
BATCH = Batch(step=1, digest="d")


def trainer(**optimizer):
    return Trainer(
        TinyLlama(SHAPE, seed=1),
        loss=LossSettings(),
        optimizer=OptimizerChoice(**{"betas": (0.9, 0.95), "weight_decay": 0.1, "largest_norm": 0.05} | optimizer),
        micro_rows=3,
        seed=7,
    )


def shares(count=4, rows=4):
    dice = random.Random(3)
    samples = []
    for number in range(count * rows):
        length = dice.randrange(1, 6)
        samples.append(
            Sample(
                prompt_id=number,
                index=0,
                prompt_tokens=tuple(dice.randrange(24) for _ in range(dice.randrange(1, 6))),
                tokens=tuple(dice.randrange(24) for _ in range(length)),
                logprobs=tuple(-dice.uniform(1, 4) for _ in range(length)),
                versions=(Version(0, 0),) * length,
                reward=0.0,
                advantage=dice.choice([-1.0, 0.0, 1.5]),
            )
        )
    return [
        Share(number=number, samples=tuple(samples[number * rows : (number + 1) * rows])) for number in range(count)
    ]


def gradient(of, *numbers, parts=None):
    of.begin(BATCH)
    for share in parts or shares():
        if share.number in numbers:
            of.add(share, norm=NORM, beat=lambda: None)
    return of.gradient


def far(one, other):
    return float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))


def test_any_deal_of_the_shares_gives_the_same_gradient():
    """Two members with two shares each, three and one, one with all: the sum is the same to float tolerance."""
    whole = gradient(trainer(), 0, 1, 2, 3)
    for mine in itertools.chain(itertools.combinations(range(4), 2), [(3,), (0, 1, 2)]):
        others = tuple(set(range(4)) - set(mine))
        assert far(gradient(trainer(), *mine) + gradient(trainer(), *others), whole) < 1e-6


def test_a_share_in_hand_is_not_added_twice():
    """A resent word changes nothing."""
    member = trainer()
    once = gradient(member, 0, 1).clone()
    assert torch.equal(gradient(member, 0, 1), once)
    assert member.shares == {0, 1}


def test_gradients_of_another_batch_are_dropped_first():
    """Same step, other digest: what was in hand is gone."""
    member = trainer()
    gradient(member, 0, 1)
    member.begin(Batch(step=1, digest="other"))
    assert member.shares == set()
    assert not member.gradient.any()


def test_the_step_is_torchs_adamw_on_clipped_gradients():
    """Parameters after two steps are those of torch.optim.AdamW over the separate parameters."""
    for kernel in ("fused", "foreach", "for-loop"):
        member = trainer(kernel=kernel)
        plain = TinyLlama(SHAPE, seed=1)
        reference = torch.optim.AdamW(plain.parameters(), betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
        for rate in (1e-2, 3e-3):
            gradient(member, 0, 1, 2, 3)
            for parameter, (_, view) in zip(plain.parameters(), member.views(member.gradient), strict=True):
                parameter.grad = view.clone()
            norm = member.apply(member.gradient.clone(), learning_rate=rate)
            assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)), rel=1e-5)
            assert norm > 0.05
            for group in reference.param_groups:
                group["lr"] = rate
            reference.step()
        for name, parameter in plain.named_parameters():
            assert torch.allclose(member.weights()[name], parameter, atol=1e-6), (kernel, name)


def test_nothing_is_applied_before_apply():
    """Computing and reducing leave parameters and moments as they are."""
    member = trainer()
    before = {name: tensor.clone() for part in member.state().values() for name, tensor in part.items()}
    gradient(member, 0, 1, 2, 3)
    after = {name: tensor for part in member.state().values() for name, tensor in part.items()}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_state_is_restored_in_place():
    """Copied into another member's views, the state makes that member's next step the same, bit by bit."""
    first, second = trainer(), trainer()
    gradient(first, 0, 1, 2, 3)
    first.apply(first.gradient.clone(), learning_rate=1e-2)
    for name, part in second.state().items():
        for key, view in part.items():
            view.copy_(first.state()[name][key])
    sums = [gradient(member, 0, 1, 2, 3).clone() for member in (first, second)]
    assert digest(sums[0]) == digest(sums[1])
    for member, total in zip((first, second), sums, strict=True):
        member.apply(total, learning_rate=1e-3)
    assert all(torch.equal(first.weights()[name], view) for name, view in second.weights().items())


def test_a_tied_weight_is_one_tensor():
    """Tied embeddings are counted, reduced and saved once."""
    tied = Trainer(
        TinyLlama(Shape(vocab_size=24, hidden_size=16, intermediate_size=32, tie_word_embeddings=True), seed=1),
        loss=LossSettings(), optimizer=OptimizerChoice(), micro_rows=3, seed=7,
    )  # fmt: skip
    assert "lm_head.weight" not in tied.weights()
    assert tied.gradient.numel() == sum(view.numel() for view in tied.weights().values())


def test_the_warm_start_is_a_function_of_the_seed():
    """Two members that begin have the same weights; the loss falls; nothing stays in the gradient."""
    rows = [{"prompt": f"{number}=", "answer": str(number)[::-1]} for number in range(10, 60)]
    settings = WarmStart(steps=30, rows=16, learning_rate=3e-3, seed=5)
    made = []
    for _ in range(2):
        bundle = load_model(ModelChoice(shape=Shape(vocab_size=96), max_length=32, seed=2))
        member = Trainer(bundle.model, loss=LossSettings(), optimizer=OptimizerChoice(), micro_rows=8, seed=0)
        beats = []
        loss = warm_start(bundle, rows, settings, device="cpu", beat=lambda beats=beats: beats.append(1))
        member.drop()
        assert len(beats) == 30
        made.append((loss, member))
    assert made[0][0] == made[1][0] < 2.5
    assert torch.equal(made[0][1].weights()["model.norm.weight"], made[1][1].weights()["model.norm.weight"])
    assert not made[0][1].gradient.any()
