"""What the sidecar's eyes are worth and what they cost, at default intervals.

python -m tests.bench.eyes --samples 50 --seconds 60 --hangs sleep,spin@3,sleep@12x1.5

found   seconds from a fault to its finding at the master: process death, Xid, log sign, out-of-memory kill
cost    processor share and memory (PSS) of the agent and its helpers with 8 fake GPUs, 200 processes and 1 MB/s of logs
hang    a four-rank gloo job under `aimaster run`: which rank is named, and how long after it stopped. MODE[@STEP[xSECONDS]]: at which
        step (60) and with how long steps (0.05 s)
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from agents.sensors.process import read_table
from aimaster import catalogue
from aimaster.wire.messages import Found, MemberExited
from tests.bench.agent_rest import DEFAULT_PACE, cpu_seconds, pss_bytes
from tests.fakes import fake_nvml
from tests.flow.agent_master import BEATING, Master, Run, member, until
from tests.flow.memory_group import EATING, MemoryGroup

XIDS = (48, 62, 64, 74, 79, 95, 119, 120)
GPUS = 8
MEMBERS = 8
PROCESSES = 200
LOG_BYTES_PER_SECOND = 1 << 20
JOB = Path(__file__).parent.parent / "fakes" / "gloo_job.py"
HANGS = "sleep,spin,file,die,evaluate,sleep@3,spin@3,file@3,sleep@0,sleep@12x1.5,spin@12x1.5,sleep@10x2.5"
PATIENCE_SECONDS = 20.0
chance = random.Random(1)
"""Faults must not fall into step with the agent's own ticks."""


def summary(name: str, seconds: list[float]) -> dict[str, float]:
    return {
        f"{name}_median_seconds": round(statistics.median(seconds), 3),
        f"{name}_worst_seconds": round(max(seconds), 3),
    }


async def measure_deaths(master: Master, run: Run, samples: int) -> list[float]:
    took = []
    for incarnation in range(samples):
        started = await master.start("node-0", member("rollout-0", BEATING, role="rollout"), incarnation)
        at = time.monotonic()
        os.kill(started.process.pid, signal.SIGKILL)
        await master.ended("rollout-0", incarnation)
        took.append(time.monotonic() - at)
    return took


async def measure_xids(master: Master, driver: fake_nvml.FakeNvml, samples: int) -> list[float]:
    took = []
    pairs = [(code, gpu) for code in XIDS for gpu in range(GPUS)][:samples]
    await until(lambda: (p := master.pulses.get("node-0")) and [r for r in p.readings if r.kind == "gpu.device"])
    for code, gpu in pairs:
        at = time.monotonic()
        driver.xid(code, gpu)
        name = f"0000:1{gpu}:00"

        def told(code=code, name=name):
            return any(
                e.finding.details.get("xid") == str(code) and e.finding.subject.gpu == name
                for e in master.events(Found)
            )

        await until(told, PATIENCE_SECONDS)
        took.append(time.monotonic() - at)
        await asyncio.sleep(chance.uniform(0.0, 0.3))
    return took


def plain_signs(samples: int) -> list[tuple[str, str]]:
    """Signs of different kinds with a line of theirs that no other sign claims."""
    signs = catalogue.load()
    found = []
    for sign in signs.signs:
        one_line = sign.kind == "sign" and sign.role == "self" and sign.weight >= 50 and not sign.opens and sign.match
        if one_line and not sign.where and sign.id not in ("nvidia.xid", "nvidia.xid-reported", "nvidia.sxid"):
            line = sign.match[0]
            if [match.sign.id for match in signs.match(line)] == [sign.id]:
                found.append((sign.id, line))
    return found[:samples]


