"""How fast and how small `aimaster diagnose` is: `python -m tests.bench.diagnose [--gigabytes 10]`; the last line is JSON.

Typical: training logs, one line in a thousand holds a literal. Worst: every second line is a follower, all confirmed. Both run as the scan runs, on
one core, beside `grep -c -E` with twenty alternations over the same file and a plain loop over lines. Then a Ray head log of many gigabytes goes
through a pipe, its root in the last twentieth.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from aimaster.catalogue import Catalogue, load
from aimaster.catalogue.scan import CHUNK_BYTES, LogScan
from tests.fakes.ray_head_log import ray_head_log

GREP = (
    "Traceback|OutOfMemory|NVRM: Xid|Killed process|Connection reset|No space left|Segmentation|panic|Watchdog caught|ncclRemote|ECC error|fallen off|"
    "Stale file|Broken pipe|timed out after|ActorDied|Removing node|CANCELLED AT|Errno 5|DataLoader worker"
)


def typical(megabytes: int) -> bytes:
    """Training, worker, NCCL and raylet lines; one in a thousand is an echo."""
    dice = random.Random(1)
    made: list[str] = []
    size = number = 0
    while size < megabytes * 1_000_000:
        number += 1
        kind = dice.random()
        clock = f"10:{number // 60 % 60:02}:{number % 60:02}"
        if kind < 0.001:
            line = f"[rank{number % 64}]:[E301 {clock}.123456789 ProcessGroupNCCL.cpp:684] [Rank {number % 64}] Some NCCL operations have failed or timed out."
        elif kind < 0.5:
            line = f"2026-03-01 {clock},{number % 1000:03} INFO train: step={number} loss={dice.random() * 3:.4f} lr=1.50e-04 tokens/s={41000 + number % 900}"
        elif kind < 0.7:
            line = f"(WorkerDict pid={dice.randrange(9999)}, ip=10.0.0.{dice.randrange(255)}) INFO 03-01 {clock} worker.py:{number % 400}] Generated {number % 128}"
        elif kind < 0.85:
            line = f"node-{number % 16}:{40000 + number % 999}:{41000 + number % 999} [{number % 8}] NCCL INFO Channel {number % 24:02}/24 : 0[0] -> 1[1] via P2P/IPC"
        else:
            line = f"[2026-03-01 {clock},{number % 1000:03} I {number % 300} 1] (raylet) node_manager.cc:512: Event stats snapshot {number} mean={dice.random():.4f} ms"
        made.append(line)
        size += len(line) + 1
    return ("\n".join(made) + "\n").encode()


def worst(megabytes: int) -> bytes:
    """Every second line is a follower of a different rank or worker."""
    dice = random.Random(2)
    exits, _ = ray_head_log(nodes=1000, followers=20_000, seed=2)
    echoes = [line for line in exits if "Reporting worker exit" in line]
    made: list[str] = []
    size = number = 0
    while size < megabytes * 1_000_000:
        number += 1
        if number % 2:
            choice = number // 2 % 3
            line = (
                echoes[number % len(echoes)]
                if choice == 0
                else f"[rank{number % 512}]:[E301 10:31:20.1 ProcessGroupNCCL.cpp:684] [Rank {number % 512}] Some NCCL operations have failed or timed out."
                if choice == 1
                else f"ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task. {number % 997}"
            )
        else:
            line = f"2026-03-01 10:{number // 60 % 60:02}:{number % 60:02},000 INFO train: step={number} loss={dice.random() * 3:.4f} lr=1.50e-04"
        made.append(line)
        size += len(line) + 1
    return ("\n".join(made) + "\n").encode()


def scan_speed(catalogue: Catalogue, path: Path, times: int) -> tuple[float, LogScan]:
    """MB/s of reading and scanning one file, in seconds of the processor: this machine is shared."""
    scan = LogScan(catalogue, node=None, file=path.name, count_lines=False)
    began = time.process_time()
    for _ in range(times):
        with path.open("rb", buffering=0) as file:
            while data := file.read(CHUNK_BYTES):
                scan.feed(data)
    scan.finish()
    spent = time.process_time() - began
    return path.stat().st_size * times / 1e6 / spent, scan


def grep_speed(path: Path, times: int) -> float:
    """MB/s of grep -c -E with twenty alternations."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(times):
        subprocess.run(["grep", "-c", "-E", GREP, str(path)], stdout=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return path.stat().st_size * times / 1e6 / spent


def loop_speed(catalogue: Catalogue, data: bytes) -> float:
    """MB/s of the plain form: for each line, is any literal in it, and does the pattern match?"""
    sample = data[:300_000]
    patterns = [(sign.literal, re.compile(sign.pattern.encode())) for sign in catalogue.signs]
    pairs = [(literal.encode(), pattern) for literals, pattern in patterns for literal in literals]
    began = time.process_time()
    for line in sample.splitlines():
        for literal, pattern in pairs:
            if literal in line:
                pattern.search(line)
    return len(sample) / 1e6 / (time.process_time() - began)


def head_log_blocks(gigabytes: float) -> Iterator[bytes]:
    """A long quiet life in stamped blocks, and the failure in the last twentieth."""
    lines, _ = ray_head_log(nodes=1000, followers=50_000, seed=4)
    whole = "\n".join(lines) + "\n"
    start = whole.index("Health check failed")
    quiet, end = whole[: whole.rindex("\n", 0, start) + 1].encode(), whole[whole.rindex("\n", 0, start) + 1 :].encode()
    calm = b"\n".join(line for line in quiet.splitlines() if b"Placement group" in line) + b"\n"
    yield quiet
    made = len(quiet)
    number = 0
    while made < gigabytes * 1e9 * 0.96:
        block = calm.replace(b" 10:", b" %02d:" % (11 + number // 4000 % 2))
        number += 1
        yield block
        made += len(block)
    yield end.replace(b" 10:", b" 13:")


def peak_mib(pid: int) -> float:
    """The highest resident memory of a process so far; getrusage would count what its parent held at the fork."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


def head_log(gigabytes: float) -> tuple[float, float, bool]:
    """(MB/s, peak MiB, right) of `aimaster diagnose --json -` on that log through a pipe."""
    _, truth = ray_head_log(nodes=1000, followers=1, seed=4)
    began = time.monotonic()
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "aimaster.cli.diagnose", "--json", "-"], stdin=subprocess.PIPE, stdout=out
        )
        assert child.stdin is not None
        made, peak = 0, 0.0
        for block in head_log_blocks(gigabytes):
            child.stdin.write(block)
            made += len(block)
            peak = max(peak, peak_mib(child.pid))
        child.stdin.close()
        while child.poll() is None:
            peak = max(peak, peak_mib(child.pid))
            time.sleep(0.01)
        out.seek(0)
        verdict = json.load(out)
    right = (verdict["category"], verdict["culprit"].get("node")) == (truth.category, truth.node)
    return made / 1e6 / (time.monotonic() - began), peak, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=10.0, help="size of the Ray head log")
    parser.add_argument("--megabytes", type=int, default=128, help="size of the two scanned files")
    options = parser.parse_args()
    catalogue = load()
    with tempfile.TemporaryDirectory() as folder:
        speeds: dict[str, float] = {}
        for name, data in (("typical", typical(options.megabytes)), ("worst", worst(options.megabytes))):
            path = Path(folder, f"{name}.log")
            path.write_bytes(data)
            scan_speed(catalogue, path, 1)
            speed, scan = max((scan_speed(catalogue, path, 2) for _ in range(3)), key=lambda one: one[0])
            speeds[name] = speed
            speeds[f"{name}_grep"] = max(grep_speed(path, 2) for _ in range(3))
            print(f"{name}: {speed:.0f} MB/s, grep {speeds[f'{name}_grep']:.0f} MB/s, beyond the limit: {scan.dropped}")
        loop = loop_speed(catalogue, data)
    through, peak, right = head_log(options.gigabytes)
    print(
        f"Ray head log of {options.gigabytes} GB through a pipe: {through:.0f} MB/s, {peak:.0f} MiB, {'right' if right else 'WRONG'}"
    )
    print(
        json.dumps(
            {
                "mb_per_second_typical": round(speeds["typical"], 1),
                "mb_per_second_worst": round(speeds["worst"], 1),
                "over_grep": round(speeds["typical"] / speeds["typical_grep"], 3),
                "over_line_loop": round(speeds["worst"] / loop, 2),
                "peak_mib_10gb": round(peak, 1),
                "head_log_right": right,
            }
        )
    )
    sys.exit(0 if right else 1)


if __name__ == "__main__":
    main()
