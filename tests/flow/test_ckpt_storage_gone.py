"""Storage that goes away as a whole: a file system that is unmounted under the flush, or that hangs, and comes back."""

import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from aimaster.wire.actions import StopNode
from aimaster.wire.messages import Found, SnapshotMoved
from easyckpt import Checkpointer
from easyckpt.errors import NotReady, SaveFailed
from easyckpt.flush import verify_stored
from easyckpt.storage import list_manifests
from tests.flow.agent_master import Master, Run, seal_segment, tell_sealed, until

ROOT = Path(__file__).resolve().parents[2]


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


class Frozen:
    """A file system of its own that can be made to hang: who writes to it sleeps in the kernel, and no signal ends that."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()
        image = folder.with_suffix(".img")
        with image.open("wb") as file:
            file.truncate(16 << 20)
        for words in (["mkfs.ext4", "-q", "-F", str(image)], ["mount", "-o", "loop", str(image), str(folder)]):
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"no file system can be made here: {done.stderr.strip()}")

    def hang(self):
        subprocess.run(["fsfreeze", "-f", str(self.folder)], check=True)

    def go_on(self):
        subprocess.run(["fsfreeze", "-u", str(self.folder)], capture_output=True, check=False)

    def close(self):
        self.go_on()
        subprocess.run(["umount", "-l", str(self.folder)], check=True)


@pytest.fixture
def frozen(tmp_path):
    if shutil.which("fsfreeze") is None or shutil.which("mkfs.ext4") is None:
        pytest.skip("fsfreeze and mkfs.ext4 are not installed")
    made = Frozen(tmp_path / "disk")
    yield made
    made.close()


def test_a_storage_that_hangs_is_told_and_holds_no_save_up(frozen, tmp_path, monkeypatch):
    """No call fails and none returns: the helper says that its flush does not get on, saves go on in memory, and the flush ends when it can."""
    monkeypatch.setenv("PYTHONPATH", _site(tmp_path, "from easyckpt import progress\nprogress.STALLED_SECONDS = 0.3\n"))
    memory = f"/dev/shm/easyckpt-hangs-{tmp_path.name}"
    told = []
    checkpointer = Checkpointer(frozen.folder / "ckpts", folder=memory, on_event=told.append)
    try:
        checkpointer.save(1, {"w": torch.ones(50_000), "step": 1})
        checkpointer.wait(30)
        frozen.hang()
        for step in range(2, 6):
            assert checkpointer.save(step, {"w": torch.ones(50_000), "step": step})
            checkpointer.ready()
        give_up_at = time.monotonic() + 20
        while not [event for event in told if event.kind == "flush_stalled"]:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        with pytest.raises(NotReady, match="not on storage yet"):
            checkpointer.wait(0.1)
        assert checkpointer.newest.step == 5
        frozen.go_on()
        checkpointer.wait(30)
        assert 5 in steps(frozen.folder / "ckpts")
        assert len([event for event in told if event.kind == "flush_stalled"]) == 1
        assert not [event for event in told if event.kind == "flush_failed"]
    finally:
        frozen.go_on()
        checkpointer.close()
        shutil.rmtree(memory, ignore_errors=True)


async def test_an_agent_tells_that_its_storage_hangs_and_the_end_of_the_node_does_not_wait_for_it(frozen, tmp_path):
    """One finding, the trainers hear the reason, and an order to stop is answered; when the storage goes on, the step is there."""
    run = Run(tmp_path / "run")
    run.places.storage.rmdir()
    run.places.storage.symlink_to(frozen.folder)
    agent = run.agent(
        AIMASTER_AGENT__FLUSH_STALLED_SECONDS="0.3",
        PYTHONPATH=_site(tmp_path, "from agents import keeper\nkeeper.END_STALLED_SECONDS = 1.0\n"),
    )
    try:
        async with Master(run) as master:
            await master.connected("node-0")
            await tell_sealed(run.memory(), seal_segment(run.segments(), 1))
            await master.event(SnapshotMoved)
            frozen.hang()
            await tell_sealed(run.memory(), seal_segment(run.segments(), 2))
            found = await until(lambda: [event.finding for event in master.events(Found)])
            assert (found[0].sign, found[0].category) == ("agent.flush_stalled", "node.shared_fs")
            told = await tell_sealed(run.memory(), seal_segment(run.segments(), 3))
            assert "hangs" in told.flush_trouble
            done = await master.order("node-0", StopNode(remove_memory=False))
            assert done.ok
            frozen.go_on()
            await until(lambda: agent.poll() is not None)
            assert max(steps(frozen.folder, "policy")) >= 2
            assert [event.finding.sign for event in master.events(Found)].count("agent.flush_stalled") == 1
    finally:
        frozen.go_on()
        run.close()


def _site(folder, code):
    site = folder / "agent-site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(code)
    return f"{site}{os.pathsep}{ROOT}"
