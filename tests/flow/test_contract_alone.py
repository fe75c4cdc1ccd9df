"""The contract where nobody is left to go on: the only policy member dies, everything dies, the disk is full, the user's code raises."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flow.jobs import SMALL, Job, alive, audit, job, processes_of, until

pytestmark = pytest.mark.timeout(200)

MOMENTS = random.Random(21)
ALONE = (
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


def adds_up(run: Path) -> None:
    report = audit(run)
    assert report["lost"] == 0
    assert report["duplicate"] == 0
    assert not report.get("problems"), report


def test_the_only_policy_member_is_restarted_from_memory(tmp_path: Path) -> None:
    """At most the compute since the newest whole snapshot is lost, and no rollout: killed, and stopped, at random moments."""
    with job(tmp_path / "run", *ALONE, "--train.max_num_steps", "1000000") as one:
        for count, number in enumerate((signal.SIGKILL, signal.SIGSTOP), start=1):
            before = one.at_step(12 * count, seconds=120)
            time.sleep(MOMENTS.random() * 0.3)
            pid = one.signal("policy-0", number)
            one.healed("policy-0", count)
            assert not alive(pid)
            after = one.at_step(before.step + 3)
            assert after.lineage - before.lineage <= 1
        one.interrupt()
        assert one.wait(60) == 130
        adds_up(one.run)


def test_after_everything_died_the_same_command_resumes_from_storage(tmp_path: Path) -> None:
    """Front, master, agent, shims and members are killed and the memory is gone; the flushed step is restored, the steps since are
    replayed from the ledger's batches, and the run finishes.
    """
    with job(tmp_path / "run", *ALONE, "--train.max_num_steps", "60") as one:
        killed_at = one.at_step(23, seconds=120).step
        for pid in [one.front.pid, *processes_of(one.run)] if one.front else []:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        until(lambda: not processes_of(one.run), "everything dead", 20)
        assert one.front is not None
        one.front.wait(10)
        for folder in one.memory():
            shutil.rmtree(folder)
        one.start()
        first = until(lambda: s if (s := one.status()) and s.step > 0 else None, "the resumed job", 60)
        assert first.step >= killed_at - 10, "it began anew"
        assert one.wait(120) == 0, one.story()
        assert json.loads(one.places.summary.read_bytes())["steps"] == 60
        adds_up(one.run)


def test_an_exception_of_the_users_code_stops_the_job_at_once(tmp_path: Path) -> None:
    """With the traceback and the member named, and no restart."""
    (tmp_path / "my_rewards.py").write_text(
        "seen = 0\n\ndef strict(text, answer):\n    global seen\n    seen += 1\n"
        "    if seen > 100:\n        raise KeyError('no such column: solution')\n    return 0.0\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    reward = ("--train.train_policy.reward_function", "my_rewards:strict")
    with job(tmp_path / "run", *ALONE, *reward, "--train.max_num_steps", "1000", environment=environment) as one:
        assert one.wait(120) == 1, one.story()
        summary = json.loads(one.places.summary.read_bytes())
        assert summary["failure"]["category"] == "app.exception", summary["failure"]
        assert summary["failure"]["member"] == "rollout-0"
        assert "no such column: solution" in summary["failure"]["traceback"]
        assert all(member["restarts"] == 0 for member in summary["status"]["members"])
        assert "KeyError" in one.output.read_text()
        assert not processes_of(one.run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that can be filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_run_disk_pauses_training_and_loses_nothing(small_disk: Path) -> None:
    """It is a finding; nothing is acknowledged undurably; with room again, training goes on."""
    with job(small_disk / "run", *ALONE, "--train.max_num_steps", "1000000") as one:
        one.at_step(5, seconds=120)
        ballast = small_disk / "ballast"
        fill(ballast)
        told = until(lambda: s if (s := one.status()) and said_full(one) else None, "the finding", 60, tell=one.story)
        assert told.step > 0
        paused = until(lambda: stands(one, ballast), "training that stands", 60)
        ballast.unlink()
        one.at_step(paused + 3, seconds=90)
        one.interrupt()
        assert one.wait(60) == 130
        adds_up(one.run)


def fill(path: Path) -> None:
    """Take all that is left."""
    with path.open("ab", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def said_full(one: Job) -> bool:
    status = one.status()
    return status is not None and any("full" in text or "space" in text for text in (*status.findings, status.reason))


def stands(one: Job, ballast: Path) -> int | None:
    """The committed step, if it has not moved for two seconds; what was given free meanwhile (an old checkpoint) is taken too."""
    before = one.pulse()
    time.sleep(2)
    after = one.pulse()
    if before and after and before.step == after.step:
        return after.step
    fill(ballast)
    return None
