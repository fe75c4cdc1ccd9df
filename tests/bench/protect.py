"""What each mode of saving takes from a training loop: `python -m tests.bench.protect [--gib G] [--rounds N]`. A table, and JSON as the last line.

One state, rewritten whole in every step as an optimizer does. Each round has one step without a save and one with a save in each mode, in turn,
with forward and backward of twice the copy's time between the save and the rewriting (`apart`), or nothing between them (`at once`: the worst
case for whoever copies behind the trainer's back). Stall is the time in `save` and, for the overlapped mode, the wait in `ready`.
"""

import argparse
import json
import os
import shutil
import statistics
import time

import torch

from easyckpt import Checkpointer
from tests.bench.ckpt.measure import others_cpu_seconds
from tests.bench.ckpt.overlap import Stamp
from tests.bench.ckpt.state import Work, make, size

FOLDER = f"/dev/shm/easyckpt-protect-{os.getpid()}"
MODES = ("copy", "overlap", "protect")


def everyones_cpu():
    """CPU seconds of this process and of those that it started."""
    return sum(os.times()[:2]) + others_cpu_seconds(0)


def one_step(engine, owner, work, between_seconds, number):
    """Stall and the trainer's own CPU in it, the step's time, and the CPU of everything until the snapshot is sealed."""
    cpu, started, own = everyones_cpu(), time.perf_counter(), time.thread_time()
    stall = stall_cpu = 0.0
    if engine is not None:
        engine.save(number, owner.all)
        stall, stall_cpu = time.perf_counter() - started, time.thread_time() - own
    working = time.thread_time()
    if between_seconds:
        work.for_seconds(between_seconds)
    working = time.thread_time() - working
    if engine is not None:
        waited = time.perf_counter()
        engine.ready()
        stall += time.perf_counter() - waited
    owner.step(number)
    took = time.perf_counter() - started - between_seconds
    if engine is not None:
        engine.wait()
    return stall, took, everyones_cpu() - cpu - working, stall_cpu


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    state = make(int(options.gib * 2**30))
    owner, work, gib = Stamp(state), Work(), size(state) / 2**30
    heard = []
    engines = {mode: Checkpointer(folder=f"{FOLDER}-{mode}", mode=mode, on_event=heard.append) for mode in MODES}
    owner.step(0)
    for engine in engines.values():
        engine.prepare(state)
    refused = [event.text for event in heard if event.kind == "protect_refused"]
    step, copy = 0, 0.1 * gib
    seen = {(mode, how): [] for mode in ("none", *MODES) for how in ("apart", "at once")}
    for _ in range(options.rounds + 2):
        for how in ("apart", "at once"):
            for mode in ("none", *MODES):
                step += 1
                figures = one_step(engines.get(mode), owner, work, 2 * copy if how == "apart" else 0, step)
                seen[mode, how].append(figures)
                if mode == "copy":
                    copy = figures[0]
    for engine in engines.values():
        engine.close()
    for mode in MODES:
        shutil.rmtree(f"{FOLDER}-{mode}", ignore_errors=True)
    report(seen, gib, refused)


def report(seen, gib, refused):
    figures = {}
    print(f"{gib:.2f} GiB, milliseconds a GiB, medians [least]; CPU in seconds a GiB")
    print(f"{'mode':10}{'between':10}{'stall':>18}{'of it CPU':>12}{'step longer by':>18}{'CPU':>8}")
    for (mode, how), rows in seen.items():
        stalls, steps, cpu, own = zip(*rows[2:], strict=True)
        own_cpu = statistics.median(own) / gib * 1000
        base = statistics.median(one[1] for one in seen["none", how][2:])
        base_cpu = statistics.median(one[2] for one in seen["none", how][2:])
        stall, longer = statistics.median(stalls) / gib * 1000, (statistics.median(steps) - base) / gib * 1000
        each = (statistics.median(cpu) - base_cpu) / gib
        if mode != "none":
            print(
                f"{mode:10}{how:10}{stall:10.1f} [{min(stalls) / gib * 1000:5.1f}]{own_cpu:12.1f}{longer:18.1f}{each:8.2f}"
            )
        name = f"{mode}_{how.replace(' ', '_')}"
        figures[name] = {
            "stall_ms_per_gib": stall,
            "stall_cpu_ms_per_gib": own_cpu,
            "step_longer_ms_per_gib": longer,
            "cpu_seconds_per_gib": each,
        }
    if refused:
        print(f"protection is refused here: {refused[0]}")
    print(json.dumps({"gib": gib, "refused": refused, **figures}))


if __name__ == "__main__":
    main()
