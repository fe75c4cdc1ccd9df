import time

import pytest

from aimaster.brain.diagnose import diagnose
from aimaster.catalogue import load
from aimaster.catalogue.findings import collect
from aimaster.catalogue.scan import LogScan
from aimaster.cli.diagnose import examine
from tests.fakes.failure_cases import judge, lay_out, load_cases, mutate

NOW = time.time()
HANDED = load_cases("failure_cases.jsonl")
OWN = load_cases("own_cases.jsonl")
SEEDS = range(1, 3)


@pytest.fixture(scope="module")
def catalogue():
    return load()


def verdict_of(case, folder, catalogue, *, newline="\n"):
    return examine((str(lay_out(case, folder, newline=newline)),), catalogue, now=NOW).verdict


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in HANDED + OWN])
def test_each_labelled_case_is_diagnosed(case, tmp_path, catalogue):
    """Category, culprit, fault and first action of each labelled case are right, and decoys are left alone."""
    assert judge(case, verdict_of(case, tmp_path, catalogue)) == dict.fromkeys(
        ("identified", "detail", "fault_of", "action"), True
    )


def test_mutated_cases_are_diagnosed_as_well(tmp_path, catalogue):
    """Other hosts, source line numbers, releases and orders of files change hardly any verdict."""
    cases = [mutate(case, seed) for case in HANDED + OWN for seed in SEEDS]
    assert len(cases) >= 120
    marks = {case["id"]: judge(case, verdict_of(case, tmp_path, catalogue)) for case in cases}
    right = [name for name, mark in marks.items() if mark["identified"] and mark["action"]]
    wrong = sorted(set(marks) - set(right))
    assert len(right) >= 0.98 * len(cases), wrong


def test_windows_line_ends_change_nothing(tmp_path, catalogue):
    """Logs that went through another system are read the same."""
    for case in OWN[:12]:
        assert judge(case, verdict_of(case, tmp_path, catalogue, newline="\r\n"))["identified"], case["id"]


def test_every_category_has_a_labelled_case():
    """The taxonomy is covered: each root category occurs in at least one case."""
    from aimaster.wire.health import CATEGORIES

    covered = {case["expected"]["category"] for case in HANDED + OWN}
    assert set(CATEGORIES) - covered == {"app.retryable", "unknown"}


def test_a_decoy_never_asks_for_an_action(tmp_path, catalogue):
    """False alarms: no decoy, mutated or not, asks for anything."""
    decoys = [case for case in HANDED + OWN if case["expected"]["category"] == "benign"]
    for case in decoys + [mutate(case, 7) for case in decoys]:
        assert verdict_of(case, tmp_path, catalogue).action == "ignore", case["id"]


def test_live_and_finished_logs_give_the_same_verdict(catalogue):
    """The lines of all logs arriving one by one, interleaved as time would have it, end in the verdict of the finished folder."""
    for case in HANDED + OWN:
        whole = [scan_of(catalogue, log, 1 << 20) for log in case["logs"]]
        dripped = [scan_of(catalogue, log, 1) for log in case["logs"]]
        one, two = (diagnose(collect(scans, catalogue.xids, now=NOW), NOW) for scans in (whole, dripped))
        assert (one.category, one.culprit, one.action, one.evidence) == (
            two.category,
            two.culprit,
            two.action,
            two.evidence,
        )


def scan_of(catalogue, log, lines_at_once):
    scan = LogScan(catalogue, node=log["node"], file=f"{log['node']}/{log['file']}")
    for at in range(0, len(log["lines"]), lines_at_once):
        scan.feed("".join(line + "\n" for line in log["lines"][at : at + lines_at_once]).encode())
    scan.finish()
    return scan


def test_loud_strangers_do_not_move_the_blame(tmp_path, catalogue):
    """Two more nodes full of echoes, before and after all others, without a single time: the root stays the root."""
    quiet = (
        "benign",
        "hang.unknown",
        "hang.straggler",
        "node.lost",
        "process.killed",
        "gpu.row_remap_pending",
        "sched.time_limit",
    )
    cases = [case for case in HANDED + OWN if case["expected"]["category"] not in quiet]
    moved = []
    for case in cases:
        louder = {**case, "id": f"{case['id']}-loud"}
        louder["logs"] = [
            {"node": "aa-victim", "file": "train.log", "lines": ECHOES},
            *case["logs"],
            {"node": "zz-victim", "file": "train.log", "lines": ECHOES * 3},
        ]
        if not judge(case, verdict_of(louder, tmp_path, catalogue))["identified"]:
            moved.append(case["id"])
    assert len(moved) <= 0.02 * len(cases), moved


ECHOES = """[rank99]: Traceback (most recent call last):
[rank99]:   File "/workspace/train.py", line 402, in train_step
[rank99]:     loss.backward()
[rank99]: torch.distributed.DistBackendError: NCCL error in: /pytorch/ProcessGroupNCCL.cpp:2251, remote process exited, NCCL version 2.26.2
[rank99]: ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.9.0.3]:41234. This is typically caused by
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
torch.distributed.elastic.multiprocessing.api.SignalException: Process 31 got signal: 15""".splitlines()
