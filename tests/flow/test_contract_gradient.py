"""The contract's row of the policy member: killed within a step, it changes nothing about that step.

One real job keeps its gradients while policy-1 is killed at random moments; then the batches of the disturbed run are trained once
more in one process that nobody disturbs, from the same snapshot, and every tensor is compared.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file

from rl_runtime.controller.history import History, LiveStep, read_history
from rl_runtime.controller.ledger import read_ledger
from rl_runtime.policy.gradients import kept_gradients
from rl_runtime.replay import ReplayReport, main
from tests.flow.jobs import Job, job, until

pytestmark = pytest.mark.timeout(180)

SEED = 7
KILLS = 3
MOST_KILLS = 8
"""A kill may fall between two steps: then it proves nothing, and another one is tried."""
MOST_STOPS = 30
"""As many tries to stop a member within a reduction."""

SMALL = [
    *("examples/tiny.toml", "--aimaster.task", "sort2", "--aimaster.warm_start.steps", "40"),
    *("--train.max_num_steps", "100000", "--train.train_batch_per_replica", "32", "--rollout.n_generation", "4"),
    *("--train.train_policy.mini_batch", "8", "--train.optm_lr", "1e-4", "--aimaster.heldout_prompts", "8"),
    *("--aimaster.snapshots.flush_every", "4", "--train.ckpt.max_keep", "-1"),
    *("--aimaster.record_gradients", "true"),
]
"""Sixteen prompts with four answers each are a step of eight shares. About half of the answers are right from the start, and with
this rate they stay so: every step has something to teach."""


def past(run: Path) -> History:
    return read_history(read_ledger(run / "ledger"))


def at_a_random_moment(one: Job, dice: random.Random) -> int:
    """All are in, and some part of a step has gone by; return the pid of policy-1."""
    one.all_running()
    pid = one.pid("policy-1")
    time.sleep(dice.uniform(0.0, 0.5))  # no wait for anything: the moment is left to the dice
    return pid


def kill(one: Job, pid: int) -> float:
    """Kill policy-1 and wait until its next start is in; return when it was killed."""
    at = time.time()
    os.kill(pid, signal.SIGKILL)

    def back() -> bool:
        one.check_front()
        member = one.running("policy-1")
        return member is not None and member.process is not None and member.process.pid != pid and member.in_epoch

    until(back, "policy-1 in again", 60, tell=one.story)
    return at


def frozen_in_the_reduction(one: Job, dice: random.Random) -> int | None:
    """Stop policy-1 at a random moment; its pid, still stopped, if policy-0 then waits for it in the reduction, else it goes on."""
    pid = at_a_random_moment(one, dice)
    os.kill(pid, signal.SIGSTOP)
    looks: deque[str] = deque(maxlen=4)

    def settled() -> str | None:
        status = one.status()
        members = status.members if status else ()
        looks.extend(m.progress.phase for m in members if m.member == "policy-0" and m.progress is not None)
        return looks[0] if len(looks) == 4 and len(set(looks)) == 1 else None

    if until(settled, "policy-0 without the other", 10, every=0.2, tell=one.story) == "reduce":
        return pid
    os.kill(pid, signal.SIGCONT)
    return None


def hit(history: History, kills: list[float]) -> list[LiveStep]:
    """The steps within which a kill fell: dealt before it, committed after it, by an epoch without the dead member."""
    return [
        step
        for step in history.steps.values()
        if step.was_disturbed
        and any(step.dealt.at < at < step.committed.at for at in kills)
        and "policy-1" in step.epochs[0].members
        and step.epochs[-1].members == ("policy-0",)
    ]


def spoil(path: Path) -> str:
    """Turn one element of the largest tensor of a kept gradient round; return the tensor's name."""
    tensors = load_file(path)
    name = max(tensors, key=lambda one: float(tensors[one].norm()))
    whole = bytearray(path.read_bytes())
    values = tensors[name].flatten()
    worst = values.abs().argmax()
    at = whole.find(tensors[name].numpy().tobytes()) + 4 * int(worst)
    whole[at + 3] ^= 0x80  # the sign of a little-endian float32
    path.write_bytes(whole)
    return name


def stopped_and_replayed(one: Job, disturbed: set[int]) -> ReplayReport:
    """Stop the job as a user would, and have the tool replay and compare it; these steps must be among those that were compared."""
    one.next_steps(5)
    one.interrupt()
    assert one.wait(60) == 130, one.story()
    tool = [sys.executable, "-m", "rl_runtime.replay", str(one.run), "--json"]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = msgspec.json.decode(done.stdout, type=ReplayReport)
    compare(report, disturbed)
    return report


def compare(report: ReplayReport, disturbed: set[int]) -> None:
    """Every step is as undisturbed, those that were hit for certain, and the replayed state is the run's own."""
    steps = {step.version.step: step for step in report.steps}
    assert disturbed <= set(steps)
    for number in disturbed:
        assert steps[number].norm > 0.0, "nothing to learn in this batch: its gradient proves nothing"
        assert steps[number].shares == {"policy-0": tuple(range(8))}
    assert max(step.gradient.difference for step in report.steps) <= 1e-5
    assert max(step.parameters.difference for step in report.steps) <= 1e-5
    stored = {number: step.snapshot.difference for number, step in steps.items() if step.snapshot is not None}
    assert max(stored) > max(disturbed), "no snapshot after the last kill"
    assert set(stored.values()) == {0.0}


def test_a_killed_member_changes_nothing_about_its_step(tmp_path, capsys):
    """The same step commits with the same gradient as undisturbed, in a run whose policy-1 is killed again and again."""
    dice = random.Random(SEED)
    kills: list[float] = []
    with job(tmp_path / "run", *SMALL) as one:
        one.at_step(5)
        while len(kills) < KILLS or (not hit(past(one.run), kills) and len(kills) < MOST_KILLS):
            kills.append(kill(one, at_a_random_moment(one, dice)))
        disturbed = {step.version.step for step in hit(past(one.run), kills)}
        assert disturbed, f"none of {len(kills)} kills fell within a step: the dice are bad"
        report = stopped_and_replayed(one, disturbed)

        version = next(step.version for step in report.steps if step.version.step in disturbed)
        for path in kept_gradients(one.places)[version]:
            spoilt = spoil(path)
        assert main([str(one.run), "--json", "--from", str(version.step), "--to", str(version.step)]) == 1
        wrong = msgspec.json.decode(capsys.readouterr().out, type=ReplayReport).steps[-1]
        assert wrong.gradient.tensor == spoilt
        assert wrong.gradient.difference > 1e-2
        assert "not the one that was voted for" in wrong.problems[0]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_member_killed_inside_the_reduction_changes_nothing(tmp_path):
    """Dead while the survivor waits for its part of the sum: the reduction is aborted, and the step commits as undisturbed."""
    dice = random.Random(SEED)
    with job(tmp_path / "run", *SMALL) as one:
        one.at_step(5)
        frozen = (frozen_in_the_reduction(one, dice) for _ in range(MOST_STOPS))
        pid = next((pid for pid in frozen if pid is not None), None)
        assert pid is not None, f"none of {MOST_STOPS} stops fell within a reduction: the dice are bad"
        kills = [kill(one, pid)]
        disturbed = {step.version.step for step in hit(past(one.run), kills)}
        said = next(one.run.glob("nodes/*/members/policy-0/output.log")).read_text()
        aborted = [json.loads(line)["step"] for line in said.splitlines() if '"reduction aborted"' in line]
        assert len(disturbed) == 1
        assert set(aborted) == disturbed
        stopped_and_replayed(one, disturbed)
