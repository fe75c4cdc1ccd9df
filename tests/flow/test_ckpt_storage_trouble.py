"""Storage that is full, read-only or out of inodes, on real file systems of their own: loud, training goes on, the last good one intact, the next works.

Quotas, and errors that no mount makes, are in the fault layer of test_ckpt_flush.
"""

import shutil
import subprocess
import time
from contextlib import suppress

import pytest
import torch

from aimaster.wire.messages import Found, SnapshotMoved
from easyckpt import Checkpointer
from easyckpt.errors import NotReady, SaveFailed
from easyckpt.flush import verify_stored
from easyckpt.storage import list_manifests
from tests.flow.agent_master import Master, Run, seal_segment, tell_sealed, until

SIZE = 1 << 20
STATE_BYTES = 300_000


class Disk:
    """A small file system that can be broken and mended."""

    def __init__(self, folder, trouble):
        self.folder, self.trouble = folder, trouble
        self._mount(f"size={SIZE},nr_inodes=40")

    def _mount(self, options):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            pytest.skip(f"no tmpfs may be mounted here: {done.stderr.strip()}")

    def break_it(self):
        if self.trouble == "read-only":
            self._mount("remount,ro")
        elif self.trouble == "full":
            with suppress(OSError), (self.folder / "ballast").open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        else:
            with suppress(OSError):
                for number in range(100):
                    (self.folder / f"ballast{number}").touch()

    def mend(self):
        if self.trouble == "read-only":
            self._mount("remount,rw")
        for ballast in self.folder.glob("ballast*"):
            ballast.unlink()

    def close(self):
        subprocess.run(["umount", "-l", str(self.folder)], check=True)


SAYS = {"full": "no space left", "inodes": "no space left", "read-only": "may not be written"}


@pytest.fixture
def disk(tmp_path, request):
    folder = tmp_path / "disk"
    folder.mkdir()
    made = Disk(folder, request.param)
    yield made
    made.close()


def state(step):
    return {"w": torch.full((STATE_BYTES,), step % 251, dtype=torch.uint8), "step": step}


def intact(folder, role="trainer"):
    """Steps of the checkpoints, each read against its digests."""
    records = list_manifests(folder, role)
    for record in records:
        verify_stored(folder, record)
    return [record.step for record in records]


@pytest.mark.parametrize("disk", ["full", "inodes", "read-only"], indirect=True)
def test_a_storage_in_trouble_is_told_to_the_trainer_and_harms_nothing(disk, tmp_path):
    """Each failed flush is raised by the next call, which still saves; memory goes on; once mended, the newest state goes to storage."""
    memory = f"/dev/shm/easyckpt-trouble-{tmp_path.name}-{disk.trouble}"
    checkpointer = Checkpointer(disk.folder, folder=memory, keep=1, on_event=lambda _event: None)
    try:
        assert checkpointer.save(1, state(1))
        checkpointer.wait(30)
        assert intact(disk.folder) == [1]
        disk.break_it()
        assert checkpointer.save(2, state(2))
        with pytest.raises(SaveFailed, match=SAYS[disk.trouble]):
            checkpointer.wait(30)
        assert intact(disk.folder) == [1]
        with suppress(SaveFailed):  # of a second try
            checkpointer.save(3, state(3), flush=False)
        assert checkpointer.newest.step >= 2
        disk.mend()
        with suppress(SaveFailed):
            checkpointer.save(4, state(4))
        give_up_at = time.monotonic() + 20
        while [record.step for record in list_manifests(disk.folder)] != [4]:
            assert time.monotonic() < give_up_at
            with suppress(SaveFailed, NotReady):
                checkpointer.wait(0.1)
            time.sleep(0.01)  # the old one goes after the commit is told
        assert intact(disk.folder) == [4]
        assert not [path for path in disk.folder.rglob("*") if path.name.startswith(".")]
        back = state(0)
        assert checkpointer.restore(back).step == 4
        assert torch.equal(back["w"], state(4)["w"])
    finally:
        with suppress(SaveFailed):
            checkpointer.close()
        shutil.rmtree(memory, ignore_errors=True)


@pytest.mark.parametrize("disk", ["full", "read-only"], indirect=True)
async def test_an_agents_storage_in_trouble_is_told_to_master_and_trainer(disk, tmp_path):
    """One finding, however often it is tried again; the trainer hears it at its next seal; once mended, the agent flushes what is marked by itself."""
    run = Run(tmp_path / "run")
    run.places.storage.rmdir()
    run.places.storage.symlink_to(disk.folder)
    run.agent()
    try:
        async with Master(run) as master:
            await master.connected("node-0")
            await tell_sealed(run.memory(), seal_segment(run.segments(), 1, size_bytes=STATE_BYTES))
            await master.event(SnapshotMoved)
            disk.break_it()
            assert (
                await tell_sealed(run.memory(), seal_segment(run.segments(), 2, size_bytes=STATE_BYTES))
            ).flush_trouble == ""
            found = await until(
                lambda: next(
                    (one.finding for one in master.events(Found) if one.finding.sign == "agent.flush_failed"), None
                )
            )
            assert found.severity == "critical"
            assert found.category == ("node.disk_full" if disk.trouble == "full" else "node.shared_fs")
            assert SAYS[disk.trouble] in found.details["message"]
            assert intact(disk.folder, "policy") == [1]
            told = await tell_sealed(run.memory(), seal_segment(run.segments(), 3, flush=False, size_bytes=STATE_BYTES))
            assert SAYS[disk.trouble] in told.flush_trouble
            disk.mend()
            await until(lambda: intact(disk.folder, "policy") == [2, 1])
            assert [event.finding.sign for event in master.events(Found)].count("agent.flush_failed") == 1
            told = await tell_sealed(run.memory(), seal_segment(run.segments(), 4, flush=False, size_bytes=STATE_BYTES))
            assert told.flush_trouble == ""
    finally:
        run.close()
