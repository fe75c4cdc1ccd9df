"""easyckpt alone, in a plain PyTorch loop: three lines. Kill it at any moment and start it again; it goes on where it was.

Run: python examples/plain_loop.py [FOLDER] [STEPS]
"""

import sys

import torch

from easyckpt import Checkpointer

folder, steps = [*sys.argv[1:], *("checkpoints", "200")[len(sys.argv) - 1 :]]

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer}

ckpt = Checkpointer(folder)  # 1
restored = ckpt.restore(
    state
)  # 2: fills model and optimizer from memory, else from the folder; None at the first start
start = restored.step if restored else 0
print(f"starting after step {start}" + (f" (from {restored.tier})" if restored else ""), flush=True)

for step in range(start + 1, int(steps) + 1):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
    loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()  # waits for the copy of the save before, if it is still running
    ckpt.save(step, state)  # 3
    print(f"step {step} loss {loss.item():.6f}", flush=True)

ckpt.close()
