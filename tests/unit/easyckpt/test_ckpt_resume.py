"""A resumed run is the run: random numbers, data position, scheduler and all."""

# ruff: noqa: NPY002 - numpy's global generator is one of those that are saved

import random

import numpy as np
import pytest
import torch
from torch import nn

from easyckpt import Checkpointer, RandomState


class Data:
    """A shuffling data source with its place in it."""

    def __init__(self):
        self.order, self.at, self.passes = torch.randperm(10), 0, 0

    def next(self):
        if self.at == len(self.order):
            self.order, self.at, self.passes = torch.randperm(10), 0, self.passes + 1
        self.at += 1
        return int(self.order[self.at - 1])

    def state_dict(self):
        return {"order": self.order, "at": self.at, "passes": self.passes}

    def load_state_dict(self, state):
        self.order, self.at, self.passes = state["order"], state["at"], state["passes"]


def run(state, steps):
    """Losses that depend on every source of randomness."""
    model, optimizer, scheduler, scaler, data = (
        state[name] for name in ("model", "optimizer", "scheduler", "scaler", "data")
    )
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 16) + data.next() + random.random() + float(np.random.rand()) + random.gauss(0, 1)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses += [loss.item(), scaler.get_scale()]
    return losses


def build(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.BatchNorm1d(32), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scaler": scaler,
        "data": Data(),
        "rng": RandomState(),
    }


@pytest.mark.parametrize("mode", ["overlap", "copy"])
@pytest.mark.parametrize("steps_before", [1, 7])
def test_the_resumed_losses_are_those_of_the_uninterrupted_run(folder, steps_before, mode):
    """To the last bit, the scale of the loss included, in a process state that was scrambled in between."""
    state = build(0)
    run(state, steps_before)
    random.gauss(0, 1)  # leaves half of a pair in python's generator
    engine = Checkpointer(folder=folder, mode=mode)
    engine.save(steps_before, state)
    want = run(state, 12)
    resumed = build(99)
    engine.restore(resumed)
    assert run(resumed, 12) == want
    engine.close()
