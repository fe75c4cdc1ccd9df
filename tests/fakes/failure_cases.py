"""Labelled failure cases: laid out as folders, mutated so that no sign can live on one line's luck, and judged as a person would."""

from __future__ import annotations

import copy
import json
import random
import re
from pathlib import Path
from typing import Any

from aimaster.wire.health import Verdict

DATA = Path(__file__).parent.parent / "data"
Case = dict[str, Any]


def load_cases(name: str) -> list[Case]:
    """Cases of one file of tests/data."""
    return [json.loads(line) for line in (DATA / name).read_text().splitlines() if line.strip()]


def lay_out(case: Case, root: Path, *, newline: str = "\n") -> Path:
    """The case's logs as FOLDER/NODE/FILE."""
    folder = root / case["id"]
    for log in case["logs"]:
        path = folder / (log["node"] or "unknown") / Path(log["file"]).name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="") as out:
            out.write(newline.join(log["lines"]) + newline)
    return folder


def judge(case: Case, got: Verdict) -> dict[str, bool]:
    """Which parts of a verdict are right."""
    want = case["expected"]
    culprit = want.get("culprit") or {}
    categories = {want["category"], *want.get("also_accept", [])}
    blames_none = want["category"] in ("benign", "hang.unknown")
    node = got.culprit.node is None if blames_none else culprit.get("node") in (None, got.culprit.node)
    gpus = {str(culprit.get("gpu")), *map(str, culprit.get("gpu_aliases", []))}
    ranks = {str(culprit.get("rank")), *map(str, culprit.get("rank_any") or [])}
    detail = (culprit.get("gpu") is None or str(got.culprit.gpu) in gpus) and (
        culprit.get("rank") is None or str(got.culprit.rank) in ranks
    )
    return {
        "identified": got.category in categories and node,
        "detail": detail,
        "fault_of": got.fault_of in {want.get("fault_of"), *want.get("fault_of_any", [])},
        "action": got.action == want["action"],
    }


def mutate(case: Case, seed: int) -> Case:
    """The same failure on other hosts, other source line numbers, other release, files in another order."""
    dice = random.Random(f"{case['id']}-{seed}")
    changed = copy.deepcopy(case)
    changed["id"] = f"{case['id']}-m{seed}"
    names = _new_names(case, dice)
    for log in changed["logs"]:
        log["node"] = names.get(log["node"], log["node"])
        log["lines"] = [_mutate_line(line, names, dice) for line in log["lines"]]
    culprit = changed["expected"]["culprit"]
    culprit["node"] = names.get(culprit.get("node"), culprit.get("node"))
    dice.shuffle(changed["logs"])
    for number, log in enumerate(changed["logs"]):
        if not re.search(r"gcs_server|rank\d", log["file"]):
            log["file"] = f"{'zyxwvutsrq'[number % 10]}-{Path(log['file']).name}"
    return changed


def _new_names(case: Case, dice: random.Random) -> dict[str, str]:
    """node-3 becomes gpu-a17: only names of the plain kind, so that addresses and roles keep their meaning."""
    old = {log["node"] for log in case["logs"]} | {(case["expected"].get("culprit") or {}).get("node")}
    text = "\n".join(line for log in case["logs"] for line in log["lines"])
    old |= set(re.findall(r"\b(?:node|worker)-\d+\b", text))
    stem = dice.choice(("gpu-a", "dlc-worker-", "h200-", "trn"))
    numbers = dice.sample(range(10, 90), 60)
    plain = sorted(name for name in old if name and re.fullmatch(r"(?:node|worker)-\d+", name))
    return {name: f"{stem}{numbers.pop()}" for name in plain}


def _mutate_line(line: str, names: dict[str, str], dice: random.Random) -> str:
    for old, new in names.items():
        line = re.sub(rf"(?<![\w-]){re.escape(old)}(?![\w-])", new, line)
    line = re.sub(r"(\.(?:cpp|cc|hpp|h|py)):\d+", lambda hit: f"{hit[1]}:{dice.randrange(20, 4000)}", line)
    line = re.sub(r"python3\.\d+", f"python3.{dice.randrange(9, 14)}", line)
    return re.sub(r"0x7f[0-9a-f]{6,}", lambda _: f"0x7f{dice.randrange(1 << 40):010x}", line)
