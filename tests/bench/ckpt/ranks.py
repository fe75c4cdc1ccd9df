"""Two gloo ranks, a model sharded by FSDP2, its AdamW: each engine in turn in the same processes, save by save; the slowest rank counts.

`python -m tests.bench.ckpt.ranks FOLDER GIB OUT [--rounds N]`, started once for each rank with RANK and WORLD_SIZE set; rank 0 writes the figures.
"""

import argparse
import json
import logging
import mmap
import os
import shutil
import time
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402 - the filter stands before everything that warns
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from easyckpt import Checkpointer  # noqa: E402
from tests.bench.ckpt.state import tensors  # noqa: E402

LAYERS = 12
SHM = "/dev/shm/easyckpt-bench-ranks"

now = time.perf_counter


class Block(nn.Module):
    """The weights of a transformer's block; attention itself holds none."""

    def __init__(self, width):
        super().__init__()
        self.before, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.between, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.proj(self.qkv(self.before(x)).chunk(3, dim=-1)[0])
        return x + self.down(self.up(self.between(x)).relu())


def build(nbytes):
    """Model and optimizer after one step, as one state dict of DTensors that are the live ones."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    width = int((nbytes / 12 / (12 * LAYERS)) ** 0.5) // 16 * 16
    model = nn.Sequential(*[Block(width) for _ in range(LAYERS)])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optim": moments}


def locals_of(state):
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for _, tensor in tensors(state)]


@torch.no_grad()
def stamp(state, number):
    for index, tensor in enumerate(locals_of(state)):
        tensor.fill_(float(number + index))


def is_right(state, number):
    return all(bool((tensor == float(number + index)).all()) for index, tensor in enumerate(locals_of(state)))


class Floor:
    name = "FLOOR copy_ of local shards into touched shared memory"

    def __init__(self, state, rank):
        held = locals_of(state)
        total = sum(-(-tensor.nbytes // 64) * 64 for tensor in held)
        fd = os.open(f"{SHM}-floor-{rank}", os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(fd, 0, total)
        memory, at, self.views = mmap.mmap(fd, total), 0, []
        os.close(fd)
        for tensor in held:
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at)
            self.views.append(flat.view(tensor.shape).zero_())
            at += -(-tensor.nbytes // 64) * 64

    @torch.no_grad()
    def save(self, state, _folder, _number):
        for view, tensor in zip(self.views, locals_of(state), strict=True):
            view.copy_(tensor)

    def wait(self):
        pass

    @torch.no_grad()
    def load(self, state, _folder):
        for view, tensor in zip(self.views, locals_of(state), strict=True):
            tensor.copy_(view)


class Ours:
    name = "easyckpt, copy mode, memory only"

    def __init__(self, state, rank):
        self.engine = Checkpointer(
            None,
            folder=f"{SHM}-ours",
            rank=rank,
            ranks=dist.get_world_size(),
            mode="copy",
            on_event=lambda _event: None,
        )
        self.engine.prepare(state)

    def save(self, state, _folder, number):
        self.engine.save(number, state)

    def wait(self):
        self.engine.wait()

    def load(self, state, _folder):
        self.engine.restore(state)


class TorchSave(Floor):
    name = "torch.save of local shards, a file each"

    def __init__(self, _state, rank):
        self.rank = rank

    def save(self, state, folder, _number):
        torch.save(locals_of(state), f"{folder}/{self.rank}.pt")

    @torch.no_grad()
    def load(self, state, folder):
        found = torch.load(f"{folder}/{self.rank}.pt", weights_only=True)
        for tensor, held in zip(locals_of(state), found, strict=True):
            tensor.copy_(held)


class DcpSave(TorchSave):
    name = "dcp.save"

    def save(self, state, folder, _number):
        dcp.save(state, checkpoint_id=folder)

    def load(self, state, folder):
        dcp.load(state, checkpoint_id=folder)


class DcpAsync(DcpSave):
    name = "dcp.async_save, default"
    kind = AsyncCheckpointerType.THREAD
    staging: tuple[bool, ...] | None = None

    def __init__(self, _state, _rank):
        self.group = dist.new_group(backend="gloo")
        self.stager = DefaultStager(StagingOptions(*self.staging)) if self.staging else None

    def save(self, state, folder, _number):
        started = dcp.async_save(
            state,
            checkpoint_id=folder,
            process_group=self.group,
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )
        if hasattr(started, "staging_completion"):
            started.staging_completion.result()
            started = started.upload_completion
        self.result = started

    def wait(self):
        self.result.result()


class DcpReused(DcpAsync):
    name = "dcp.async_save, reused stager"
    staging = (False, False, False, False)


class DcpProcess(DcpAsync):
    name = "dcp.async_save in a process, reused shared stager"
    kind = AsyncCheckpointerType.PROCESS
    staging = (False, True, False, False)


def slowest(value):
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.item()


def measure(engine, state, folder, number, rank):
    """One save and one restore; every rank begins together."""
    if rank == 0:
        os.makedirs(folder)
    stamp(state, number)
    dist.barrier()
    cpu, started = time.process_time(), now()
    engine.save(state, folder, number)
    stall, stall_cpu = now() - started, time.process_time() - cpu
    stamp(state, number + 1000)
    engine.wait()
    complete = now() - started
    dist.barrier()
    cpu, started = time.process_time(), now()
    engine.load(state, folder)
    restore, restore_cpu = now() - started, time.process_time() - cpu
    wrong = slowest(float(not is_right(state, number)))
    figures = {
        "stall": stall,
        "stall_cpu": stall_cpu,
        "complete": complete,
        "restore": restore,
        "restore_cpu": restore_cpu,
    }
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)
    return {
        **{name: slowest(value) for name, value in figures.items()},
        "wrong": "a shard is torn or stale" if wrong else "",
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("gib", type=float)
    parser.add_argument("out")
    parser.add_argument("--rounds", type=int, default=4, help="the first one warms up and shows first saves")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = build(int(options.gib * 2**30))
    held = locals_of(state)
    kinds = (Floor, Ours, DcpReused, DcpAsync, DcpProcess, DcpSave, TorchSave)
    engines = [kind(state, rank) for kind in kinds]
    results = {engine.name: [] for engine in engines}
    for number in range(1, options.rounds + 1):
        for engine in engines:
            found = measure(engine, state, f"{options.folder}/{number}-{type(engine).__name__}", number, rank)
            results[engine.name].append(found)
    if rank == 0:
        about = {"bytes_a_rank": sum(tensor.nbytes for tensor in held), "tensors": len(held)}
        with open(options.out, "w") as file:
            json.dump({**about, "engines": results}, file)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
