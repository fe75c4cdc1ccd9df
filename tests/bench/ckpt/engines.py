"""The machine's floor, ours, and what torch and safetensors do alone, all behind the same calls.

open(state)      before training
save(state, n)   returns when the trainer may change the state: that time is the stall
done() / wait()  whether / until the checkpoint is where the engine promises it
restore(state)   fills the state in place from the newest checkpoint, in a new process; returns the step
"""

import glob
import importlib.util
import mmap
import os
import shutil

import torch

from tests.bench.ckpt.state import copy_into, tensors

SHM = "/dev/shm/easyckpt-bench"


class Engine:
    name = ""
    needs = ""
    """Module it comes from; "" is torch."""
    durable = True
    cold = False
    """Whether its restore is timed without the page cache as well."""
    group = False
    """Whether it wants a process group, of one."""
    environment: dict[str, str] = {}
    side: list[str] = []
    """Arguments of a Python process that outlives the trainer."""
    unmapped = ""
    """Its files below /dev/shm that nobody maps."""

    def __init__(self, folder):
        self.folder = folder

    @classmethod
    def installed(cls):
        return not cls.needs or importlib.util.find_spec(cls.needs) is not None

    def open(self, state):
        pass

    def reopen(self):
        """In the new process, before the time of the restore counts."""

    def done(self):
        return True

    def wait(self):
        pass

    def path(self, step):
        return f"{self.folder}/step-{step}"

    def newest(self):
        return max(int(path.rsplit("-", 1)[1].split(".")[0]) for path in glob.glob(f"{self.folder}/step-*"))

    def trim(self, step):
        """Keeps two."""
        for path in glob.glob(f"{self.folder}/step-*"):
            if int(path.rsplit("-", 1)[1].split(".")[0]) < step - 1:
                shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


class Floor(Engine):
    """No engine: one copy_ per tensor into touched shared memory. A design that copies and returns cannot be below it."""

    name = "FLOOR copy_ into touched shared memory"
    durable = False

    def views(self, state, create):
        places, total = [], 0
        for _, tensor in tensors(state):
            places.append(total)
            total += -(-tensor.nbytes // 64) * 64
        fd = os.open(f"{SHM}-floor", os.O_RDWR | (os.O_CREAT if create else 0))
        if create:
            os.posix_fallocate(fd, 0, total + 64)
        memory = mmap.mmap(fd, total + 64)
        os.close(fd)
        self.step = torch.frombuffer(memory, dtype=torch.int64, offset=total, count=1)
        self.held = [
            torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(tensor.shape)
            for (_, tensor), at in zip(tensors(state), places, strict=True)
        ]

    def open(self, state):
        self.views(state, create=True)
        for view in self.held:
            view.zero_()

    def save(self, state, step):
        for (_, tensor), view in zip(tensors(state), self.held, strict=True):
            view.copy_(tensor)
        self.step[0] = step

    def restore(self, state):
        self.views(state, create=False)
        for (_, tensor), view in zip(tensors(state), self.held, strict=True):
            tensor.copy_(view)
        state["step"] = int(self.step[0])
        return state["step"]


class Ours(Engine):
    name = "easyckpt, copy mode, to storage"
    storage = True

    def open(self, state):
        self.make(mode="copy")
        self.engine.prepare(state)
        if self.engine._flusher is not None:
            self.engine._flusher.sidecar.start()

    def make(self, **options):
        from easyckpt import Checkpointer

        where = self.folder if self.storage else None
        self.engine = Checkpointer(where, folder=f"{SHM}-ours", keep=2, on_event=lambda _event: None, **options)

    def reopen(self):
        self.make()

    def save(self, state, step):
        self.engine.save(step, state)
        self.step = step

    def done(self):
        return self.engine.events.counts["flush_committed" if self.storage else "save_sealed"] >= self.step

    def wait(self):
        self.engine.wait()

    def trim(self, step):
        """Its own retention does."""

    def restore(self, state):
        return self.engine.restore(state).step


class OursMemory(Ours):
    name = "easyckpt, copy mode, memory only"
    storage = False
    durable = False


class TorchSave(Engine):
    name = "torch.save"
    cold = True

    def save(self, state, step):
        torch.save(state, self.path(step) + ".pt")

    def restore(self, state):
        step = self.newest()
        copy_into(state, torch.load(self.path(step) + ".pt", weights_only=True))
        return step


class TorchSaveMmap(TorchSave):
    name = "torch.save, restored with mmap=True"

    def restore(self, state):
        step = self.newest()
        copy_into(state, torch.load(self.path(step) + ".pt", weights_only=True, mmap=True))
        return step


class Safetensors(Engine):
    name = "safetensors save_file"
    needs = "safetensors"
    cold = True

    def save(self, state, step):
        from safetensors.torch import save_file

        save_file(dict(tensors(state)), self.path(step) + ".st")

    def restore(self, state):
        from safetensors import safe_open

        step, targets = self.newest(), dict(tensors(state))
        with safe_open(self.path(step) + ".st", "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                targets[name].copy_(file.get_tensor(name))
        state["step"] = step
        return step
