"""Soak: one longer run under many seeded kills of every role, master and agents, then the audit; beside it undisturbed runs.

    python -m tests.soak --kills 30 --seed 1 [--steps 600] [--undisturbed 3] [--json]

The undisturbed runs have the same seed, so that they differ by the kills alone. Passes when the disturbed run finishes, the audit
finds nothing lost and nothing trained twice, and the final reward on the held-out prompts is within 0.1 of the undisturbed mean. Prints a table, and one JSON object as its very last line.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.flow.jobs import Job, alive, audit, job, until

EXAMPLE = "examples/tiny.toml"
SUBJECTS = ("policy", "rollout", "controller", "master", "agent")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--undisturbed", type=int, default=3, help="runs to compare the reward with; 0: no comparison")
    parser.add_argument("--keep", type=Path, help="folder for the runs (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        figures = soak(options, folder)
    print(json.dumps(figures))
    return 0 if figures["passed"] else 1


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all, print the table, return the figures."""
    calm = [
        undisturbed(folder / f"calm-{number}", options.steps, options.seed) for number in range(options.undisturbed)
    ]
    run = folder / "disturbed"
    arguments = ["--json", EXAMPLE, *settings(options.steps, options.seed)]
    kills: dict[str, int] = {}
    started = time.monotonic()
    with job(run, *arguments) as one:
        inflict(one, random.Random(options.seed), options, kills)
        code = one.wait(seconds=60 + 20 * options.steps)
        summary = json.loads(one.places.summary.read_bytes())
        report = audit(run)
        left = len(one.memory())
    calm_mean = statistics.mean(calm) if calm else None
    reward = summary["reward_after"]
    near = calm_mean is None or abs(reward - calm_mean) <= 0.1
    passed = code == 0 and report["lost"] == 0 and report["duplicate"] == 0 and not report.get("problems") and near
    figures = {
        "passed": passed,
        "exit_code": code,
        "seconds": round(time.monotonic() - started, 1),
        "steps": summary["steps"],
        "kills": sum(kills.values()),
        "kills_by_subject": kills,
        "incidents": len(summary["incidents"]),
        "seconds_lost": summary["seconds_lost"],
        "reward_before": summary["reward_before"],
        "reward_after": reward,
        "undisturbed": calm,
        "undisturbed_mean": calm_mean,
        "audit": report,
        "memory_folders_left": left,
    }
    width = max(len(key) for key in figures)
    for key, value in figures.items():
        print(f"{key:<{width}}  {value}")
    return figures


def settings(steps: int, seed: int) -> list[str]:
    """Overrides of the example: length and seed, and budgets that many kills do not exhaust."""
    return [
        *("--train.max_num_steps", str(steps), "--aimaster.seed", str(seed)),
        *("--aimaster.budgets.member_restarts", "1000"),
    ]


def undisturbed(run: Path, steps: int, seed: int) -> float:
    """Final held-out reward of a run that nobody hurts."""
    with job(run, EXAMPLE, *settings(steps, seed)) as one:
        if one.wait(seconds=120 + 10 * steps) != 0:
            raise RuntimeError(f"the undisturbed run failed\n{one.story()}")
        reward = float(json.loads(one.places.summary.read_bytes())["reward_after"])
    print(f"undisturbed run, seed {seed}: reward {reward:.3f}", file=sys.stderr, flush=True)
    return reward


def inflict(one: Job, draw: random.Random, options: argparse.Namespace, kills: dict[str, int]) -> None:
    """Spread the kills over the run: each at a random moment of a random step, of a random living process."""
    first = one.at_step(3, seconds=180).step
    moments = sorted(draw.uniform(first, options.steps * 0.92) for _ in range(options.kills))
    for moment in moments:
        one.at_step(int(moment), seconds=600)
        time.sleep(draw.random())
        role = draw.choice(SUBJECTS)
        subject, pid = victim(one, role, draw)
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not alive(pid), f"{subject} dead", 30)
        kills[role] = kills.get(role, 0) + 1
        print(f"step {int(moment)}: killed {subject} (pid {pid})", file=sys.stderr, flush=True)


def victim(one: Job, role: str, draw: random.Random) -> tuple[str, int]:
    """A living process of the role: its name and pid. A role with nobody alive at this moment is waited for."""

    def find() -> tuple[str, int] | None:
        one.check_front()
        status = one.status()
        if status is None:
            return None
        if role == "master":
            return ("master", one.master_pid()) if alive(one.master_pid()) else None
        if role == "agent":
            choices = [(f"agent-{node.node}", node.agent_pid) for node in status.nodes if node.state == "connected"]
        else:
            choices = [
                (member.member, member.process.pid)
                for member in status.members
                if member.role == role and member.process is not None and member.state == "running"
            ]
        choices = [(name, pid) for name, pid in choices if pid and alive(pid)]
        return draw.choice(choices) if choices else None

    return until(find, f"a living {role}", 90)


if __name__ == "__main__":
    sys.exit(main())
