"""A trainer to be killed, and the one who kills it: `python ckpt_trainer.py FOLDER STORAGE KILLS SEED VICTIM`.

Each round forks a trainer that restores, proves every element, and saves step after step as fast as it can; after a random moment it, its
flushing helper, or both get SIGKILL. The last round only restores. The last line is one JSON object.

In step s every element of tensor i is s * 100 + i, so a mixture of two steps, or half of one, cannot go unseen.
"""

import contextlib
import json
import os
import random
import select
import signal
import struct
import sys
import time

import torch

from easyckpt import Checkpointer
from easyckpt.errors import SaveFailed

REPORT = struct.Struct("<qq")
RESTORED, HELD = -1, -2
ROUND_SECONDS = 0.12


class Stamp(torch.optim.Optimizer):
    """An optimizer whose step writes the step's number everywhere."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, number):
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(parameter))
            parameter.fill_(number * 100 + index)
            moment.fill_(number * 100 + 50 + index)


def build():
    sizes = [(400, 300), (70_000,), (3, 5), (1,), (250_000,)]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    return parameters, Stamp(parameters)


def state_of(parameters, optimizer, step):
    return {
        "model": {str(i): p for i, p in enumerate(parameters)},
        "optimizer": optimizer,
        "step": step,
        "text": f"at {step}",
    }


def wrong(parameters, optimizer, state, step):
    """What in the state is not of `step`."""
    for index, parameter in enumerate(parameters):
        for base, tensor in ((0, parameter), (50, optimizer.state[parameter]["moment"])):
            if not bool((tensor == step * 100 + base + index).all()):
                return f"tensor {index}+{base} holds {tensor.detach().unique()[:4].tolist()} in step {step}"
    return (
        ""
        if (state["step"], state["text"]) == (step, f"at {step}")
        else f"{state['step']} {state['text']} in step {step}"
    )


def train(folder, storage, pipe, *, only_restore):
    def hear(event):
        """What memory holds from now on, said before anything that takes it away and after everything that adds to it."""
        if event.kind in ("save_sealed", "save_exposed"):
            os.write(pipe, REPORT.pack(HELD, event.step))

    checkpointer = Checkpointer(storage, folder=folder, flush_every=3, keep=2, on_event=hear)
    parameters, optimizer = build()
    state = state_of(parameters, optimizer, 0)
    restored = checkpointer.restore(state)
    step = restored.step if restored else 0
    if restored:
        complaint = wrong(parameters, optimizer, state, step)
        if complaint:
            os.write(2, complaint.encode())
            os._exit(1)
    os.write(pipe, REPORT.pack(RESTORED, step))
    if only_restore:
        os._exit(0)
    while True:
        step += 1
        optimizer.step(step)
        with contextlib.suppress(SaveFailed):  # its helper may be the victim
            checkpointer.save(step, state_of(parameters, optimizer, step))


def read_reports(pipe, until=None, seconds=30.0):
    """Reports until one of kind `until` (or the end); the last value of each kind."""
    last = {}
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        if not select.select([pipe], [], [], 0.2)[0]:
            continue
        block = os.read(pipe, REPORT.size)
        if not block:
            return last
        kind, value = REPORT.unpack(block)
        last[kind] = value
        if kind == until:
            return last
    raise SystemExit(f"no report {until} within {seconds} s")


def helpers_of(pid):
    return [int(child) for child in open(f"/proc/{pid}/task/{pid}/children").read().split()]


def kill(victim, pid, chance):
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        targets = helpers_of(pid) if victim in ("helper", "both") else []
        if victim in ("trainer", "both"):
            targets.insert(chance.randint(0, len(targets)), pid)
        for target in targets:
            with contextlib.suppress(ProcessLookupError):
                os.kill(target, signal.SIGKILL)
    if victim == "helper":
        time.sleep(chance.uniform(0, ROUND_SECONDS))
        os.kill(pid, signal.SIGKILL)


def main():
    folder, storage, kills, seed, victims = (
        sys.argv[1],
        sys.argv[2],
        int(sys.argv[3]),
        int(sys.argv[4]),
        sys.argv[5].split(","),
    )
    chance = random.Random(seed)
    warm = build()[1]
    warm.step(1)
    warm.load_state_dict(warm.state_dict())  # what torch imports on first use is imported once, before the forks
    held, restores, lost = 0, [], []
    for round_number in range(kills + 1):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            train(folder, storage, write_end, only_restore=round_number == kills)
        os.close(write_end)
        reports = read_reports(read_end, RESTORED)
        step = reports.get(RESTORED)
        if step is None:
            raise SystemExit(f"round {round_number}: the trainer could not restore")
        restores.append(step)
        if step < held:
            lost.append((round_number, held, step))
        if round_number < kills:
            time.sleep(chance.uniform(0, ROUND_SECONDS))
            kill(chance.choice(victims), pid, chance)
        os.waitpid(pid, 0)
        held = read_reports(read_end).get(HELD, step)
        os.close(read_end)
    print(json.dumps({"kills": kills, "steps": restores[-1], "distinct": len(set(restores)), "lost": lost}))


if __name__ == "__main__":
    main()
