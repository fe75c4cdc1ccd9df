"""The front process and its neighbours: whatever ends it leaves no orphan and loses nothing, and two runs do not touch each other."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.flow.jobs import SMALL, audit, job, processes_of, until

pytestmark = pytest.mark.timeout(200)

ONE = (
    *SMALL,
    *(
        "--aimaster.nodes",
        "1",
        "--policy.parallelism.n_init_replicas",
        "1",
        "--rollout.parallelism.n_init_replicas",
        "1",
    ),
)


def test_a_killed_front_leaves_no_orphan_and_its_neighbour_alone(tmp_path: Path) -> None:
    """Agents flush and stop their members within 10 s; the same command goes on from there. A second run beside it notices nothing."""
    with (
        job(tmp_path / "left", *ONE, "--train.max_num_steps", "40") as left,
        job(tmp_path / "right", *ONE, "--train.max_num_steps", "1000000") as right,
    ):
        reached = left.at_step(12, seconds=150).step
        neighbour = right.at_step(3, seconds=150)
        assert left.front is not None
        os.kill(left.front.pid, signal.SIGKILL)
        left.front.wait(10)
        until(lambda: not processes_of(left.run), "no process left", 30, tell=lambda: str(processes_of(left.run)))
        left.start()
        resumed = until(lambda: s if (s := left.status()) and s.step > 0 else None, "the resumed run", 60)
        assert resumed.step >= reached, "what was trained is trained"
        assert left.wait(150) == 0, left.story()
        assert json.loads(left.places.summary.read_bytes())["steps"] == 40
        again = right.next_steps(2)
        assert {one.member: one.process for one in again.members} == {
            one.member: one.process for one in neighbour.members
        }
        right.interrupt(signal.SIGTERM)
        assert right.wait(60) == 130
        for one in (left, right):
            assert not processes_of(one.run)
            report = audit(one.run)
            assert (report["lost"], report["duplicate"]) == (0, 0)
        assert not left.memory(), "a finished run keeps nothing in memory"
