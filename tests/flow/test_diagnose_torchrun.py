"""Logs of real torchrun jobs, as torchrun writes them, given to `aimaster diagnose` as they are."""

import os
import subprocess
import sys
import textwrap

import pytest

from aimaster.catalogue import load
from aimaster.cli.diagnose import examine

SCRIPT = textwrap.dedent(
    """
    import datetime, os, signal, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    for step in range(8):
        if step == 5 and rank == 1 and sys.argv[1] == "raise":
            batch = {"inputs": 1}
            batch["labels"]
        if step == 5 and rank == 1 and sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S,000")
        print(f"{now} INFO train: step={step} loss={1.0 / (step + 1):.4f}", flush=True)
    dist.destroy_process_group()
    print("Training completed.", flush=True)
    """
)


def torchrun(folder, how):
    (folder / "train.py").write_text(SCRIPT)
    log = folder / "node-0" / "torchrun.log"
    log.parent.mkdir()
    with log.open("wb") as out:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node=2",
                str(folder / "train.py"),
                how,
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
            timeout=100,
            check=False,
        )
    return done.returncode, examine((str(log.parent.parent),), load(), now=log.stat().st_mtime).verdict


@pytest.mark.parametrize(
    ("how", "category", "rank", "action"),
    [
        ("well", "benign", None, "ignore"),
        ("raise", "app.exception", 1, "stop_job"),
        ("kill", "process.killed", 1, "restart_process"),
    ],
)
def test_real_torchrun_logs_are_diagnosed(tmp_path, how, category, rank, action):
    """A job that ends well is benign; a user's exception names its rank although the peer's error is louder; a killed rank is found by its exit."""
    code, verdict = torchrun(tmp_path, how)
    assert (code == 0) == (how == "well")
    assert (verdict.category, verdict.culprit.rank, verdict.action) == (category, rank, action), verdict
    if how == "raise":
        assert "KeyError: 'labels'" in verdict.traceback
