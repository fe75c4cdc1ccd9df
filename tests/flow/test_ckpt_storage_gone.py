"""Storage that goes away as a whole: a file system that is unmounted under the flush, and comes back."""

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


class Share:
    """A file system that is mounted at `folder`, and keeps what it holds while it is not."""

    def __init__(self, folder, server):
        self.folder, self._server = folder, server
        for path in (folder, server):
            path.mkdir()
        self._mount("-t", "tmpfs", "-o", "size=8m", "tmpfs", str(server))
        self.come_back()

    def _mount(self, *words):
        done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"nothing may be mounted here: {done.stderr.strip()}")

    def go_away(self):
        subprocess.run(["umount", "-l", str(self.folder)], check=True)

    def come_back(self):
        self._mount("--bind", str(self._server), str(self.folder))

    def close(self):
        for path in (self.folder, self._server):
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)


@pytest.fixture
def share(tmp_path):
    made = Share(tmp_path / "share", tmp_path / "server")
    yield made
    made.close()


def steps(storage, role="trainer"):
    records = list_manifests(storage, role)
    for record in records:
        verify_stored(storage, record)
    return [record.step for record in records]


def test_nothing_is_written_below_a_mount_that_has_gone_and_it_goes_on_when_it_is_back(share, tmp_path):
    """The bare folder under the mount takes writes as well: they would fill another disk, and be hidden once the mount is back."""
    memory = f"/dev/shm/easyckpt-gone-{tmp_path.name}"
    storage = share.folder / "run" / "ckpts"
    checkpointer = Checkpointer(storage, folder=memory, on_event=lambda _event: None)
    try:
        checkpointer.save(1, {"w": torch.ones(50_000), "step": 1})
        checkpointer.wait(30)
        share.go_away()
        checkpointer.save(2, {"w": torch.ones(50_000), "step": 2})
        with pytest.raises(SaveFailed, match="not mounted any more"):
            checkpointer.wait(30)
        assert list(share.folder.iterdir()) == []
        share.come_back()
        with suppress(SaveFailed):  # of a second try
            checkpointer.save(3, {"w": torch.ones(50_000), "step": 3})
        give_up_at = time.monotonic() + 20
        while 3 not in steps(storage):
            assert time.monotonic() < give_up_at
            with suppress(SaveFailed, NotReady):
                checkpointer.wait(0.1)
    finally:
        with suppress(SaveFailed):
            checkpointer.close()
        shutil.rmtree(memory, ignore_errors=True)


async def test_an_agent_tells_that_its_storage_is_not_mounted_and_flushes_when_it_is_back(share, tmp_path):
    run = Run(tmp_path / "run")
    run.places.storage.rmdir()
    run.places.storage.symlink_to(share.folder)
    run.agent()
    try:
        async with Master(run) as master:
            await master.connected("node-0")
            await tell_sealed(run.memory(), seal_segment(run.segments(), 1))
            await master.event(SnapshotMoved)
            share.go_away()
            await tell_sealed(run.memory(), seal_segment(run.segments(), 2))
            found = await until(lambda: [event.finding for event in master.events(Found)])
            assert found[0].sign == "agent.flush_failed"
            assert "not mounted any more" in found[0].details["message"]
            assert list(share.folder.iterdir()) == []
            share.come_back()
            await until(lambda: steps(run.places.storage, "policy") == [2, 1])
            assert len(master.events(Found)) == 1
    finally:
        run.close()
