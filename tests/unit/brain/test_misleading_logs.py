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
