"""Two real gloo ranks with a node's folder each, killed and started anew: they begin the same lineage, whatever each still has in memory."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60
RANK = """
import json, os, sys
import torch
import torch.distributed as dist
from easyckpt import Checkpointer
from easyckpt.agreement import Together

folder, storage, value = sys.argv[1], sys.argv[2] or None, float(sys.argv[3])
os.sched_setaffinity(0, {int(core) for core in sys.argv[4].split(",")})
dist.init_process_group("gloo")
rank = dist.get_rank()
ckpt = Checkpointer(storage, folder=folder, rank=rank, ranks=2, flush_every=None, on_event=lambda event: None)
for line in sys.stdin:
    verb, step = line.split()
    state = {"w": torch.full((30_000,), value + int(step) + 100 * rank)}
    if verb == "save":
        ckpt.save(int(step), state)
        ckpt._saver.settle(30)
        print(json.dumps([ckpt.newest.lineage, ckpt.newest.step]), flush=True)
    elif verb == "restore":
        state["w"].zero_()
        found = ckpt.restore(state)
        print(json.dumps([found.lineage, found.step, state["w"].unique().tolist()]), flush=True)
    elif verb == "share":
        together = Together()
        together.newest([])
        print(json.dumps(together.sharing), flush=True)
"""


class Run:
    """Both ranks of one run, told by lines what to do."""

    def __init__(self, folders, *, storage="", value=0.0, cores=None):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        every = ",".join(map(str, os.sched_getaffinity(0)))
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(folder), str(storage), str(value), cores[rank] if cores else every],
                env={**os.environ, **where, "RANK": str(rank), "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )
            for rank, folder in enumerate(folders)
        ]  # fmt: skip

    def __enter__(self):
        return self

    def ask(self, verb, step=0):
        for one in self.ranks:
            one.stdin.write(f"{verb} {step}\n")
            one.stdin.flush()
        return [json.loads(one.stdout.readline()) for one in self.ranks]

    def __exit__(self, *_error):
        """All at once, as a power cut would."""
        for one in self.ranks:
            os.kill(one.pid, signal.SIGKILL)
        for one in self.ranks:
            one.communicate(timeout=SECONDS)


@pytest.fixture
def nodes():
    folders = [Path(f"/dev/shm/easyckpt-lineages-{os.getpid()}-{node}") for node in "ab"]
    for folder in folders:
        folder.mkdir(mode=0o700)
    yield folders
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(120)
def test_ranks_of_which_one_lost_its_memory_begin_the_same_lineage(nodes):
    """A run is started anew beside what an older one left on one of two nodes: what is newest is the new run's, on both, and of one run only."""
    with Run(nodes) as old:
        assert [old.ask("save", step) for step in (1, 2, 3)] == [[[0, step]] * 2 for step in (1, 2, 3)]
    shutil.rmtree(nodes[1])
    with Run(nodes, value=0.5) as anew:
        assert anew.ask("save", 1) == [[1, 1]] * 2
    with Run(nodes) as after:
        assert after.ask("restore") == [[1, 1, [1.5]], [1, 1, [101.5]]]
        assert after.ask("save", 2) == [[1, 2]] * 2


@pytest.mark.timeout(120)
def test_what_only_memory_holds_of_a_run_on_two_nodes_counts(nodes):
    """No node sees the other's shard, so that no step is whole in any folder; the new run begins behind it all the same."""
    with Run(nodes) as old:
        assert old.ask("save", 7) == [[0, 7]] * 2
    with Run(nodes, value=0.5) as anew:
        assert anew.ask("save", 1) == [[1, 1]] * 2
    with Run(nodes) as after:
        assert after.ask("restore") == [[1, 1, [1.5]], [1, 1, [101.5]]]


@pytest.mark.timeout(120)
def test_ranks_know_how_many_of_them_share_their_cores(nodes):
    """So that all together take no more threads to restore than there are cores: two on the same cores, or each on its own."""
    with Run(nodes) as shared:
        assert shared.ask("share") == [2, 2]
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with Run(nodes, cores=[str(first), str(second)]) as apart:
        assert apart.ask("share") == [1, 1]
