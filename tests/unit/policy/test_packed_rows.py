"""A prompt is read once for all its completions: the gradient is that of separate rows."""

import random

import pytest
import torch

from aimaster.wire.checkpoint import Version
from aimaster.wire.training import Sample, Share
from rl_runtime.algo.loss import LossSettings, Normaliser
from rl_runtime.config import OptimizerChoice
from rl_runtime.models.load import ModelChoice, load_model
from rl_runtime.policy import trainer as module
from rl_runtime.policy.trainer import Batch, Trainer
from tests.fakes.model_folder import make_model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Llama with grouped heads, as transformers loads it."""
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    return load_model(ModelChoice(shape=None, folder=str(folder), max_length=48)).model


def share():
    """Completions of three prompts, some without a gradient."""
    dice = random.Random(4)
    samples = []
    for prompt_id in range(3):
        prompt = tuple(dice.randrange(3, 40) for _ in range(dice.randrange(4, 20)))
        for index in range(5):
            tokens = tuple(dice.randrange(3, 40) for _ in range(dice.randrange(1, 9)))
            samples.append(
                Sample(
                    prompt_id=prompt_id,
                    index=index,
                    prompt_tokens=prompt,
                    tokens=tokens,
                    logprobs=tuple(-dice.uniform(2, 4) for _ in tokens),
                    versions=(Version(0, 0),) * len(tokens),
                    reward=0.0,
                    advantage=dice.choice([-1.0, 0.0, 1.5]),
                )
            )
    return Share(number=0, samples=tuple(samples))


def gradient(model, *, packed):
    model.__dict__["lays_out"] = packed
    one = Trainer(model, loss=LossSettings(), optimizer=OptimizerChoice(), micro_rows=4, seed=0)
    one.begin(Batch(step=1, digest=str(packed)))
    beats = []
    one.add(share(), norm=Normaliser(tokens=60, sequences=15), beat=lambda: beats.append(1))
    # Three passes and more, each with two blocks there and back.
    assert len(beats) >= 3 * (2 + 2 * 2)
    return one.gradient.clone()


def far(one, other):
    return float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))


def test_packed_rows_have_the_gradient_of_padded_ones(model):
    """To float tolerance."""
    padded = gradient(model, packed=False)
    assert padded.abs().max() > 0
    assert far(gradient(model, packed=True), padded) < 1e-5


@pytest.mark.parametrize("packed", [True, False])
def test_logits_made_in_parts_change_nothing(model, monkeypatch, packed):
    """However few tokens have their logits at once, the gradient is the same to float tolerance."""
    whole = gradient(model, packed=packed)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 3)
    assert far(gradient(model, packed=packed), whole) < 1e-5


def test_a_model_is_asked_whether_it_heeds_a_layout(tmp_path, model):
    """Full attention with positions does; a sliding window does not see what the layout says, and is given padded rows."""
    del model.__dict__["lays_out"]
    assert model.lays_out
    sliding = make_model_folder(tmp_path, kind="Mistral", sliding_window=4)
    assert not load_model(ModelChoice(shape=None, folder=str(sliding), max_length=48)).model.lays_out
