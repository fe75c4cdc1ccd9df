"""A training state sharded over ranks comes back on any other number and arrangement of ranks, bit-equal."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture
def memory():
    path = Path(f"/dev/shm/easyckpt-ranks-{os.getpid()}")
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_two_ranks_to_four_to_a_mesh_to_one_and_back(memory):
    """FSDP2 on 2 ranks → 4 ranks, replicas 2 x 2, tensor parallel x FSDP2 2 x 2, one plain process; uneven rows, a rank without any, fresh optimizers."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent)}
    done = subprocess.run(
        [sys.executable, str(HERE / "ckpt_ranks.py"), str(memory)], env=environment, capture_output=True, text=True, timeout=110, check=False
    )  # fmt: skip
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["failed"] == [0, 0, 0, 0], done.stderr[-3000:]
    seen = set()
    for answer in figures["answers"]:
        for name, (tier, differences, *_) in answer.items():
            seen.add(name)
            assert differences == [], name
            assert tier == ("shm" if name == "same ranks" else "storage")
    assert {"same ranks", "four ranks", "replicas", "tensor parallel", "tensor parallel to plain", "alone"} <= seen
