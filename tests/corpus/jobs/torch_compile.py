"""Compiles many small models, each of another shape: TORCH_LOGS makes this talk. Arguments: models, backend, seed."""

import random
import sys

import torch


def make(dice: random.Random) -> torch.nn.Module:
    width = dice.choice((8, 16, 24, 32))
    layers: list[torch.nn.Module] = []
    for _ in range(dice.randrange(1, 4)):
        layers += [
            torch.nn.Linear(width, width),
            dice.choice((torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.Tanh))(),
        ]
        if dice.random() < 0.4:
            layers.append(torch.nn.LayerNorm(width))
    layers.append(torch.nn.Linear(width, dice.randrange(2, 9)))
    model = torch.nn.Sequential(*layers)
    model.width = width
    return model


def main() -> None:
    count, backend, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dice = random.Random(seed)
    for number in range(count):
        torch._dynamo.reset()
        model = make(dice)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend=backend, dynamic=dice.random() < 0.3)
        for rows in (4, 4, 9):
            loss = compiled(torch.randn(rows, model.width)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {number}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
