"""Trainers to be killed: `python ckpt_crash_trainer.py BOARD`, then a JSON line each on standard input; answers with the pid of a forked trainer.

A trainer restores, proves every element, says what it restored, and saves step after step. It says everything by appending (kind, value) to a file,
which stays when it is killed. In step s every element of tensor i is s * 100 + i: half of a step, or a mixture of two, cannot go unseen.
"""

import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

import torch

from aimaster.wire import codec
from aimaster.wire.checkpoint import SealedNotice, Version
from easyckpt import Checkpointer
from easyckpt.errors import EasyckptError
from easyckpt.shardserver import Peer
from tests.flow.ckpt_phases import Board, watch_trainer

REPORT = struct.Struct("<qq")
RESTORED, BEGUN, ACCEPTED, HELD, WRONG = range(5)
SIZES = [(300, 300), (70_000,), (3, 5), (1,), (150_000,)]
PAUSE_SECONDS = 0.01


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
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    return parameters, Stamp(parameters)


def state_of(parameters, optimizer, step):
    model = {str(index): parameter for index, parameter in enumerate(parameters)}
    return {"model": model, "optimizer": optimizer, "step": step, "text": f"at {step}"}


def is_of(step, parameters, optimizer, state):
    """Whether every element is that of this very step."""
    tensors = [(base + index, one) for index, p in enumerate(parameters)
               for base, one in ((0, p), (50, optimizer.state[p]["moment"]))]  # fmt: skip
    whole = all(bool((tensor == step * 100 + mark).all()) for mark, tensor in tensors)
    return whole and (state["step"], state["text"]) == (step, f"at {step}")


def tell_agent(path, header, agent):
    """As a member does over its node's socket; an agent that is away finds the segment by itself."""
    notice = SealedNotice(
        member=header.member, rank=header.rank, name=path.name, version=Version(*header.version), flush=header.flush
    )
    body = codec.encode(notice)
    try:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(1.0)
            line.connect(agent)
            line.sendall(
                b"POST /v1/snapshots/sealed HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            line.recv(1)
    except OSError:
        pass


def train(task):
    reports = os.open(task["reports"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(kind, value):
        os.write(reports, REPORT.pack(kind, value))

    def hear(event):
        """What memory holds from now on, said before anything that takes it away and after everything that adds to it."""
        if event.kind in ("save_sealed", "save_exposed"):
            say(HELD, event.step)

    checkpointer = Checkpointer(
        task["storage"], folder=task["folder"], member="policy-0", role="policy", flush_every=3, on_event=hear, slots=task["slots"],
        on_sealed=lambda path, header: tell_agent(path, header, task["agent"]),
        peers=[Peer(tuple(task["peer"]), token=task["token"], timeout_seconds=5.0)],
    )  # fmt: skip
    parameters, optimizer = build()
    state = state_of(parameters, optimizer, 0)
    restored = checkpointer.restore(state)
    step = restored.step if restored else 0
    if restored and not is_of(step, parameters, optimizer, state):
        say(WRONG, step)
        os._exit(1)
    say(RESTORED, step)
    if task["only_restore"]:
        os._exit(0)
    while True:
        step += 1
        optimizer.step(step)
        say(BEGUN, step)
        if checkpointer.save(step, state_of(parameters, optimizer, step)):
            say(ACCEPTED, step)
        time.sleep(PAUSE_SECONDS)


def main():
    watch_trainer(Board(Path(sys.argv[1])))
    torch.set_num_threads(1)
    warm = build()[1]
    warm.step(1)
    warm.load_state_dict(warm.state_dict())  # what torch imports on first use is imported once, before the forks
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                train(json.loads(line))
            except (EasyckptError, OSError) as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(3)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


if __name__ == "__main__":
    main()
