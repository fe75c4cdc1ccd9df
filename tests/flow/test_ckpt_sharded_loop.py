"""The example with sharded ranks: killed, and started again on other numbers of ranks."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from easyckpt import shm
from easyckpt.storage import list_manifests

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def start(tmp_path):
    """Starts the example under torchrun; whatever is left of it is killed at the end, and its memory removed."""
    started = []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}

    def run(ranks, steps):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        argv = [*torchrun, str(ROOT / "examples" / "sharded_loop.py"), "ckpts", str(steps)]
        started.append(
            subprocess.Popen(
                argv, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        return started[-1]

    yield run
    for process in started:
        kill(process)
        process.stdout.close()
    shutil.rmtree(shm.default_folder(tmp_path / "ckpts"), ignore_errors=True)


def kill(process):
    """The launcher, and the ranks that it started."""
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, children)):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def test_killed_ranks_go_on_and_so_do_more_or_fewer_of_them(start, tmp_path):
    """SIGKILL of all: two ranks go on from memory, one rank pieces both shards together; the last step of a clean end is on storage."""
    first = start(2, 100_000)
    seen = [first.stdout.readline() for _ in range(20)]
    kill(first)
    last = int(seen[-1].split()[1])

    out, _ = start(2, last + 10).communicate(timeout=100)
    begun = re.match(r"starting after step (\d+) \(from shm\)\n", out)
    assert begun is not None, out
    assert int(begun[1]) >= last - 1
    assert out.splitlines()[-1].startswith(f"step {last + 10} ")
    assert list_manifests(tmp_path / "ckpts")[0].step == last + 10

    again, _ = start(1, last + 12).communicate(timeout=100)
    assert again.splitlines()[0] == f"starting after step {last + 10} (from storage)"
    assert again.splitlines()[-1].startswith(f"step {last + 12} ")
