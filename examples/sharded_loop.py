"""easyckpt with sharded ranks: the same three lines. Kill it at any moment and start it again, on as many ranks as you like.

Run: torchrun --nproc-per-node 2 examples/sharded_loop.py [FOLDER] [STEPS]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from easyckpt import Checkpointer

folder, steps = [*sys.argv[1:], *("checkpoints", "200")[len(sys.argv) - 1 :]]

gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
model = model.cuda() if gpu else model
mesh = dist.init_device_mesh("cuda" if gpu else "cpu", (ranks,))
for layer in (*model, model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
state = {"model": model, "optimizer": optimizer}

ckpt = Checkpointer(folder, rank=rank, ranks=ranks)  # 1: each rank keeps and saves its own shards
restored = ckpt.restore(state)  # 2: all ranks take the newest step that all can have, cut as they need it
start = restored.step if restored else 0
if rank == 0:
    print(f"starting after step {start}" + (f" (from {restored.tier})" if restored else ""), flush=True)

for step in range(start + 1, int(steps) + 1):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).device)
    loss = (model(x).squeeze(-1) - x.sum(-1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.save(step, state)  # 3: a step is whole when all ranks have it
    if rank == 0:
        print(f"step {step} loss {loss.item():.6f}", flush=True)

ckpt.close()
dist.destroy_process_group()
