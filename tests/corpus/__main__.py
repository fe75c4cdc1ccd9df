"""False alarms: real healthy jobs are run, and the signs may say nothing of their logs: `python -m tests.corpus`; the last line is JSON.

The jobs of sources.py run once and their logs are kept (`--fresh` runs them again). Their lines are counted, scanned as they are, judged as
`aimaster diagnose` judges a folder, and scanned again with other digits until a gigabyte has gone by.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from aimaster.catalogue import load
from aimaster.catalogue.scan import LogScan
from aimaster.cli.diagnose import examine
from tests.corpus import measure, sample, sources
from tests.corpus.environment import cache_folder

SHOWN = 60


def logs_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="how much goes past the signs in all")
    parser.add_argument("--scale", type=int, default=1, help="longer jobs: more distinct lines")
    parser.add_argument("--only", action="append", choices=list(sources.SOURCES), help="these sources only")
    parser.add_argument("--fresh", action="store_true", help="run the jobs again")
    parser.add_argument("--write-sample", action="store_true", help="renew the sample in tests/data")
    options = parser.parse_args()
    catalogue, counter = load(), measure.Counter()
    alarms: list[measure.Alarm] = []
    rows: dict[str, dict[str, object]] = {}
    files: list[Path] = []
    for name in options.only or sources.SOURCES:
        folder = cache_folder() / "logs" / name
        reason = sources.make(name, folder, scale=options.scale, fresh=options.fresh)
        if reason:
            rows[name] = {"absent": reason}
            continue
        own = logs_of(folder)
        files += own
        found = [
            one
            for path in own
            for one in measure.alarms(name, measure.scan_file(catalogue, path, str(path.relative_to(folder))))
        ]
        verdict = examine((str(folder),), catalogue, now=time.time()).verdict
        amount = counter.add(own)
        alarms += found
        rows[name] = {
            "files": len(own), "mb": round(amount.bytes / 1e6, 1), "distinct_mb": round(amount.distinct_bytes / 1e6, 1),
            "templates": amount.templates, "alarms": len(found), "verdict": verdict.category,
        }  # fmt: skip
    again = LogScan(catalogue, node=None, file="(with other digits)", count_lines=False)
    for block in measure.mutated(files, options.megabytes, seed=1):
        again.feed(block)
    again.finish()
    alarms += measure.alarms("all", again)
    if options.write_sample:
        sample.write({name: logs_of(cache_folder() / "logs" / name) for name in rows if "absent" not in rows[name]})
    report(rows, alarms, again.bytes_read)


def report(rows: dict[str, dict[str, object]], alarms: list[measure.Alarm], scanned: int) -> None:
    print(f"{'source':14} {'files':>5} {'MB':>8} {'distinct':>9} {'templates':>9} {'alarms':>6}  verdict")
    for name, row in rows.items():
        if "absent" in row:
            print(f"{name:14} {row['absent']}")
        else:
            print(
                f"{name:14} {row['files']:5} {row['mb']:8} {row['distinct_mb']:9} {row['templates']:9} {row['alarms']:6}  {row['verdict']}"
            )
    for alarm in alarms[:SHOWN]:
        print(f"ALARM {alarm.source} {alarm.sign} {alarm.role} {alarm.place}\n      {alarm.text}")
    here = [row for row in rows.values() if "absent" not in row]
    verdicts = {name: row["verdict"] for name, row in rows.items() if row.get("verdict") not in (None, "benign")}
    total = {key: round(sum(float(str(row[key])) for row in here), 1) for key in ("mb", "distinct_mb", "templates")}
    print(json.dumps({
        "mb": round(scanned / 1e6 + total["mb"], 1), "distinct_mb": total["distinct_mb"], "templates": int(total["templates"]),
        "above_benign": len(alarms), "verdicts_above_benign": verdicts, "alarm_lines": [f"{alarm.sign} {alarm.place} {alarm.text[:160]}" for alarm in alarms[:10]],
        "sources": rows,
    }))  # fmt: skip
    failed = any(str(row.get("absent", "")).startswith("FAILED") for row in rows.values())
    sys.exit(1 if alarms or verdicts or failed else 0)


if __name__ == "__main__":
    main()