async def measure_signs(master: Master, run: Run, samples: int) -> list[float]:
    log = run.member("rollout-1") / "output.log"
    took = []
    for number, (name, line) in enumerate(plain_signs(samples)):
        if number % 25 == 0:
            await master.start("node-0", member("rollout-1", BEATING, role="rollout"), number // 25)
        await asyncio.sleep(chance.uniform(0.0, 0.5))
        at = time.monotonic()
        with log.open("a") as file:
            file.write(line + "\n")
        await until(lambda name=name: any(e.finding.sign == name for e in master.events(Found)), PATIENCE_SECONDS, name)
        took.append(time.monotonic() - at)
    return took


async def measure_kills(master: Master, folder: Path, samples: int) -> list[float]:
    """From the first byte over what was there before to the finding, be it by itself or with the death."""
    took = []
    for incarnation in range(samples):
        group = MemoryGroup(48 << 20)
        go = folder / f"go-{incarnation}"
        started = await master.start(
            "node-0", member("rollout-2", EATING.format(go=str(go)), role="rollout"), incarnation
        )
        group.put(started.process.pid)
        name = group.folder.name
        await until(
            lambda name=name: any(name in str(r.values.get("group")) for r in master.pulses["node-0"].readings),
            PATIENCE_SECONDS,
        )
        at = time.monotonic()
        go.touch()

        def told(name=name, incarnation=incarnation, pid=started.process.pid):
            deaths = [e for e in master.events(MemberExited) if (e.member, e.incarnation) == ("rollout-2", incarnation)]
            carried = any(one.category == "node.oom_cgroup" for death in deaths for one in death.findings)
            alone = [e.finding for e in master.events(Found) if e.finding.category == "node.oom_cgroup"]
            return carried or any(one.subject.pid == pid or name in one.details.get("group", "") for one in alone)

        await until(told, PATIENCE_SECONDS)
        took.append(time.monotonic() - at)
        await master.ended("rollout-2", incarnation)
        group.remove()
    return took


async def measure_found(samples: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = Run(folder / "run")
        driver = fake_nvml.FakeNvml(fake_nvml.build(folder), folder / "state")
        driver.set(count=GPUS)
        try:
            run.agent(**DEFAULT_PACE, **driver.environment)
            async with Master(run) as master:
                await master.connected("node-0")
                figures = summary("death", await measure_deaths(master, run, samples))
                figures |= summary("xid", await measure_xids(master, driver, samples))
                figures |= summary("log_sign", await measure_signs(master, run, samples))
                figures |= summary("oom_kill", await measure_kills(master, folder, samples))
        finally:
            run.close()
    return figures | {"samples": samples}


BUSY = """
import subprocess, time, sys
children = [subprocess.Popen(["sleep", "600"]) for _ in range({children})]
line = "[2026-11-29 12:00:00,123] [INFO] [rank 3] loss scale ok, throughput of the data loader is fine, grad_norm=1.2345, lr=1.000e-04\\n"
step = 0
while True:
    until = time.monotonic() + 0.1
    step += 1
    sys.stdout.write(line * {lines} + f"step {{step}} loss 1.234\\n")
    sys.stdout.flush()
    time.sleep(max(0.0, until - time.monotonic()))
"""


async def measure_cost(seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = Run(folder / "run", kind="command")
        driver = fake_nvml.FakeNvml(fake_nvml.build(folder), folder / "state")
        driver.set(count=GPUS)
        lines = LOG_BYTES_PER_SECOND // 10 // MEMBERS // 130
        code = BUSY.format(children=PROCESSES // MEMBERS - 1, lines=lines)
        try:
            agent = run.agent(**DEFAULT_PACE, **driver.environment)
            async with Master(run) as master:
                for number in range(MEMBERS):
                    await master.start("node-0", member(f"rank-{number}", code, role="command", reports_progress=False))
                await asyncio.sleep(10.0)
                helper = [pid for pid in children_of(agent.pid) if b"nvml_child" in command_of(pid)]
                shims = [
                    json.loads((run.member(f"rank-{n}") / "pid.json").read_text())["shim"]["pid"]
                    for n in range(MEMBERS)
                ]
                watched = [agent.pid, *helper, *shims]
                written = sum((run.member(f"rank-{n}") / "output.log").stat().st_size for n in range(MEMBERS))
                before, since = [cpu_seconds(pid) for pid in watched], time.monotonic()
                await asyncio.sleep(seconds)
                took = time.monotonic() - since
                after = [cpu_seconds(pid) for pid in watched]
                grown = sum((run.member(f"rank-{n}") / "output.log").stat().st_size for n in range(MEMBERS)) - written
                shares = [(late - early) / took for early, late in zip(before, after, strict=True)]
                usage = await until(
                    lambda: [r for r in master.pulses["node-0"].readings if r.kind == "process.usage"], PATIENCE_SECONDS
                )
                sizes = [pss_bytes(pid) for pid in watched]
                return {
                    "cpu_ratio": round(sum(shares), 4),
                    "agent_cpu_ratio": round(shares[0], 4),
                    "nvml_helper_cpu_ratio": round(sum(shares[1 : 1 + len(helper)]), 4),
                    "shims_cpu_ratio": round(sum(shares[1 + len(helper) :]), 4),
                    "pss_mib": round(sum(sizes) / 2**20, 1),
                    "agent_pss_mib": round(sizes[0] / 2**20, 1),
                    "nvml_helper_pss_mib": round(sum(sizes[1 : 1 + len(helper)]) / 2**20, 1),
                    "shims_pss_mib": round(sum(sizes[1 + len(helper) :]) / 2**20, 1),
                    "processes": sum(int(r.values["processes"]) for r in usage),
                    "log_mb_per_second": round(grown / took / 1e6, 2),
                    "seconds": round(took, 1),
                }
        finally:
            run.close()


def children_of(pid: int) -> list[int]:
    return [one for one, fields in read_table().items() if int(fields[1]) == pid]


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def measure_hang(mode: str, *, at: int = 60, step_seconds: float = 0.05) -> dict[str, object]:
    """One run with default settings; the first incident of its own journal tells who was named and when."""
    with tempfile.TemporaryDirectory() as name:
        folder, fault = Path(name) / "run", Path(name) / "fault"
        program = [sys.executable, "-m", "aimaster.cli.app", "run", "--run-dir", str(folder), "--nproc-per-node", "4", "--", sys.executable, str(JOB), mode]  # fmt: skip
        told = {"FAULT_FILE": str(fault), "FAULT_AT": str(at), "STEP_SECONDS": str(step_seconds)}
        environment = os.environ | told | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False, timeout=240)
        summary = folder / "summary.json"
        if not summary.exists():
            raise RuntimeError(f"the run left no summary (exit {done.returncode}): {done.stderr[-2000:]}")
        incidents = json.loads(summary.read_text())["status"]["incidents"]
        first = incidents[0] if incidents else None
        return {
            "mode": mode,
            "at_step": at,
            "step_seconds": step_seconds,
            "named": None if first is None else named_by(first),
            "category": None if first is None else first["verdict"]["category"],
            "seconds": None if first is None else round(first["detected_at"] - float(fault.read_text()), 1),
            "incidents": len(incidents),
            "exit_code": done.returncode,
        }


def read_hang(text: str) -> dict[str, object]:
    """`spin@3x1.5` as arguments of `measure_hang`."""
    mode, _, place = text.partition("@")
    at, _, step_seconds = place.partition("x")
    told: dict[str, object] = {"mode": mode}
    if at:
        told["at"] = int(at)
    if step_seconds:
        told["step_seconds"] = float(step_seconds)
    return told


def named_by(incident: dict) -> str:
    """The rank that the verdict names, else the member that it is about."""
    rank = incident["verdict"]["culprit"]["rank"]
    return str(incident["subject"]) if rank is None else f"rank-{rank}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--hangs", default=HANGS)
    options = parser.parse_args()
    figures: dict[str, object] = {}
    if options.samples:
        figures |= asyncio.run(measure_found(options.samples))
    if options.seconds:
        figures |= asyncio.run(measure_cost(options.seconds))
    hangs = [measure_hang(**read_hang(text)) for text in options.hangs.split(",") if text]
    for name, value in figures.items():
        print(f"{name:<26} {value}")
    for one in hangs:
        print("hang", " ".join(f"{name}={value}" for name, value in one.items()))
    print(json.dumps(figures | {"hangs": hangs}))


if __name__ == "__main__":
    main()
