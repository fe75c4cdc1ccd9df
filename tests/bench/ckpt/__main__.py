"""`make bench-ckpt`: easyckpt beside its peers in one interleaved run, each engine in fresh processes, SIGKILL between save and restore.

python -m tests.bench.ckpt [--quick] [--gib 1 --gib 4] [--rounds 3] [--python PATH]; a table for people, the last line one JSON object.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.ckpt import engines

ROOT = Path(__file__).resolve().parents[3]


class Bench:
    def __init__(self, options):
        self.options = options
        self.python = options.python or next(
            (str(path) for path in [ROOT / ".venv-bench/bin/python"] if path.exists()), sys.executable
        )
        self.work = Path(tempfile.mkdtemp(prefix="easyckpt-bench-", dir=options.work))
        self.environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TQDM_DISABLE": "1",
        }  # fmt: skip

    def start(self, *argv, environment=None, **options):
        return subprocess.Popen(
            [self.python, *map(str, argv)], env={**self.environment, **(environment or {})}, cwd=ROOT, text=True,
            stderr=open(self.work / "log", "a"), start_new_session=True, **options,
        )  # fmt: skip

    def installed(self, engine):
        code = f"from tests.bench.ckpt import engines; raise SystemExit(not engines.{engine.__name__}.installed())"
        return self.start("-c", code).wait() == 0

    def save_and_restore(self, engine, gib):
        """One engine, one round: the figures of both processes."""
        folder, out = self.work / engine.__name__, self.work / "out.json"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        environment = getattr(engine, "environment", {})
        side = self.start(*engine.side[1:], environment=environment) if engine.side else None
        argv = ("-m", "tests.bench.ckpt.worker")
        end = (engine.__name__, folder, gib, out)
        saver = self.start(
            *argv, "save", *end, "--saves", 3, "--side", side.pid if side else 0, environment=environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            if saver.stdout.readline() != "READY\n":
                return {"error": "save failed, see the log"}
            figures = json.loads(out.read_text())
            saver.send_signal(signal.SIGKILL)
            saver.wait()
            out.unlink()
            if self.start(*argv, "restore", *end, environment=environment, stdout=subprocess.DEVNULL).wait(600):
                return {"error": "restore failed, see the log"}
            return {**figures, **json.loads(out.read_text())}
        finally:
            for process in (saver, side):
                if process is not None:
                    kill_session(process)
            shutil.rmtree(folder, ignore_errors=True)
            clear_memory()

    def overlap(self, gib):
        folder, out = self.work / "overlap", self.work / "overlap.json"
        steps = 10 if self.options.quick else 20
        process = self.start("-m", "tests.bench.ckpt.overlap", folder, gib, out, "--steps", steps)
        failed = process.wait(3600)
        shutil.rmtree(folder, ignore_errors=True)
        clear_memory()
        return {} if failed else json.loads(out.read_text())

    def peer(self, gib):
        out = self.work / "peer.json"
        giver = self.start("-m", "tests.bench.ckpt.peer", "give", gib, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ports = giver.stdout.readline().split()
        failed = self.start("-m", "tests.bench.ckpt.peer", "take", gib, out, *ports).wait(1800)
        kill_session(giver)
        clear_memory()
        return [] if failed else json.loads(out.read_text())


def kill_session(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def clear_memory():
    for path in Path("/dev/shm").glob("easyckpt-bench*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


# --------------------------------------------------------------------------------------------------------------- figures


def later(rounds, key):
    return [save[key] for one in rounds for save in one["saves"][1:] if save[key] is not None]


def median(values):
    return statistics.median(values) if values else None


def ratio(a, b):
    return round(a / b, 4) if a is not None and b else None


def summarize(results, overlap, peer, gib):
    """The figures of one size, by the names the targets have."""
    good = {name: [one for one in rounds if "saves" in one] for name, rounds in results.items()}
    stall = {name: median(later(rounds, "stall")) for name, rounds in good.items()}
    restore = {name: median([one["restore"] for one in rounds]) for name, rounds in good.items()}
    ours, floor = good["Ours"], stall["Floor"]
    size = ours[0]["bytes"] / 2**30 if ours else gib
    peers = [stall[name] for name in ("DLRover", "TorchCheckpointing", "DcpReused") if stall.get(name)]
    firsts = [one["saves"][0]["stall"] for one in good["OursMemory"]]
    wire = [(one["ours"], one["raw"] + one["floor"]) for one in peer]
    cpu = median(later(ours, "save_cpu"))
    return {
        "open_seconds_per_gib": round(median([one["open_seconds"] for one in ours]) / size, 3) if ours else None,
        "stall_overlapped_over_copy": ratio(overlap.get("stall_overlapped"), overlap.get("copy_seconds")),
        "stall_overlapped_ms_per_gib": round(overlap["stall_overlapped"] * 1000 / size, 3) if overlap else None,
        "stall_copy_over_floor": ratio(stall["OursMemory"], floor),
        "stall_copy_over_dcp_default": ratio(stall["OursMemory"], stall.get("DcpAsync")),
        "stall_copy_over_best_peer": ratio(stall["OursMemory"], min(peers, default=None)),
        "first_over_later": ratio(median(firsts), stall["OursMemory"]),
        "durable_cpu_seconds_per_gib": round(cpu / size, 3) if cpu else None,
        "durable_over_torch_save": ratio(median(later(ours, "durable")), median(later(good.get("TorchSave", []), "durable"))),
        "restore_shm_over_floor": ratio(restore["OursMemory"], restore["Floor"]),
        "torch_load_over_restore_shm": ratio(restore.get("TorchSave"), restore["OursMemory"]),
        "restore_peer_over_socket_and_floor": round(median([a / b for a, b in wire]), 4) if wire else None,
        "step_slowdown": round(overlap["step_slowdown"], 4) if overlap else None,
        "extra_memory": round(median([one["extra_memory"] for one in ours]), 3) if ours else None,
        "wrong": [one["wrong"] for rounds in good.values() for one in rounds if one.get("wrong")] + [one["wrong"] for one in peer if one["wrong"]],
    }  # fmt: skip


def table(results, gib):
    print(f"\n{gib} GiB, seconds, median [least-most] of later saves; cpu = CPU seconds of everything until it is done")
    columns = [
        "first",
        "stall",
        "cpu in stall",
        "cpu, whole save",
        "durable",
        "slowdown",
        "memory",
        "restore",
        "restored",
    ]
    print(f"{'engine':42}" + "".join(f"{column:>20}" for column in columns))
    for name, rounds in results.items():
        good = [one for one in rounds if "saves" in one]
        title = getattr(engines, name).name
        if not good:
            print(f"{title:42}  {rounds[0]['error'] if rounds else 'not installed'}")
            continue
        cells = [spread([one["saves"][0]["stall"] for one in good])]
        cells += [spread(later(good, key)) for key in ("stall", "stall_cpu", "save_cpu", "durable", "slowdown")]
        cells += [spread([one["extra_memory"] for one in good]), spread([one["restore"] for one in good])]
        cells.append("; ".join(sorted({one["wrong"] or f"step {one['step']}" for one in good})))
        print(f"{title:42}" + "".join(f"{cell:>20}" for cell in cells))


def spread(values):
    return f"{statistics.median(values):.3f} [{min(values):.3f}-{max(values):.3f}]" if values else "-"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="0.25 GiB, one round, floor, ours, DCP and torch.save")
    parser.add_argument("--gib", type=float, action="append", help="state size (default 1 and 4)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", help="interpreter that has the peers (default .venv-bench, else this one)")
    parser.add_argument("--work", default=str(ROOT), help="where checkpoints are written")
    options = parser.parse_args()
    bench, figures = Bench(options), {}
    chosen = engines.QUICK if options.quick else engines.ALL
    clear_memory()
    try:
        for gib in [0.25] if options.quick else options.gib or [1, 4]:
            results = {engine.__name__: [] for engine in chosen}
            present = [engine for engine in chosen if bench.installed(engine)]
            for number in range(1 if options.quick else options.rounds):
                for engine in present:
                    print(f"# {gib} GiB, round {number + 1}: {engine.name}", file=sys.stderr, flush=True)
                    results[engine.__name__].append(bench.save_and_restore(engine, gib))
            overlap, peer = bench.overlap(gib), bench.peer(gib)
            table(results, gib)
            figures[f"{gib} GiB"] = summarize(results, overlap, peer, gib)
            for name, value in figures[f"{gib} GiB"].items():
                print(f"  {name:40}{value}")
        print(json.dumps(figures))
    finally:
        log = bench.work / "log"
        if log.exists() and "Traceback" in log.read_text():
            print(log.read_text()[-4000:], file=sys.stderr)
        shutil.rmtree(bench.work)
        clear_memory()


if __name__ == "__main__":
    main()
