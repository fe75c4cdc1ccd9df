"""Does the runtime learn? The embedded default on fresh seeds, and once with the rewards of each batch dealt at random.

    python -m tests.bench.learning [--seeds 11 12 13] [--control-seed 14] [--steps N]

Reward is the mean over 256 held-out prompts at temperature 1, before (after the warm start) and after. Passes when it rises by at
least 0.3 for each seed and does not rise in the control. Prints a table, and one JSON object as its very last line.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.flow.jobs import audit, job

EXAMPLE = "examples/tiny.toml"
RISE = 0.3
NO_RISE = 0.05
"""Twice the sampling error of a mean of 256 rewards near 0.2."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="*", default=[11, 12, 13])
    parser.add_argument("--control-seed", type=int, default=14)
    parser.add_argument("--steps", type=int, help="default: the example's own")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        for seed in options.seeds:
            rows.append(run(Path(folder) / f"seed-{seed}", seed, options.steps))
        rows.append(
            run(Path(folder) / "control", options.control_seed, options.steps, "--aimaster.shuffle_rewards", "true")
        )
    *learnt, control = rows
    passed = all(row["rise"] >= RISE for row in learnt) and control["rise"] <= NO_RISE
    print(f"{'run':<12}{'steps':>7}{'before':>9}{'after':>9}{'rise':>9}{'seconds':>9}")
    for name, row in zip([*(f"seed {seed}" for seed in options.seeds), "shuffled"], rows, strict=True):
        print(
            f"{name:<12}{row['steps']:>7}{row['before']:>9.3f}{row['after']:>9.3f}{row['rise']:>9.3f}{row['seconds']:>9.1f}"
        )
    print(json.dumps({"passed": passed, "learnt": learnt, "control": control}))
    return 0 if passed else 1


def run(folder: Path, seed: int, steps: int | None, *more: str) -> dict[str, Any]:
    """One whole run; its figures."""
    length = ("--train.max_num_steps", str(steps)) if steps else ()
    with job(folder, EXAMPLE, "--aimaster.seed", str(seed), *length, *more) as one:
        code = one.wait(seconds=1800)
        if code != 0:
            raise RuntimeError(f"the run ended with {code}\n{one.story()}")
        summary = json.loads(one.places.summary.read_bytes())
    report = audit(folder)
    if report["lost"] or report["duplicate"]:
        raise RuntimeError(f"the ledger does not add up: {report}")
    before, after = summary["reward_before"], summary["reward_after"]
    return {
        "seed": seed,
        "steps": summary["steps"],
        "before": before,
        "after": after,
        "rise": round(after - before, 4),
        "seconds": summary["seconds"],
    }


if __name__ == "__main__":
    sys.exit(main())
