"""The peers, each driven as its own documentation says, the fastest way that works with tensors on the CPU. One that is missing is a row.

Where an engine stages in a thread of its own, `save` waits for that staging: only then may the optimizer run.
"""

import os
import time
from pathlib import Path

import torch

from tests.bench.ckpt.engines import SHM, Engine, TorchSave
from tests.bench.ckpt.state import copy_into


class DcpSave(Engine):
    name = "dcp.save"
    cold = True

    def reopen(self):
        import torch.distributed.checkpoint  # noqa: F401 - its import is not its restore

    def open(self, _state):
        self.reopen()

    def save(self, state, step):
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=self.path(step), no_dist=True)

    def restore(self, state):
        import torch.distributed.checkpoint as dcp

        step = self.newest()
        dcp.load(state, checkpoint_id=self.path(step), no_dist=True)
        return step


class DcpAsync(DcpSave):
    name = "dcp.async_save, default"
    cold = False
    staging: tuple[bool, ...] | None = None
    kind = "THREAD"

    def open(self, _state):
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.stager = DefaultStager(StagingOptions(*self.staging)) if self.staging else None

    def save(self, state, step):
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        started = dcp.async_save(
            state, checkpoint_id=self.path(step), async_stager=self.stager, no_dist=not self.group,
            async_checkpointer_type=getattr(AsyncCheckpointerType, self.kind),
        )  # fmt: skip
        if hasattr(started, "staging_completion"):
            started.staging_completion.result()
            started = started.upload_completion
        self.result = started

    def done(self):
        return self.result.done()

    def wait(self):
        self.result.result()


class DcpReused(DcpAsync):
    name = "dcp.async_save, reused stager"
    staging = (False, False, False, False)


class DcpProcess(DcpAsync):
    name = "dcp.async_save in a process, reused shared stager"
    staging = (False, True, False, False)
    kind = "PROCESS"
    group = True


class TorchCheckpointing(Engine):
    name = "torch_checkpointing, async"
    needs = "torch_checkpointing"

    def manage(self):
        import torch_checkpointing as tc
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        staging = tc.CheckpointStagerConfig(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
        )
        self.manager = tc.CheckpointManager(
            tc.CheckpointManager.Config(
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),  # its direct writes fail on ext4
                save=AsyncCheckpointSaverConfig(staging_config=staging),
            )
        )

    def open(self, state):
        self.manage()
        self.manager.prewarm_staging(dict(state))

    def reopen(self):
        self.manage()

    def save(self, state, step):
        self.result = self.manager.save(self.path(step), dict(state))
        with self.manager.lock():  # what its users hold around optimizer.step()
            pass

    def done(self):
        return self.result.done()

    def wait(self):
        self.result.result()

    def restore(self, state):
        step = self.newest()
        copy_into(state, self.manager.load(self.path(step), dict(state)))
        return step


class DLRover(Engine):
    """As under `dlrover-run`: the saver lives in the agent's process."""

    name = "dlrover flash checkpoint"
    needs = "dlrover"
    to = "DISK"
    environment = {
        "ROLE_NAME": "dlrover-trainer", "TORCHELASTIC_RUN_ID": "easyckpt-bench", "LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0", "GROUP_RANK": "0",
    }  # fmt: skip
    side = [
        "-c",
        (
            "import time\nfrom dlrover.python.elastic_agent.torch.ckpt_saver import AsyncCheckpointSaver\n"
            "AsyncCheckpointSaver.start_async_saving_ckpt()\ntime.sleep(36000)"
        ),
    ]

    def open(self, _state):
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self.engine = DdpCheckpointer(self.folder)

    def reopen(self):
        self.open({})

    def save(self, state, step):
        from dlrover.trainer.torch.flash_checkpoint.ddp import StorageType

        self.step = step
        kind = getattr(StorageType, self.to)
        self.engine.save_checkpoint(step, state, f"{self.folder}/{step}/rank_0.pt", storage_type=kind)

    def done(self):
        try:
            return int(Path(self.folder, "dlrover_latest.txt").read_text()) >= self.step
        except (OSError, ValueError):
            return False

    def wait(self):
        while not self.done():
            time.sleep(0.01)

    def restore(self, state):
        found = self.engine.load_checkpoint()
        copy_into(state, found)
        return int(found["step"])


class DLRoverMemory(DLRover):
    name = "dlrover flash checkpoint, memory only"
    to = "MEMORY"
    durable = False

    def done(self):
        return True


class NvrxFork(TorchSave):
    """On CPU tensors it takes no snapshot at all; a clone stands for its copy from the device."""

    name = "nvidia-resiliency-ext, async torch.save by fork"
    needs = "nvidia_resiliency_ext"
    group = True
    cold = False

    def open(self, _state):
        _without_cuda()
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        self.engine = TorchAsyncCheckpoint(persistent_queue=False)

    def save(self, state, step):
        from nvidia_resiliency_ext.checkpointing.utils import dict_list_map_outplace

        cloned = dict_list_map_outplace(lambda one: one.clone() if isinstance(one, torch.Tensor) else one, state)
        self.engine.async_save(cloned, self.path(step) + ".pt")

    def done(self):
        self.engine.finalize_async_save(blocking=False)
        return self.engine._get_async_calls_queue().get_num_unfinalized_calls() == 0

    def wait(self):
        self.engine.finalize_async_save(blocking=True)


class NvrxLocal(Engine):
    """Its local manager writes files wherever it is told to: here into memory, as it is meant to be used."""

    name = "nvidia-resiliency-ext, local, in memory"
    needs = "nvidia_resiliency_ext"
    group = True
    durable = False
    unmapped = "easyckpt-bench-nvrx/**/*"

    def open(self, _state):
        _without_cuda()
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        os.makedirs(f"{SHM}-nvrx", exist_ok=True)
        self.wrap = _host_state_dict()
        self.manager = LocalCheckpointManager(f"{SHM}-nvrx")

    def reopen(self):
        self.open({})

    def save(self, state, step):
        self.manager.save(self.wrap(state), step, is_async=False)

    def restore(self, state):
        self.manager.find_latest()
        found, _ = self.manager.load()
        copy_into(state, found.state_dict)
        return int(found.state_dict["step"])


class TorchSnapshot(Engine):
    name = "torchsnapshot, async_take"
    needs = "torchsnapshot"
    group = True

    def save(self, state, step):
        import torchsnapshot

        self.result = torchsnapshot.Snapshot.async_take(self.path(step), {"app": torchsnapshot.StateDict(**state)})

    def done(self):
        return self.result.done()

    def wait(self):
        self.result.wait()

    def restore(self, state):
        import torchsnapshot

        step, held = self.newest(), torchsnapshot.StateDict(**state)
        torchsnapshot.Snapshot(self.path(step)).restore({"app": held})
        state["step"] = held["step"]
        return step


def _without_cuda():
    torch.cuda.synchronize = lambda *_args, **_options: None
    torch.cuda.current_device = lambda: "cpu"


def _host_state_dict():
    """Its record of a state, without the way to the device and back."""
    import nvidia_resiliency_ext.checkpointing.local.basic_state_dict as home

    class HostStateDict(home.BasicTensorAwareStateDict):
        def __init__(self, state):
            self.state_dict = state
            self._is_hollow = False

        def restore_tensor_device(self, non_blocking=True):
            pass

    HostStateDict.__module__, HostStateDict.__qualname__ = home.__name__, "HostStateDict"
    home.HostStateDict = HostStateDict  # its loader looks the class up by name
    return HostStateDict
