"""A member whose ranks lie on several nodes: each node writes its own files, the last one commits, and nothing is ever a mixture of two attempts."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from easyckpt import shm
from easyckpt.claims import Claims
from easyckpt.errors import AlreadyFlushed
from easyckpt.events import Events
from easyckpt.flush import verify_stored
from easyckpt.parts import PartFlusher, forget, newest_part
from easyckpt.sidecar import ranks_here
from easyckpt.storage import FolderStorage, list_manifests

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def nodes(folder):
    """The memories of two nodes."""
    paths = [folder.with_name(f"{folder.name}-n{number}") for number in range(2)]
    for path in paths:
        path.mkdir(mode=0o700)
    yield paths
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def seal(nodes, make_segment):
    """A rank's segment in its own node's memory."""

    def make(rank, step, **fields):
        path = make_segment(step, rank=rank, ranks=2, slot=step % 2, **fields)
        shutil.move(path, nodes[rank] / path.name)

    return make


def flushers(nodes, storage):
    quiet = Events(lambda _event: None)
    return [PartFlusher(path, storage, here=1, events=quiet) for path in nodes]


def test_the_last_node_commits_and_the_others_find_it(nodes, seal, tmp_path):
    first, second = flushers(nodes, tmp_path)
    seal(0, 1)
    assert first.flush_newest() is None
    assert first.is_waiting
    assert list_manifests(tmp_path) == []
    seal(1, 1)
    record = second.flush_newest()
    assert [(shard.rank, shard.file) for shard in record.shards] == [
        (0, "trainer-0.r0.safetensors"),
        (1, "trainer-0.r1.safetensors"),
    ]
    verify_stored(tmp_path, record)
    assert first.flush_newest() is None
    assert not first.is_waiting
    assert first.newest == (0, 1)
    assert sorted(path.name for path in (tmp_path / "trainer" / "l000-s000000001-e000").iterdir()) == [
        "manifest.json", "trainer-0.r0.safetensors", "trainer-0.r1.safetensors",
    ]  # fmt: skip


def test_a_step_that_one_node_never_had_is_overtaken(nodes, seal, tmp_path):
    """The second node skipped step 1: it is let go once step 2 is whole."""
    first, second = flushers(nodes, tmp_path)
    seal(0, 1)
    first.flush_newest()
    seal(0, 2)
    first.flush_newest()
    seal(1, 2)
    assert second.flush_newest().step == 2
    first.flush_newest()
    assert not first.is_waiting
    assert [record.step for record in list_manifests(tmp_path)] == [2]


def test_files_of_an_attempt_that_died_never_meet_those_of_the_next(nodes, seal, tmp_path):
    """The first attempt left one rank's file of step 5; the next one comes to step 5 with other bytes: what opens first forgets, and all write anew."""
    first, second = flushers(nodes, tmp_path)
    seal(0, 5, seed=1)
    assert first.flush_newest() is None
    storage = FolderStorage(tmp_path)
    for rank in range(2):
        forget(storage, "trainer", "trainer-0", [rank])
    first, second = flushers(nodes, tmp_path)
    seal(1, 5, seed=2)
    assert second.flush_newest() is None, "the file that lies there is of the other attempt"
    seal(0, 5, seed=2)
    record = first.flush_newest()
    verify_stored(tmp_path, record)
    digests = {shard.state_digest for shard in record.shards}
    assert digests == {segment.header.state_digest for path in nodes for segment in shm.scan(path)}


def test_a_part_of_one_node_does_not_hold_up_another(nodes, seal, tmp_path):
    """Each has a claim of its own; two of one node exclude each other."""
    storage = FolderStorage(tmp_path)
    folder = "trainer/l000-s000000001-e000"
    with Claims().held(storage, folder, part="r0") as one, Claims().held(storage, folder, part="r1") as other:
        assert (one.suffix, other.suffix) == ("", "")
        storage.commit(folder, b"x")
    with pytest.raises(AlreadyFlushed), Claims().held(storage, folder, part="r0"):
        pass


def test_only_all_ranks_of_the_node_make_a_part(nodes, make_segment):
    for rank, step in ((0, 1), (1, 1), (0, 2)):
        path = make_segment(step, rank=rank, ranks=4, slot=step % 2)
        shutil.move(path, nodes[0] / path.name)
    chosen = newest_part(shm.scan(nodes[0]), "trainer", [], here=2, marked_only=True)
    assert [(one.header.step, one.header.rank) for one in chosen] == [(1, 0), (1, 1)]


@pytest.mark.parametrize(
    ("variables", "rank", "ranks", "answer"),
    [
        ({}, 0, 4, (True, None)),
        ({}, 1, 4, (False, None)),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, 1, 4, (False, None)),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, 2, 4, (True, 2)),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, 3, 4, (False, 2)),
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, 0, 1, (True, None)),  # a replica of one rank
    ],
)
def test_who_flushes_for_a_node_is_read_from_torchruns_variables(monkeypatch, variables, rank, ranks, answer):
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert ranks_here(rank, ranks) == answer


RANK = """
import sys
import torch
from easyckpt import Checkpointer
from easyckpt.agreement import Alone
rank, storage, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
ckpt = Checkpointer(storage, folder=folder, rank=rank, ranks=2, ranks_agree=Alone())
print("ready", flush=True)
for line in sys.stdin:
    step = int(line)
    ckpt.save(step, {"w": torch.full((50_000,), float(step * 10 + rank))})
    ckpt.wait(60)
    print(step, flush=True)
ckpt.close()
print("closed", flush=True)
"""


def start(rank, storage, folder):
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", RANK, str(rank), str(storage), str(folder)],
        env={**os.environ, **variables, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_two_nodes_with_a_rank_each_make_whole_checkpoints(nodes, tmp_path):
    """Each with its own helper; `wait` returns when the step is whole on storage; a clean end leaves no memory."""
    ranks = [start(rank, tmp_path, nodes[rank]) for rank in range(2)]
    for one in ranks:
        assert one.stdout.readline() == "ready\n"
    for step in (1, 2):
        for one in ranks:
            one.stdin.write(f"{step}\n")
            one.stdin.flush()
        assert [one.stdout.readline() for one in ranks] == [f"{step}\n"] * 2
        assert list_manifests(tmp_path)[0].step == step
    assert [one.communicate(timeout=60)[0] for one in ranks] == ["closed\n"] * 2
    assert [path for node in nodes if node.exists() for path in node.iterdir()] == []
    for record in list_manifests(tmp_path):
        verify_stored(tmp_path, record)
        assert len(record.shards) == 2


@pytest.mark.long
def test_one_node_alone_makes_no_checkpoint(nodes, tmp_path):
    """Its file is durable, then it is killed with its helper: nothing is committed."""
    alone = start(0, tmp_path, nodes[0])
    assert alone.stdout.readline() == "ready\n"
    alone.stdin.write("3\n")
    alone.stdin.flush()
    give_up_at = time.monotonic() + 30
    while not list(tmp_path.rglob(".done.trainer-0.r0")):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    children = Path(f"/proc/{alone.pid}/task/{alone.pid}/children").read_text().split()
    for pid in (alone.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    alone.communicate(timeout=20)
    assert list_manifests(tmp_path) == []
