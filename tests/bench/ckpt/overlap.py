"""What overlapped saving costs a training loop: stall, slowdown. `python -m tests.bench.ckpt.overlap FOLDER GIB OUT [--steps N]`."""

import argparse
import json
import os
import shutil
import statistics
import time

import torch

from easyckpt import Checkpointer
from tests.bench.ckpt.state import Work, make, size, stamp


class Stamp(torch.optim.Optimizer):
    """An optimizer that owns every weight and moment of the state and rewrites all of it in a step."""

    def __init__(self, state):
        super().__init__(list(state["model"].values()), {})
        self.all = state
        for name, parameter in state["model"].items():
            self.state[parameter] = state["optim"]["state"][name]

    def step(self, number):
        stamp(self.all, number)


def stalls(state, optimizer, work, engine_folder):
    """The copy's own time, and what remains of it when forward and backward take twice as long."""
    direct = Checkpointer(None, folder=f"{engine_folder}-copy", mode="copy", on_event=lambda _event: None)
    direct.prepare(state)
    copies = []
    for step in range(1, 6):
        started = time.perf_counter()
        direct.save(step, state)
        copies.append(time.perf_counter() - started)
        direct.wait()
    direct.close()
    shutil.rmtree(f"{engine_folder}-copy")
    copy = statistics.median(copies[1:])

    waited = []
    engine = Checkpointer(
        None,
        folder=f"{engine_folder}-over",
        on_event=lambda event: waited.append(event.seconds) if event.kind == "save_waited" else None,
    )
    engine.prepare(state)
    seen = []
    for step in range(1, 11):
        waited.clear()
        started = time.perf_counter()
        engine.save(step, state)
        stall = time.perf_counter() - started
        work.for_seconds(2 * copy)
        optimizer.step(step)
        seen.append(stall + sum(waited))
    engine.wait()
    engine.close()
    shutil.rmtree(f"{engine_folder}-over")
    return {"copy_seconds": copy, "stall_overlapped": statistics.median(seen[2:]), "stall_overlapped_first": seen[0]}


def slowdown(state, optimizer, gib, steps, folder, engine_folder):
    """Steps of 2 s a GiB on all cores: alone, and with a memory save each and a flush every fifth."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    work = Work(1024)
    until = time.perf_counter() + 2
    rate = work.rate(lambda: time.perf_counter() > until)
    units = max(1, int(2 * gib * rate))

    def run(engine):
        times = []
        for step in range(1, steps + 1):
            started = time.perf_counter()
            if engine is not None:
                engine.save(step, state)
            work.units(units)
            optimizer.step(step)
            times.append(time.perf_counter() - started)
        return times

    alone = run(None)
    engine = Checkpointer(folder, folder=f"{engine_folder}-slow", flush_every=5, keep=1, on_event=lambda _event: None)
    engine.prepare(state)
    with_saves = run(engine)
    engine.close()
    again = run(None)
    base = statistics.mean(alone[1:] + again[1:])
    return {"step_slowdown": statistics.mean(with_saves[2:]) / base - 1, "step_seconds": base}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("gib", type=float)
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = make(int(options.gib * 2**30))
    optimizer = Stamp(state)
    optimizer.step(0)
    shared = "/dev/shm/easyckpt-bench-overlap"
    figures = {"bytes": size(state), **stalls(state, optimizer, Work(), shared)}
    figures |= slowdown(state, optimizer, options.gib, options.steps, options.folder, shared)
    with open(options.out, "w") as file:
        json.dump(figures, file)


if __name__ == "__main__":
    main()
