"""What a node's sidecar costs at rest: processor share and memory (PSS) of the agent and its shims, snapshot memory excluded.

python -m tests.bench.agent_rest --seconds 60 --members 3
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import msgspec

from agents.config import ENV_PREFIX, Pace
from tests.flow.agent_master import BEATING, Master, Run, member, until

DEFAULT_PACE = {f"{ENV_PREFIX}{field.name.upper()}": str(field.default) for field in msgspec.structs.fields(Pace)}
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def pss_bytes(pid: int) -> int:
    """Proportional share of memory, mapped snapshot segments (shared memory) excluded."""
    values = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) * 1024
    return values["Pss"] - values.get("Pss_Shmem", 0)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def helpers(run: Run, members: int) -> list[int]:
    """The shims."""
    return [json.loads((run.member(f"rollout-{n}") / "pid.json").read_text())["shim"]["pid"] for n in range(members)]


async def measure(seconds: float, members: int, settle_seconds: float = 3.0) -> dict[str, float]:
    """Start an agent with members that beat 50 times a second, let it settle, and watch it."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run")
        try:
            agent = run.agent(**DEFAULT_PACE)
            async with Master(run) as master:
                for number in range(members):
                    await master.start("node-0", member(f"rollout-{number}", BEATING, role="rollout"))
                await asyncio.sleep(settle_seconds)
                watched = [agent.pid, *helpers(run, members)]
                before, since = sum(map(cpu_seconds, watched)), time.monotonic()
                await asyncio.sleep(seconds)
                share = (sum(map(cpu_seconds, watched)) - before) / (time.monotonic() - since)
                sizes = [pss_bytes(pid) for pid in watched]
                return {
                    "cpu_ratio": round(share, 5),
                    "pss_mib": round(sum(sizes) / 2**20, 1),
                    "agent_pss_mib": round(sizes[0] / 2**20, 1),
                    "shim_pss_mib": round(sum(sizes[1:]) / max(1, members) / 2**20, 2),
                    "members": members,
                    "seconds": seconds,
                }
        finally:
            run.close()


async def measure_deaths(kills: int) -> dict[str, float]:
    """Kill one member again and again under an agent of default pace."""
    reports, notices = [], []
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run")
        try:
            run.agent(**DEFAULT_PACE)
            async with Master(run) as master:
                for incarnation in range(kills):
                    started = await master.start("node-0", member("rollout-0", BEATING, role="rollout"), incarnation)
                    killed_at = time.monotonic()
                    os.kill(started.process.pid, signal.SIGKILL)
                    await until(lambda count=incarnation + 1: len(master.deaths) >= count)
                    notices.append(time.monotonic() - killed_at)
                    await master.ended("rollout-0", incarnation)
                    reports.append(time.monotonic() - killed_at)
        finally:
            run.close()
    return {
        "notice_ms_median": round(1000 * statistics.median(notices), 1),
        "notice_ms_worst": round(1000 * max(notices), 1),
        "report_ms_median": round(1000 * statistics.median(reports), 1),
        "report_ms_worst": round(1000 * max(reports), 1),
        "kills": kills,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--kills", type=int, default=30)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.seconds, options.members))
    if options.kills:
        figures |= asyncio.run(measure_deaths(options.kills))
    for name, value in figures.items():
        print(f"{name:<16} {value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
