"""One engine in one fresh process: `save` (a training loop, then it waits to be killed) or `restore`. Writes its figures as JSON."""

import argparse
import json
import os
import sys
import time
import warnings

warnings.filterwarnings("ignore")


def descendants(pid):
    found = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                for child in map(int, file.read().split()):
                    found += [child, *descendants(child)]
    except OSError:
        pass
    return found


def cpu_of(pids):
    total = 0.0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            pass
    return total


def others_cpu(side):
    """CPU seconds of children, their children, and the side process."""
    pids = descendants(os.getpid()) + ([side, *descendants(side)] if side else [])
    times = os.times()
    return cpu_of(pids) + times.children_user + times.children_system


def pss(pids):
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024
        except OSError:
            pass
    return total


def fsync_tree(folder):
    for root, _, files in os.walk(folder):
        for name in files:
            fd = os.open(os.path.join(root, name), os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)


def save(engine, state, options):
    from tests.bench.ckpt.state import Work, size, stamp

    before = pss([os.getpid()])
    started = time.perf_counter()
    engine.open(state)
    figures = {"open_seconds": time.perf_counter() - started, "bytes": size(state), "saves": []}
    work = Work()
    until = time.perf_counter() + 0.5
    idle = work.rate(lambda: time.perf_counter() > until)
    for step in range(1, options.saves + 1):
        stamp(state, step)
        others, cpu, started = others_cpu(options.side), time.process_time(), time.perf_counter()
        engine.save(state, step)
        stall, stall_cpu = time.perf_counter() - started, time.process_time() - cpu
        mine = time.thread_time()
        stamp(state, step + 1000)  # the trainer goes on at once: a torn snapshot shows in the restore
        beside = None if engine.done() else work.rate(engine.done)
        engine.wait()
        complete = time.perf_counter() - started
        total = time.process_time() - cpu - (time.thread_time() - mine) + others_cpu(options.side) - others
        if engine.durable:
            fsync_tree(options.folder)
        durable = time.perf_counter() - started
        engine.trim(step)
        figures["saves"].append(
            {
                "stall": stall, "stall_cpu": stall_cpu, "save_cpu": total, "complete": complete, "durable": durable,
                "slowdown": None if beside is None else 1 - beside / idle,
            }
        )  # fmt: skip
    everyone = [os.getpid(), *descendants(os.getpid())]
    figures["extra_memory"] = (pss(everyone) - before) / figures["bytes"]
    return figures


def restore(engine, state):
    from tests.bench.ckpt.state import stamp, wrong

    stamp(state, -1)  # all pages are there: the new trainer has built its model
    engine.reopen()
    cpu, started = time.process_time(), time.perf_counter()
    step = engine.restore(state)
    figures = {"restore": time.perf_counter() - started, "restore_cpu": time.process_time() - cpu}
    return {**figures, "step": step, "wrong": wrong(state, int(step))}


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
    import logging

    import torch

    from tests.bench.ckpt import engines
    from tests.bench.ckpt.state import make

    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    engine = getattr(engines, options.engine)(options.folder)
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
