"""Whole folders of logs in which the loudest words are not the reason, read as a user would have them read."""

import time

import pytest

from aimaster.catalogue import load
from aimaster.cli.diagnose import examine, exit_code

STEPS = "2026-11-29 09:56:00 step 1\n2026-11-29 10:00:50 step 2\n2026-11-29 10:01:20 step 3\n"
LOST = "n3 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=777, name=python, GPU has fallen off the bus.\n"
KILL = "n1 kernel: Out of memory: Killed process 777 ({}) total-vm:100kB, anon-rss:90kB, file-rss:0kB, UID:5\n"


def traceback_of(error, prefix=""):
    lines = ["Traceback (most recent call last):", '  File "/app/train.py", line 7, in main', "    f()", error]
    return "".join(f"{prefix}{line}\n" for line in lines)


FAILED = STEPS + traceback_of("KeyError: 'z'", "2026-11-29 10:01:30 [rank0]: ")


@pytest.fixture(scope="module")
def catalogue():
    return load()


@pytest.fixture
def read(tmp_path, catalogue):
    def read(files, **window):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        report = examine((str(tmp_path),), catalogue, now=time.time(), **window)
        return report, exit_code(report.verdict, report)

    return read


@pytest.mark.parametrize(
    "error",
    [
        "TimeoutError: timed out",
        "asyncio.exceptions.CancelledError",
        "ray.exceptions.GetTimeoutError: Get timed out: some object(s) not ready.",
        "torch.distributed.DistBackendError: NCCL error in: a.cpp:1275, unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment",
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
        "RuntimeError: No CUDA GPUs are available",
    ],
)
@pytest.mark.parametrize("before", [STEPS, ""])
def test_a_log_that_ends_in_a_traceback_tells_of_a_failure(read, error, before):
    """Whatever was raised, and whether or not there were steps: nobody caught it, and another node's steps do not undo it."""
    _, code = read({"n1/t.log": before + traceback_of(error), "n2/t.log": STEPS + "2026-11-29 10:02:00 step 4\n"})
    assert code in (1, 3)


def test_a_caught_time_out_is_none(read):
    """Steps after it in the same log tell that it was caught."""
    log = STEPS + traceback_of("TimeoutError: timed out") + "2026-11-29 10:02:00 step 4\n2026-11-29 10:02:30 step 5\n"
    assert read({"n1/t.log": log})[1] == 0


@pytest.mark.parametrize("when", ["Nov 22 10:00:20", "Nov 28 08:00:20", "Nov 29 08:00:20", "Nov 29 09:55:20"])
def test_an_old_hardware_error_is_not_the_reason(read, when):
    """A GPU that was lost before its node made these steps is a matter of the past; alone, it is no failure."""
    verdict = read({"n1/t.log": FAILED, "n3/kern.log": f"{when} {LOST}", "n3/t.log": STEPS})[0].verdict
    assert (verdict.category, verdict.culprit.node) == ("app.exception", "n1")
    assert read({"n1/t.log": STEPS})[1] == 0


def test_an_old_hardware_error_of_a_node_without_steps_is_not_the_reason(read):
    """The job stepped on for days after it."""
    verdict = read({"n1/t.log": FAILED, "n3/kern.log": f"Nov 22 10:00:20 {LOST}"})[0].verdict
    assert (verdict.category, verdict.culprit.node) == ("app.exception", "n1")


def test_a_hardware_error_of_the_time_of_the_failure_stays_the_reason(read):
    """Steps shortly after it may have been flushed late."""
    verdict = read({"n1/t.log": FAILED, "n3/kern.log": f"Nov 29 10:01:15 {LOST}", "n3/t.log": STEPS})[0].verdict
    assert (verdict.category, verdict.culprit.node) == ("gpu.lost", "n3")


def test_a_strangers_memory_kill_is_not_the_reason(read):
    """A process that no log of the job knows was killed, and the node's steps went on."""
    verdict = read({"n1/t.log": FAILED, "n1/kern.log": "Nov 29 10:00:55 " + KILL.format("java")})[0].verdict
    assert (verdict.category, verdict.culprit.rank, verdict.culprit.pid) == ("app.exception", 0, None)


def test_the_jobs_own_memory_kill_stays_the_reason(read):
    """A killed Python process of the job explains what its rank said."""
    verdict = read({"n1/t.log": FAILED, "n1/kern.log": "Nov 29 10:01:25 " + KILL.format("python")})[0].verdict
    assert verdict.category == "node.oom_host"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"\0" + text.encode(),
        lambda text: b"\0" * 3000 + text.encode(),
        lambda text: text.encode().replace(b"step 2\n", b"step 2\n" + b"\0" * 500),
        lambda text: text.encode("utf-16"),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
    ],
)
@pytest.mark.parametrize("log", [FAILED, FAILED.removeprefix(STEPS)])
def test_a_damaged_beginning_hides_no_log(read, damage, log):
    """NULs that a crash or a truncation left, UTF-16 and byte order marks are read through."""
    report, code = read({"n1/t.log": damage(log)})
    assert (report.verdict.category, report.verdict.culprit.rank, code) == ("app.exception", 0, 1)
    assert "f()" in report.verdict.traceback


