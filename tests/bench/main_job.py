"""Kill and stop each role of a running job many times: seconds to the verdict and to the next committed step.

    python -m tests.bench.main_job [--kills 5] [--seed 1]

All figures are moments the job itself noted in its incidents, on one clock. Prints a table, and one JSON object as its very
last line.
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

from aimaster.wire.status import IncidentStatus
from tests.flow.jobs import Job, job, until
from tests.soak import EXAMPLE, settings, victim

CASES = (
    ("rollout", "SIGKILL"),
    ("policy", "SIGKILL"),
    ("controller", "SIGKILL"),
    ("master", "SIGKILL"),
    ("agent", "SIGKILL"),
    ("rollout", "SIGSTOP"),
    ("policy", "SIGSTOP"),
    ("controller", "SIGSTOP"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5, help="of each role; a third as many stops, at least two")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    rows: dict[str, dict[str, list[float]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-main-") as folder,
        job(Path(folder) / "run", EXAMPLE, *settings(1_000_000, options.seed)) as one,
    ):
        one.at_step(10, seconds=180)
        for role, kind in CASES:
            count = options.kills if kind == "SIGKILL" else max(2, options.kills // 3)
            row = rows.setdefault(f"{role} {kind}", {"verdict": [], "next_step": []})
            for _ in range(count):
                measure(one, role, signal.Signals[kind], draw, row)
            print(f"{role} {kind}: {count} done", file=sys.stderr, flush=True)
        one.interrupt()
        one.wait(60)
    return report(rows)


def measure(one: Job, role: str, number: signal.Signals, draw: random.Random, row: dict[str, list[float]]) -> None:
    """Hurt one process of the role at a random moment of a step and note how long verdict and next commit took."""
    one.all_running(seconds=120)
    one.next_steps(2)
    time.sleep(draw.random() * 0.5)
    name, pid = victim(one, role, draw)
    known = {incident.incident for incident in one.incidents_all()}
    struck = time.time()
    os.kill(pid, number)
    if role in ("master", "agent"):
        committed = until(lambda: commit_after(one, struck), f"a commit after {name} was hurt", 60)
        row["next_step"].append(committed - struck)
    incident = until(lambda: fresh(one, name, known), f"an incident of {name} that is over", 120, tell=one.story)
    row["verdict"].append((incident.decided_at or incident.detected_at) - struck)
    if role not in ("master", "agent") and incident.resumed_at is not None:
        row["next_step"].append(incident.resumed_at - struck)


def commit_after(one: Job, moment: float) -> float | None:
    pulse = one.pulse()
    return pulse.committed_at if pulse is not None and pulse.committed_at > moment else None


def fresh(one: Job, name: str, known: set[str]) -> IncidentStatus | None:
    """The newest incident of the subject that was not known before, once the job went on."""
    for incident in reversed(one.incidents_all()):
        same = name in (incident.subject, f"agent-{incident.subject}")
        if incident.incident not in known and same and incident.resumed_at is not None:
            return incident
    return None


def report(rows: dict[str, dict[str, list[float]]]) -> int:
    """Print the table and the JSON line."""
    figures: dict[str, Any] = {}
    print(f"{'what':<22}{'count':>6}{'verdict median':>16}{'worst':>8}{'next step median':>18}{'worst':>8}   (seconds)")
    for name, row in rows.items():
        cells = {
            key: {"median": round(statistics.median(values), 3), "worst": round(max(values), 3), "count": len(values)}
            for key, values in row.items()
            if values
        }
        figures[name] = cells
        verdict, step = cells.get("verdict"), cells.get("next_step")
        print(
            f"{name:<22}{len(row['verdict']):>6}"
            + (f"{verdict['median']:>16.2f}{verdict['worst']:>8.2f}" if verdict else f"{'-':>16}{'-':>8}")
            + (f"{step['median']:>18.2f}{step['worst']:>8.2f}" if step else f"{'-':>18}{'-':>8}")
        )
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
