"""The same promises for CUDA tensors: `pytest -m gpu`."""

import pytest
import torch
from torch import nn

from easyckpt import Checkpointer, RandomState

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]


@pytest.fixture
def engine(folder):
    made = []

    def make(**fields):
        made.append(Checkpointer(folder=folder, **fields))
        return made[-1]

    yield make
    for one in made:
        one.close()


def build():
    model = nn.Sequential(nn.Linear(2000, 2000), nn.BatchNorm1d(2000), nn.Linear(2000, 10)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(8, 2000, device="cuda")).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("mode", ["overlap", "copy"])
def test_a_step_right_after_the_save_never_shows_in_it(engine, mode):
    """Parameters, moments, BatchNorm buffers and 0-dim steps, with the training stream running on."""
    torch.manual_seed(0)
    model, optimizer = build()
    step(model, optimizer)
    checkpointer = engine(mode=mode)
    checkpointer.prepare({"model": model, "optimizer": optimizer, "rng": RandomState()})
    for number in range(1, 6):
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        moment = optimizer.state[model[0].weight]["exp_avg"].clone()
        checkpointer.save(number, {"model": model, "optimizer": optimizer, "rng": RandomState()})
        for _ in range(3):
            step(model, optimizer)
        _, state = checkpointer.load()
        assert all(torch.equal(state["model"][name].cuda(), want[name]) for name in want)
        assert torch.equal(state["optimizer"]["state"][0]["exp_avg"].cuda(), moment)


def test_restoring_into_device_memory_goes_on_bit_equal(engine):
    model, optimizer = build()
    step(model, optimizer)
    checkpointer = engine()
    checkpointer.save(1, {"model": model, "optimizer": optimizer, "rng": RandomState()})
    step(model, optimizer)
    want = model[0].weight.clone()
    fresh, fresh_optimizer = build()
    checkpointer.restore({"model": fresh, "optimizer": fresh_optimizer, "rng": RandomState()})
    step(fresh, fresh_optimizer)
    assert torch.equal(fresh[0].weight, want)
