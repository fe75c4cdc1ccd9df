"""Four gloo ranks that save a sharded training state one way and restore it in others: `python ckpt_ranks.py FOLDER`.

Two ranks of FSDP2 save; four ranks of FSDP2, a 2 x 2 mesh of replicas, a 2 x 2 mesh of tensor parallel and FSDP2, and one plain process
restore it, each into a fresh model and a fresh optimizer. All compare the whole tensors with what was saved. The last line is one JSON object.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from easyckpt import Checkpointer
from easyckpt.agreement import Together
from easyckpt.storage import list_manifests

RANKS = 4


class Model(nn.Module):
    """Uneven sizes: 7 rows on four ranks, 3 on four ranks (one gets none)."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.wide = nn.Linear(12, 7), nn.Linear(7, 3), nn.Linear(3, 8)

    def forward(self, x):
        return self.wide(self.down(self.up(x).tanh()))


def build(seed):
    torch.manual_seed(seed)
    return Model()


def shard(model, mesh, **options):
    for layer in model.children():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model, optimizer, steps):
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 12)).square().mean().backward()
        optimizer.step()


def whole(state):
    """All tensors of a state, sharded ones made whole, by path."""
    found = {}

    def walk(value, path):
        if isinstance(value, DTensor):
            found[path] = value.full_tensor().clone()
        elif isinstance(value, torch.Tensor):
            found[path] = value.clone()
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}/{key}")

    walk({"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()["state"]}, "")
    return found


def differences(found, want):
    return [name for name in want if name not in found or not torch.equal(found[name], want[name])] + sorted(
        set(found) - set(want)
    )


def wait_for_manifest(storage):
    give_up_at = time.monotonic() + 30
    while not list_manifests(storage):
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def state_of(model):
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01), "step": 0}


def restored(state, folder, name, storage, rank, ranks, group):
    engine = Checkpointer(
        storage, folder=f"{folder}/{name}", member="trainer-0", rank=rank, ranks=ranks, flush_every=None,
        ranks_agree=Together(group) if group is not None else None, on_event=lambda _event: None,
    )  # fmt: skip
    got = engine.restore(state)
    engine.close()
    return got


def run(rank, folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    storage, answer = f"{folder}/storage", {}
    pair, line = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2, 3])
    square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("outer", "inner"))
    if rank < 2:
        state = state_of(shard(build(0), pair))
        train(state["model"], state["optimizer"], 2)
        state["step"] = 2
        engine = Checkpointer(storage, folder=f"{folder}/pair", rank=rank, ranks=2, on_event=lambda _event: None)
        engine.save(2, state)
        want = whole(state)
        engine.wait()
        if rank == 0:
            torch.save(want, f"{folder}/want.pt")
        train(state["model"], state["optimizer"], 1)
        got = engine.restore(state)
        answer["same ranks"] = [got.tier, differences(whole(state), want)]
        dist.barrier(pair.get_group())
        engine.close()
    wait_for_manifest(storage)
    dist.barrier()
    want = torch.load(f"{folder}/want.pt")

    def tensor_parallel():
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "wide": ColwiseParallel()}
        return shard(parallelize_module(build(4), square["inner"], plan), square["outer"])

    cuts = {
        "four ranks": lambda: shard(build(1), line),
        "replicas": lambda: shard(build(2), square),
        "tensor parallel": tensor_parallel,
    }
    for name, make in cuts.items():
        state = state_of(make())
        got = restored(state, folder, f"{name}-{rank}".replace(" ", "-"), storage, rank, RANKS, line.get_group())
        answer[name] = [got.tier, differences(whole(state), want)]
        back = f"{folder}/back-{name}".replace(" ", "-")
        with_all = Checkpointer(back, folder=f"{back}-memory", rank=rank, ranks=RANKS, on_event=lambda _event: None)
        with_all.save(3, state)
        with_all.wait()
        if rank == 0:
            wait_for_manifest(back)
            state = state_of(build(5))
            restored(state, folder, f"plain-{name}", back, 0, 1, None)
            answer[f"{name} to plain"] = ["storage", differences(whole(state), want)]
        dist.barrier()
        with_all.close()
    if rank == 0:
        state = state_of(build(3))
        got = restored(state, folder, "alone", storage, 0, 1, None)
        answer["alone"] = [got.tier, differences(whole(state), want), state["step"]]
        train(state["model"], state["optimizer"], 1)
    dist.barrier()
    with open(f"{folder}/answer-{rank}.json", "w") as file:
        json.dump(answer, file)


def main():
    folder = sys.argv[1]
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # imports what it needs before the forks
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            try:
                run(rank, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    failed = [os.waitpid(pid, 0)[1] for pid in children]
    answers = (
        [] if any(failed) else [json.loads(Path(f"{folder}/answer-{rank}.json").read_text()) for rank in range(RANKS)]
    )
    print(json.dumps({"failed": failed, "answers": answers}))


if __name__ == "__main__":
    main()
