"""What overlapped saving costs a training loop: stall, slowdown. `python -m tests.bench.ckpt.overlap FOLDER GIB OUT [--blocks N]`."""

import argparse
import json
import os
import shutil
import statistics
import time

import torch

from easyckpt import Checkpointer
from tests.bench.ckpt.state import Work, make, size, stamp

now = time.perf_counter
BLOCK_STEPS = 5
COPIES, OVERLAPS, PROVED = 6, 12, 2


class Stamp(torch.optim.Optimizer):
    """An optimizer that owns every weight and moment of the state and rewrites all of it in a step."""

    def __init__(self, state):
        super().__init__(list(state["model"].values()), {})
        self.all = state
        for name, parameter in state["model"].items():
            self.state[parameter] = state["optim"]["state"][name]

    def step(self, number):
        stamp(self.all, number)


def quiet(_event):
    pass


def stalls(state, optimizer, shared):
    """The copy's own time, and what remains of it when forward and backward take twice as long."""
    direct = Checkpointer(None, folder=f"{shared}-copy", mode="copy", on_event=quiet)
    direct.prepare(state)
    copies, copies_cpu = [], []
    for step in range(1, COPIES + 1):
        spent, started = time.thread_time(), now()
        direct.save(step, state)
        copies.append(now() - started)
        copies_cpu.append(time.thread_time() - spent)
        direct.wait()
        optimizer.step(step)  # what does not change is not copied
    direct.close()
    shutil.rmtree(f"{shared}-copy")
    copy = statistics.median(copies[1:])

    waits = []
    engine = Checkpointer(
        None,
        folder=f"{shared}-over",
        on_event=lambda event: waits.append(event.seconds) if event.kind == "save_waited" else None,
    )
    engine.prepare(state)
    work, seen, cpu = Work(), [], []
    for step in range(1, OVERLAPS + 1):
        waits.clear()
        spent, started = time.thread_time(), now()
        engine.save(step, state)
        stall = now() - started
        cpu.append(time.thread_time() - spent)
        work.for_seconds(2 * copy)
        optimizer.step(step)
        seen.append(stall + sum(waits))
    engine.wait()
    engine.close()
    shutil.rmtree(f"{shared}-over")
    later, later_cpu = seen[PROVED:], cpu[PROVED:]
    return {
        "copy_seconds": copy, "copy_cpu": statistics.median(copies_cpu[1:]), "stall_overlapped": statistics.median(later), "stall_overlapped_most": max(later),
        "stall_overlapped_cpu": statistics.median(later_cpu), "stall_overlapped_first": seen[0],
    }  # fmt: skip


def slowdown(state, optimizer, gib, blocks, folder, shared):
    """Steps of 2 s a GiB on all cores: blocks of five alone, and blocks of five with a memory save each and a flush in the first."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    work = Work(1024)
    until = now() + 2
    rate = work.rate(lambda: now() > until)
    units = max(1, int(2 * gib * rate))
    engine = Checkpointer(folder, folder=f"{shared}-slow", flush_every=None, keep=1, on_event=quiet)
    engine.prepare(state)
    engine.save(0, state, flush=True)  # the helper starts here, once
    engine.wait()
    number = 0

    def block(save):
        nonlocal number
        started = now()
        for index in range(BLOCK_STEPS):
            number += 1
            if save:
                engine.save(number, state, flush=index == 0)
            work.units(units)
            optimizer.step(number)
        if save:
            engine.wait()  # what is left of the flush belongs to this block
        return now() - started

    block(save=True)
    alone, saving = [], []
    for _ in range(blocks):
        alone.append(block(save=False))
        saving.append(block(save=True))
    alone.append(block(save=False))
    engine.close()
    # Each block against the mean of its neighbours: the machine's other load drifts.
    ratios = [with_saves / ((alone[at] + alone[at + 1]) / 2) for at, with_saves in enumerate(saving)]
    seconds = statistics.mean(alone) / BLOCK_STEPS
    return {"step_slowdown": statistics.mean(ratios) - 1, "step_seconds": seconds, "slowdowns": ratios}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("gib", type=float)
    parser.add_argument("out")
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = make(int(options.gib * 2**30))
    optimizer = Stamp(state)
    optimizer.step(0)
    shared = "/dev/shm/easyckpt-bench-overlap"
    figures = {"bytes": size(state), **stalls(state, optimizer, shared)}
    if options.blocks:
        figures |= slowdown(state, optimizer, options.gib, options.blocks, options.folder, shared)
    with open(options.out, "w") as file:
        json.dump(figures, file)


if __name__ == "__main__":
    main()
