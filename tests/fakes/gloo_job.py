"""A four-rank gloo job under `aimaster run --nproc-per-node 4 -- python gloo_job.py MODE`: at step FAULT_AT (60) of its first start rank 2 does
what MODE says (sleep, spin, file, die, leave), or all ranks evaluate for SECONDS_LONG (mode evaluate, a first and silent phase).

A step takes STEP_SECONDS (0.05), ten more follow the fault. The moment of the fault is written into the file FAULT_FILE.
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist


def sleep_long():
    time.sleep(600)


def spin():
    number = 0
    while True:
        number += 1


def read_file():
    path = f"{tempfile.mkdtemp()}/data"
    os.mkfifo(path)
    os.read(os.open(path, os.O_RDONLY), 1)


def die():
    os.kill(os.getpid(), 9)


def leave():
    os._exit(0)


def evaluate():
    time.sleep(float(os.environ.get("SECONDS_LONG", "60")))


def main():
    mode = sys.argv[1]
    faults = {"sleep": sleep_long, "spin": spin, "file": read_file, "die": die, "leave": leave}
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, tensor = dist.get_rank(), torch.ones(1000)
    at, pause = int(os.environ.get("FAULT_AT", "60")), float(os.environ.get("STEP_SECONDS", "0.05"))
    for step in range(at + 10):
        if step == at and first and (rank == 2 or mode == "evaluate"):
            if rank == 2:
                with open(os.environ["FAULT_FILE"], "w") as file:
                    file.write(str(time.time()))
            faults.get(mode, evaluate)()
        dist.all_reduce(tensor)
        time.sleep(pause)
        if rank == 0:
            print(f"step {step} loss 1.0", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
