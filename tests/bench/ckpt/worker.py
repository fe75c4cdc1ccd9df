"""One engine in one fresh process: `save` (a training loop, then it waits to be killed) or `restore`. Writes its figures as JSON."""

import argparse
import json
import logging
import os
import sys
import time
import warnings

warnings.filterwarnings("ignore")

from tests.bench.ckpt import measure  # noqa: E402 - the filter stands before everything that warns
from tests.bench.ckpt.state import Work, make, size, stamp, wrong  # noqa: E402

now = time.perf_counter


def save(engine, state, options):
    before = measure.memory_bytes(measure.everyone(0)[:1])
    started = now()
    engine.open(state)
    figures = {"open_seconds": now() - started, "bytes": size(state), "saves": []}
    work = Work()
    until = now() + 0.5
    idle = work.rate(lambda: now() > until)
    for step in range(1, options.saves + 1):
        stamp(state, step)
        figures["saves"].append(one_save(engine, state, step, idle, work, options))
    step = options.saves + 1
    stamp(state, step)
    with measure.peak_memory(options.side, engine.unmapped) as peak:
        engine.save(state, step)
        stamp(state, step + 1000)
        engine.wait()
    if engine.durable:
        measure.sync_tree(options.folder)
    return {**figures, "extra_memory": (peak[0] - before) / figures["bytes"], "last": step}


def one_save(engine, state, step, idle, work, options):
    others, cpu, started = measure.others_cpu_seconds(options.side), time.process_time(), now()
    engine.save(state, step)
    stall, stall_cpu = now() - started, time.process_time() - cpu
    mine = time.thread_time()
    stamp(state, step + 1000)  # the trainer goes on at once: a torn snapshot shows in the restore
    beside = None if engine.done() else work.rate(engine.done)
    engine.wait()
    complete = now() - started
    here = time.process_time() - cpu - (time.thread_time() - mine)
    if engine.durable:
        measure.sync_tree(options.folder)
    durable = now() - started
    engine.trim(step)
    return {
        "stall": stall, "stall_cpu": stall_cpu, "save_cpu": here + measure.others_cpu_seconds(options.side) - others,
        "complete": complete, "durable": durable if engine.durable else None,
        "slowdown": None if beside is None else 1 - beside / idle,
    }  # fmt: skip


def restore(engine, state):
    stamp(state, -1)  # all pages are there: the new trainer has built its model
    engine.reopen()
    cpu, started = time.process_time(), now()
    step = int(engine.restore(state))
    figures = {"restore": now() - started, "restore_cpu": time.process_time() - cpu}
    return {**figures, "step": step, "wrong": wrong(state, step)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["save", "restore"])
    parser.add_argument("engine")
    parser.add_argument("folder")
    parser.add_argument("gib", type=float)
    parser.add_argument("out")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--side", type=int, default=0)
    options = parser.parse_args()
    import torch

    from tests.bench.ckpt.registry import BY_NAME

    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    kind = BY_NAME[options.engine]
    if kind.group:
        import torch.distributed as dist

        store = dist.FileStore(f"{options.out}.store-{options.mode}", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    engine = kind(options.folder)
    state = make(int(options.gib * 2**30))
    figures = save(engine, state, options) if options.mode == "save" else restore(engine, state)
    with open(options.out, "w") as file:
        json.dump(figures, file)
    print("READY", flush=True)
    if options.mode == "save":
        sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()
