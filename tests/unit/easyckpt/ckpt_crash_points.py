"""A trainer that is killed at each of its own calls, one after the other: `python ckpt_crash_points.py FOLDER STORAGE MODE`.

Each round forks a trainer that restores, proves every element, saves one step, flushes it and lets old ones go. The first rounds live, so that
every slot holds an older step; then one kills itself at its k-th copy, write, sync, rename, link or unlink, with k growing until a round comes
to its end again. After each the parent proves every byte that is there. The last line is one JSON object.
"""

import itertools
import json
import os
import signal
import sys
from pathlib import Path

import torch

from easyckpt import Checkpointer, memory, shm
from easyckpt.flush import Flusher, verify_stored
from easyckpt.storage import list_manifests

LIVES = 3
WATCHED = [
    (memory, "copy"), (memory, "copy_small"),
    (os, "open"), (os, "pwrite"), (os, "fsync"), (os, "rename"), (os, "link"), (os, "unlink"), (os, "rmdir"), (os, "posix_fallocate"),
]  # fmt: skip


def build(step):
    """In step s every element of tensor i is s * 100 + i."""
    parameters = [torch.nn.Parameter(torch.full((size,), float(step * 100 + i))) for i, size in enumerate((40_000, 3))]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for i, parameter in enumerate(parameters):
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, float(step * 100 + 50 + i))
    return {"model": dict(zip("ab", parameters, strict=True)), "optimizer": optimizer, "step": step}


def is_of(state, step):
    found = [*state["model"].values(), *(one["momentum_buffer"] for one in state["optimizer"].state.values())]
    wanted = [step * 100 + base + i for base in (0, 50) for i in (0, 1)]
    return state["step"] == step and all(bool((t == w).all()) for t, w in zip(found, wanted, strict=True))


def kill_at(number):
    count = itertools.count()

    def deadly(call):
        def counted(*args, **options):
            if next(count) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return counted

    for owner, name in WATCHED:
        if hasattr(owner, name):
            setattr(owner, name, deadly(getattr(owner, name)))


def life(folder, storage, mode, number):
    engine = Checkpointer(
        storage, folder=folder, mode=mode, on_sealed=lambda _path, _header: None, on_event=lambda _event: None
    )
    state = build(0)
    restored = engine.restore(state)
    if restored is not None and not is_of(state, restored.step):
        os._exit(2)
    step = restored.step + 1 if restored is not None else 1
    engine._saver.settle(30)
    kill_at(number)
    state = build(step)
    engine.save(step, state, flush=True)
    state["optimizer"].zero_grad()
    engine.wait()
    Flusher(Path(folder), storage, keep=1, events=engine.events).flush_newest()
    os._exit(0)


def proven(folder, storage):
    """(newest step in memory, newest step on storage), every byte of either proven; 0 for none."""
    held = [shm.verify(segment.path).header.step for segment in shm.scan(folder)]
    stored = list_manifests(storage)
    for record in stored:
        verify_stored(storage, record)
    return max(held, default=0), max((record.step for record in stored), default=0)


def main():
    folder, storage, mode = sys.argv[1:]
    warm = build(0)["optimizer"]
    warm.load_state_dict(warm.state_dict())  # what torch imports on first use is imported once, before the forks
    before, wrong = (0, 0), []
    for rounds in itertools.count(-LIVES):
        pid = os.fork()
        if pid == 0:
            life(folder, storage, mode, rounds)
        status = os.waitpid(pid, 0)[1]
        after = proven(Path(folder), storage)
        if status not in (0, signal.SIGKILL) or after[0] < before[0] or after[1] < before[1]:
            wrong.append((rounds, status, before, after))
        before = after
        if (status == 0 and rounds >= 0) or rounds > 500:
            break
    print(json.dumps({"rounds": rounds, "wrong": wrong, "steps": before[0], "flushed": before[1]}))


if __name__ == "__main__":
    main()