def test_what_is_skipped_is_said(read):
    """Binary files, by their bytes or by their names."""
    report, _ = read({"n1/t.log": FAILED, "n1/odd.log": bytes(range(256)) * 40, "n1/model.pt": b"x"})
    assert [problem.name.split(" of ")[0] for problem in report.problems] == ["1 file", "1 file"]
    assert "odd.log" in report.problems[-1].why


def test_only_the_heading_of_a_traceback_may_be_stamped(read):
    """A time before `[rank1]:` on the first of its lines only."""
    verdict = read({"n2/r.log": "2026-11-29 10:00:30 " + traceback_of("KeyError: 'z'", "[rank1]: ")})[0].verdict
    assert (verdict.category, verdict.culprit.node, verdict.culprit.rank) == ("app.exception", "n2", 1)


def test_a_window_without_a_word_tells_nothing(read):
    """It is no good news that nothing was said in a time of which there is no log."""
    report, code = read({"n1/t.log": FAILED}, since=1.0, until=2.0)
    assert code == 3
    assert "nothing in the window" in report.verdict.summary


RESET = "2026-11-29 10:01:31 [rank0]: RuntimeError: [/g/gloo/transport/tcp/pair.cc:525] Read error [10.0.0.2]:1234: Connection reset by peer\n"


def test_who_complains_of_a_peer_is_not_to_blame(read):
    """A lost connection alone names nobody; a node whose log ends with Killed is named."""
    verdict = read({"n1/t.log": STEPS + RESET, "n2/t.log": STEPS})[0].verdict
    assert (verdict.category, verdict.culprit.node) == ("unknown", None)
    verdict = read({"n2/t.log": STEPS + "2026-11-29 10:01:30 Killed\n"})[0].verdict
    assert (verdict.category, verdict.culprit.node) == ("process.killed", "n2")


REPORT = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Failures:
[1]:
  time      : 2026-11-29_10:00:00
  host      : host1
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 11)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_10:00:00
  host      : host2
  rank      : 9 (local_rank: 1)
  exitcode  : 7 (pid: 12)
============================================================
"""


def test_the_first_failure_of_a_launchers_report_is_named(read):
    """An ordinary exit code tells no cause, but the report tells who it was."""
    report, code = read({"log": REPORT})
    culprit = report.verdict.culprit
    assert (culprit.node, culprit.rank, culprit.pid, code) == ("host2", 9, 12, 3)


def test_an_interrupt_from_the_keyboard_is_somebodys_wish(read):
    """It asks for no more time, and its line is shown once."""
    verdict = read({"log": "step 5\n^C" + traceback_of("KeyboardInterrupt")})[0].verdict
    assert (verdict.fault_of, verdict.action, len(verdict.evidence)) == ("user_code", "stop_job", 1)
    assert "more time" not in verdict.advice


def test_the_rank_that_waited_for_nobody_is_the_one_that_never_came(read):
    """All others timed out in the same collective, and it only heard of that."""
    wait = (
        "[rank{0}]:[E1129 10:10:00.003 ProcessGroupNCCL.cpp:629] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=52, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, Timeout(ms)=600000) ran for 600029 milliseconds\n"
    )
    heard = (
        "[rank3]:[E1129 10:10:01.033 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0(default_pg) Rank 3] "
        "Observed flight recorder dump signal from another rank via TCPStore.\n"
    )
    logs = {
        "n0/t.log": "".join(wait.format(rank) for rank in range(3)),
        "n1/t.log": "2026-11-29 09:59:00 step 51\n" + heard,
    }
    verdict = read(logs)[0].verdict
    assert (verdict.category, verdict.culprit.node, verdict.culprit.rank) == ("hang.straggler", "n1", 3)


def test_a_cluster_names_pod_and_node(read):
    """`describe` names the node, an eviction its pod; an old pod that is stopped is no failure."""
    described = (
        "Name:         w-2\nNode:         gpu-node-7/10.0.0.7\n      Reason:       OOMKilled\n      Exit Code:    137\n"
    )
    assert read({"describe.txt": described})[0].verdict.culprit.node == "gpu-node-7"
    evicted = (
        "2m  Warning  Evicted  pod/w-3  The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi.\n"
    )
    assert read({"describe.txt": evicted})[0].verdict.culprit.node == "w-3"
    assert read({"describe.txt": "1s  Normal  Killing  pod/old-1  Stopping container main\n"})[1] == 0


def test_the_launcher_tells_where_a_task_without_a_rank_ran(read):
    """Only tasks of one node ended badly: what was said in their log was said there."""
    log = (
        traceback_of("RuntimeError: No CUDA GPUs are available")
        + "srun: error: node17: task 0: Exited with exit code 1\n"
    )
    assert read({"slurm.out": log})[0].verdict.culprit.node == "node17"
