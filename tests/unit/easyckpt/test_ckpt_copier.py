"""Copies that the engine makes by itself, where there is no agent."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from easyckpt import Checkpointer, shm
from easyckpt.flush import verify_stored
from easyckpt.shardserver import Peer, ShardServer
from easyckpt.storage import list_manifests
from easyckpt.takeover import take_over

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def nodes(folder):
    """The memory of two other nodes, each served."""
    paths = [folder.with_name(f"{folder.name}-{number}") for number in range(2)]
    for path in paths:
        path.mkdir(mode=0o700)
    servers = [ShardServer(path) for path in paths]
    yield paths, [Peer(server.address, timeout_seconds=5.0) for server in servers], servers
    for server in servers:
        server.close()
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def held(path):
    return [(one.tier, one.header.step) for one in shm.scan(path)]


def save(engine, step):
    assert engine.save(step, {"w": torch.full((4000,), float(step))})
    engine.wait()
    assert engine._copier.settle(20)


def test_the_newest_step_lies_with_as_many_peers_as_were_asked_for(folder, nodes, tmp_path):
    """One copy: the first peer alone. A peer that is gone is passed over and told; a clean end that flushed takes its copies back."""
    paths, peers, servers = nodes
    events = []
    engine = Checkpointer(tmp_path, folder=folder, peers=peers, copies=1, on_event=events.append)
    save(engine, 1)
    save(engine, 2)
    assert held(paths[0]) == [("peer", 2), ("peer", 1)]
    assert held(paths[1]) == []
    servers[0].close()
    save(engine, 3)
    assert held(paths[1]) == [("peer", 3)]
    assert [event.step for event in events if event.kind == "copy_failed"] == [3]
    assert [event.step for event in events if event.kind == "copy_sent"] == [1, 2, 3]
    engine.close()
    assert held(paths[1]) == []
    assert not folder.exists()


def test_two_copies_lie_with_two_peers_and_too_few_peers_are_refused(folder, nodes):
    paths, peers, _ = nodes
    engine = Checkpointer(folder=folder, peers=peers, copies=2, on_event=lambda _event: None)
    save(engine, 1)
    assert held(paths[0]) == held(paths[1]) == [("peer", 1)]
    engine.close()
    assert held(paths[0]) == [("peer", 1)], "nothing was flushed: the copies are all there is"
    with pytest.raises(ValueError, match="as many peers"):
        Checkpointer(folder=folder, member="other", peers=peers, copies=3)


TRAINER = """
import sys, time
import torch
from easyckpt import Checkpointer
from easyckpt.shardserver import Peer
peer = Peer(("127.0.0.1", int(sys.argv[3])))
ckpt = Checkpointer(sys.argv[1], folder=sys.argv[2], peers=[peer], copies=1, flush_every=None)
for step in (1, 2, 3):
    ckpt.save(step, {"w": torch.full((4000,), float(step))})
    ckpt.wait()
    ckpt._copier.settle(20)
print(ckpt._flusher.sidecar.pid or 0, flush=True)
time.sleep(600)
"""


def test_a_peer_brings_the_state_of_a_node_that_died_to_storage_and_training_goes_on_elsewhere(folder, nodes, tmp_path):
    """Trainer, helper and memory of a node are gone at once, nothing was flushed: the holder of the copy flushes it, and another node restores it."""
    paths, peers, _ = nodes
    words = [sys.executable, "-c", TRAINER, str(tmp_path), str(folder), str(peers[0].address[1])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    helper = int(trainer.stdout.readline())
    for pid in filter(None, (helper, trainer.pid)):
        os.kill(pid, signal.SIGKILL)
    trainer.communicate(timeout=20)
    shutil.rmtree(folder)
    assert list_manifests(tmp_path) == []
    (record,) = take_over(paths[0], tmp_path, ["trainer-0"])
    assert record.step == 3
    verify_stored(tmp_path, record)
    elsewhere = Checkpointer(tmp_path, folder=paths[1], member="trainer-1", on_event=lambda _event: None)
    state = {"w": torch.zeros(4000)}
    assert elsewhere.restore(state).tier == "storage"
    assert bool((state["w"] == 3.0).all())
    elsewhere.close()
