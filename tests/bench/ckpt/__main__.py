"""`make bench-ckpt`: easyckpt beside its peers in one interleaved run, each engine in fresh processes, SIGKILL between save and restore.

python -m tests.bench.ckpt [--quick] [--gib 1 --gib 4] [--rounds 3] [--no-ranks] [--engines A,B]; tables for people, the last line one JSON object.
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.ckpt import figures, measure
from tests.bench.ckpt.figures import Target, later
from tests.bench.ckpt.registry import ALL, BY_NAME, LARGE, QUICK

ROOT = Path(__file__).resolve().parents[3]
WORKER_SECONDS = 1800
RANKS = 2
COLUMNS = (
    "first",
    "stall",
    "cpu in stall",
    "cpu, whole save",
    "durable",
    "slowdown",
    "memory",
    "restore",
    "cpu in restore",
    "cold",
    "restored",
)


class Bench:
    """One run: its folder, its interpreter, the processes it starts."""

    def __init__(self, options):
        self.options = options
        self.python = options.python
        self.work = Path(tempfile.mkdtemp(prefix="easyckpt-bench-", dir=options.work))
        self.log = (self.work / "log").open("a")
        self.environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TQDM_DISABLE": "1",
        }  # fmt: skip

    def start(self, *argv, environment=None, **options):
        return subprocess.Popen(
            [self.python, *map(str, argv)], env={**self.environment, **(environment or {})}, cwd=ROOT, text=True,
            stderr=self.log, start_new_session=True, **options,
        )  # fmt: skip

    def installed(self):
        """Names of the engines that the interpreter can import, asked once."""
        code = "from tests.bench.ckpt.registry import ALL; print(*(one.__name__ for one in ALL if one.installed()))"
        process = self.start("-c", code, stdout=subprocess.PIPE)
        return process.communicate(timeout=WORKER_SECONDS)[0].split()

    def save_and_restore(self, engine, gib):
        """One engine, one round: the figures of its processes, or an error."""
        folder, out = self.work / engine.__name__, self.work / "out.json"
        folder.mkdir()
        side = self.start(*engine.side, environment=engine.environment) if engine.side else None
        argv = ("-m", "tests.bench.ckpt.worker")
        end = (engine.__name__, folder, gib, out)
        saves = self.options.saves if engine.durable else 2 * self.options.saves
        saver = self.start(
            *argv, "save", *end, "--saves", saves, "--side", side.pid if side else 0,
            environment=engine.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            if not any(line == "READY\n" for line in saver.stdout):
                return {"error": "save failed, see the log"}
            found = json.loads(out.read_text())
            saver.send_signal(signal.SIGKILL)
            saver.wait()
            for temperature in ("", "_cold")[: 1 + engine.cold]:
                if temperature:
                    measure.drop_cache(str(folder))
                out.unlink()
                reader = self.start(*argv, "restore", *end, environment=engine.environment, stdout=subprocess.DEVNULL)
                if reader.wait(WORKER_SECONDS):
                    return {"error": "restore failed, see the log"}
                back = json.loads(out.read_text())
                stale = "" if back["step"] == found["last"] else f"step {back['step']} instead of {found['last']}"
                found |= {f"restore{temperature}": back["restore"], f"restore_cpu{temperature}": back["restore_cpu"]}
                found["wrong"] = found.get("wrong") or back["wrong"] or stale
            return found
        except (subprocess.TimeoutExpired, OSError, ValueError) as error:
            return {"error": str(error)}
        finally:
            for process in (saver, side):
                if process is not None:
                    kill_session(process)
            shutil.rmtree(folder, ignore_errors=True)
            for leftover in self.work.glob("out.json*"):
                leftover.unlink()
            clear_memory()

    def overlap(self, gib):
        folder, out = self.work / "overlap", self.work / "overlap.json"
        argv = ("-m", "tests.bench.ckpt.overlap", folder, gib, out, "--blocks", self.options.blocks)
        done = all_ended_well([self.start(*argv)])
        shutil.rmtree(folder, ignore_errors=True)
        clear_memory()
        return json.loads(out.read_text()) if done else {}

    def wire(self, gib):
        out = self.work / "wire.json"
        module = ("-m", "tests.bench.ckpt.wire")
        giver = self.start(*module, "give", gib, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        ports = giver.stdout.readline().split()
        done = all_ended_well([self.start(*module, "take", gib, out, *ports)])
        kill_session(giver)
        clear_memory()
        return json.loads(out.read_text()) if done else []

    def ranks(self, gib):
        folder, out = self.work / "ranks", self.work / "ranks.json"
        folder.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        argv = ("-m", "tests.bench.ckpt.ranks", folder, gib, out)
        processes = [
            self.start(*argv, environment={**where, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(RANKS)
        ]
        done = all_ended_well(processes)
        shutil.rmtree(folder, ignore_errors=True)
        clear_memory()
        return json.loads(out.read_text()) if done else {}

    def close(self):
        self.log.close()
        text = (self.work / "log").read_text()
        if "Traceback" in text:
            print(text[-4000:], file=sys.stderr)
        shutil.rmtree(self.work)
        clear_memory()


def all_ended_well(processes):
    """Within the time; none is left behind."""
    try:
        return all(process.wait(WORKER_SECONDS) == 0 for process in processes)
    except subprocess.TimeoutExpired:
        return False
    finally:
        for process in processes:
            kill_session(process)


def kill_session(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def clear_memory():
    """What killed engines leave in memory."""
    for path in Path("/dev/shm").glob("*easyckpt-bench*"):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------- tables


def spread(values):
    values = sorted(values)
    return f"{figures.median(values):.3f} [{values[0]:.3f}-{values[-1]:.3f}]" if values else "-"


def table(results, gib):
    print(
        f"\n{gib:g} GiB, one process: seconds, median [least-most] of later saves; cpu = CPU seconds of everything until done"
    )
    print(f"{'engine':52}" + "".join(f"{column:>22}" for column in COLUMNS))
    for name, rounds in results.items():
        good = [one for one in rounds if "error" not in one]
        if not good:
            print(f"{BY_NAME[name].name:52}  {rounds[0]['error'] if rounds else 'not installed'}")
            continue
        cells = [spread([one["saves"][0]["stall"] for one in good])]
        cells += [spread(later(good, key)) for key in ("stall", "stall_cpu", "save_cpu", "durable", "slowdown")]
        cells += [
            spread([one[key] for one in good if key in one])
            for key in ("extra_memory", "restore", "restore_cpu", "restore_cold")
        ]
        cells.append("; ".join(sorted({one["wrong"] or "whole" for one in good})))
        print(f"{BY_NAME[name].name:52}" + "".join(f"{cell:>22}" for cell in cells))


def ranks_table(found):
    about = f"{found['bytes_a_rank'] / 2**20:.0f} MiB and {found['tensors']} tensors a rank"
    print(f"\n{RANKS} gloo ranks with FSDP2, {about}: seconds of the slowest rank, median [least-most] of later saves")
    columns = ("first", "stall", "cpu in stall", "complete", "restore", "cpu in restore", "restored")
    print(f"{'engine':58}" + "".join(f"{column:>22}" for column in columns))
    for name, rounds in found["engines"].items():
        cells = [spread([rounds[0]["stall"]])]
        cells += [
            spread([one[key] for one in rounds[1:]])
            for key in ("stall", "stall_cpu", "complete", "restore", "restore_cpu")
        ]
        cells.append("; ".join(sorted({one["wrong"] or "whole" for one in rounds})))
        print(f"{name:58}" + "".join(f"{cell:>22}" for cell in cells))


def verdicts(values: dict, wanted: dict[str, Target]):
    """Each figure beside its target."""
    for name, value in values.items():
        target = wanted.get(name)
        verdict = "" if target is None or value is None else "meets" if target.is_met(value) else "MISSES"
        shown = "not measured" if value is None else f"{value:.4g}"
        print(f"  {name:42}{shown:>14}   {verdict:7}{target if target is not None else ''}")


def run(bench, options):
    present = set(bench.installed())
    document, load = {}, os.getloadavg()[0]
    for gib in options.gib:
        chosen = options.engines or (QUICK if options.quick else LARGE if gib >= 4 else ALL)
        results = {engine.__name__: [] for engine in chosen}
        for number in range(options.rounds):
            for engine in (one for one in chosen if one.__name__ in present):
                started = time.monotonic()
                found = bench.save_and_restore(engine, gib)
                results[engine.__name__].append(found)
                said = found.get("error") or found["wrong"] or f"{time.monotonic() - started:.0f} s"
                print(
                    f"# {gib:g} GiB, round {number + 1} of {options.rounds}: {engine.name}: {said}",
                    file=sys.stderr,
                    flush=True,
                )
        print(f"# {gib:g} GiB: overlapped steps, then a peer over loopback", file=sys.stderr, flush=True)
        overlap, wire = bench.overlap(gib), bench.wire(gib)
        table(results, gib)
        values = figures.of_one_process(results, overlap, wire, gib)
        verdicts(values, figures.targets(gib))
        document[f"{gib:g} GiB"] = values
    if options.ranks:
        print(f"# {RANKS} ranks", file=sys.stderr, flush=True)
        found = bench.ranks(options.ranks_gib)
        if found:
            ranks_table(found)
        values = figures.of_ranks(found) if found else {}
        verdicts(values, figures.RANKS_TARGETS)
        document[f"{RANKS} ranks"] = values
    print(json.dumps({**document, "load_average": [round(one, 1) for one in (load, os.getloadavg()[0])]}))


def folder(text):
    if not os.access(text, os.W_OK) or not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is no folder that can be written to")
    return text


def engines(text):
    names = text.split(",")
    if unknown := [name for name in names if name not in BY_NAME]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(BY_NAME)}")
    return [BY_NAME[name] for name in names]


def at_least(least, kind=int):
    """A number from `least` on; for a size, one above 0."""

    def number(text):
        value = kind(text)
        if not (math.isfinite(value) and value >= least) or (kind is float and value == 0):
            raise argparse.ArgumentTypeError(f"{text} is out of range")
        return value

    return number


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="0.25 GiB, one round, floor, ours, DCP and torch.save: a minute"
    )
    parser.add_argument(
        "--gib", type=at_least(0, float), action="append", help="state size, may be given again (default 1 and 4)"
    )
    parser.add_argument("--rounds", type=at_least(1), help="processes an engine and size (default 3)")
    parser.add_argument(
        "--saves", type=at_least(2), default=3, help="saves a process, twice as many where only memory is written"
    )
    parser.add_argument(
        "--blocks", type=at_least(0), help="blocks of five steps that show the slowdown (default 4; 0: none)"
    )
    parser.add_argument("--engines", type=engines, help="only these")
    parser.add_argument(
        "--ranks", action=argparse.BooleanOptionalAction, help="two ranks with FSDP2 (default: unless quick)"
    )
    parser.add_argument("--ranks-gib", type=at_least(0, float), default=1.0, help="state size over both ranks")
    bench_python = ROOT / ".venv-bench/bin/python"
    parser.add_argument(
        "--python", default=str(bench_python) if bench_python.exists() else sys.executable,
        help="interpreter that has the peers (default .venv-bench, else this one)",
    )  # fmt: skip
    parser.add_argument("--work", type=folder, default=str(ROOT), help="where checkpoints are written")
    options = parser.parse_args(argv)
    if shutil.which(options.python) is None:
        parser.error(f"argument --python: {options.python} is not there")
    options.gib = options.gib or ([0.25] if options.quick else [1, 4])
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.blocks = (2 if options.quick else 4) if options.blocks is None else options.blocks
    options.ranks = not options.quick if options.ranks is None else options.ranks
    bench = Bench(options)
    clear_memory()
    try:
        run(bench, options)
    finally:
        bench.close()


if __name__ == "__main__":
    main()
