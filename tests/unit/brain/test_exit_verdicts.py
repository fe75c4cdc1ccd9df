import signal

import pytest
from msgspec.structs import replace

from aimaster.brain.diagnose import from_exit
from aimaster.catalogue import load
from aimaster.wire.health import REFUSED, Finding, Subject, refusal

CATALOGUE = load()
TRACE = """step 3
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
  File "train.py", line 5, in main
    return batch["labels"]
KeyError: 'labels'
"""
GLOO = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    dist.all_reduce(x)
RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:41234. This is typically caused by a remote worker crashing
"""


def said(*lines):
    return [match.finding(node="n1") for line in lines for match in CATALOGUE.match(line)]


def verdict(exit_code=None, number=None, lines=(), tail=""):
    return from_exit("policy-1", "n1", 8, 812, exit_code, number, said(*lines), log_tail=tail, now=5.0)


def test_the_users_exception_stops_the_job_with_rank_and_traceback():
    """An exception of the program is the user's: stop_job, with rank, pid and the traceback."""
    got = verdict(1, tail=TRACE)
    assert (got.category, got.fault_of, got.action) == ("app.exception", "user_code", "stop_job")
    assert (got.culprit.rank, got.culprit.pid) == (8, 812)
    assert got.traceback.startswith("Traceback")
    assert got.traceback.endswith("KeyError: 'labels'")
    assert "KeyError: 'labels'" in got.summary


@pytest.mark.parametrize(
    ("code", "number"), [(None, signal.SIGKILL), (None, signal.SIGTERM), (-9, None), (137, None), (143, None)]
)
def test_a_kill_without_a_word_is_worth_another_try(code, number):
    """SIGKILL and SIGTERM from outside say nothing about the process: restart it."""
    got = verdict(code, number)
    assert (got.category, got.fault_of, got.action) == ("process.killed", "transient", "restart_process")


def test_a_victim_of_a_dead_peer_is_never_the_root():
    """gloo's error after a peer died is an echo, even with a traceback and exit code 1."""
    got = verdict(1, lines=GLOO.splitlines(), tail=GLOO)
    assert got.action == "restart_process"
    assert got.category == "process.killed"
    assert got.confidence < 0.5


ABORT = '{"ts":"2026-01-05T10:00:00Z","event":"reduction failed","reason":"gloo: Connection closed by peer [127.0.0.1]:41234"}'


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_old_echo_does_not_explain_a_kill(number):
    """A reduction that was aborted 180 steps earlier is still in the log's tail: the member had lived through it."""
    echoes = [replace(one, time_seconds=5.0 - 180.0) for one in said(*GLOO.splitlines())]
    assert echoes
    got = from_exit("policy-1", "n1", 1, 812, None, number, echoes, log_tail=ABORT, now=5.0)
    assert (got.category, got.fault_of, got.action) == ("process.killed", "transient", "restart_process")
    assert "peer" not in got.summary


def test_a_sigkill_has_no_echo_however_fresh():
    """It comes from outside, whatever the process said a moment before."""
    fresh = [replace(one, time_seconds=4.5) for one in said(*GLOO.splitlines())]
    assert "peer" not in from_exit("p", "n1", 1, 812, None, signal.SIGKILL, fresh, log_tail=GLOO, now=5.0).summary
    assert "peer" in from_exit("p", "n1", 1, 812, None, signal.SIGABRT, fresh, log_tail=GLOO, now=5.0).summary


@pytest.mark.parametrize(
    "lived_through", [{"time_seconds": -200.0}, {"severity": "info"}, {"details": {"steps_after": "3"}}]
)
def test_an_echo_counts_only_as_the_last_word(lived_through):
    """Not when it is old, was logged as a warning, or steps were reported after it."""
    echoes = [replace(one, **lived_through) for one in said(*GLOO.splitlines())]
    assert from_exit("p", "n1", 1, 812, 3, None, echoes, log_tail="step 9\n", now=5.0).category == "unknown"
    assert from_exit("p", "n1", 1, 812, 1, None, echoes, log_tail=TRACE, now=5.0).category == "app.exception"


def test_the_self_fence_is_a_hang_not_an_exception():
    """faulthandler's dump with exit 1 means no progress."""
    got = verdict(
        1, tail='Timeout (0:05:00)!\nThread 0x7f (most recent call first):\n  File "train.py", line 5 in load\n'
    )
    assert (got.category, got.action) == ("hang.straggler", "restart_process")


@pytest.mark.parametrize(
    ("line", "code", "category"),
    [
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 5 has a total capacity",
            1,
            "app.cuda_oom",
        ),
        ("MemoryError: Unable to allocate 3.2 GiB", 1, "node.oom_host"),
        ("OSError: [Errno 28] No space left on device", 1, "node.disk_full"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", 1, "gpu.ecc"),
        ("train.py: error: unrecognized arguments: --foo", 2, "app.config"),
    ],
)
def test_its_own_last_words_decide(line, code, category):
    """A sign in the member's log names the category."""
    assert verdict(code, lines=[line], tail=TRACE).category == category


@pytest.mark.parametrize(
    ("number", "category"),
    [(signal.SIGSEGV, "app.segfault"), (signal.SIGBUS, "app.segfault"), (signal.SIGILL, "app.segfault")],
)
def test_a_crash_signal_names_its_category(number, category):
    """Each is a crash of native code; SIGBUS alone does not say that /dev/shm is full."""
    assert verdict(None, number).category == category


def test_the_kernels_word_on_the_victim_outweighs_the_bare_signal():
    """An OOM line for this pid beside SIGKILL is the memory limit."""
    line = "kernel: Memory cgroup out of memory: Killed process 812 (python) total-vm:1kB, anon-rss:1kB"
    got = verdict(None, signal.SIGKILL, lines=[line])
    assert (got.category, got.action) == ("node.oom_cgroup", "stop_job")


@pytest.mark.parametrize(("code", "number"), [(None, signal.SIGKILL), (137, None), (-9, None)])
def test_a_kill_fifteen_seconds_after_an_echo_is_a_kill(code, number):
    """An aborted reduction stands in the log's last lines: the kill that came later has nothing to do with it."""
    echoes = [replace(one, time_seconds=5.0 - 15.0) for one in said(*GLOO.splitlines())]
    got = from_exit("policy-0", "n1", 0, 812, code, number, echoes, log_tail=GLOO + ABORT, now=5.0)
    assert "SIGKILL, and said nothing itself" in got.summary
    assert "victim" not in got.summary


def test_an_end_that_nobody_saw_is_no_exception_of_the_users():
    """Without exit code and signal a traceback in the log may be one that it lived through: unknown, the platform's, once more."""
    got = verdict(None, lines=TRACE.splitlines(), tail=TRACE)
    assert (got.category, got.fault_of, got.action) == ("unknown", "platform", "restart_process")
    assert "None" not in got.summary
    full = verdict(None, lines=["OSError: [Errno 28] No space left on device"], tail=TRACE)
    assert (full.category, full.action) == ("node.disk_full", "stop_job")
    assert "None" not in full.summary


@pytest.mark.parametrize(
    "line",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: '/dev/shm/aimaster-0badcafe-node-0/progress/policy-0'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/run/nodes/node-0/members/policy-0/stacks.txt'",
        "aimaster.telemetry.tokens.TokenFileError: there is no token file /data/run/token; `aimaster run` makes one",
    ],
)
def test_files_of_the_run_taken_from_under_a_member_are_no_fault_of_the_program(line):
    """A node folder or the token deleted under it: the platform's, and worth another start; the user's own missing file is the user's."""
    trace = TRACE.replace("KeyError: 'labels'", line)
    got = verdict(1, lines=trace.splitlines(), tail=trace)
    assert (got.category, got.fault_of, got.action) == ("unknown", "platform", "restart_process")
    own = TRACE.replace(
        "KeyError: 'labels'", "FileNotFoundError: [Errno 2] No such file or directory: '/data/tokenizer.json'"
    )
    assert verdict(1, lines=own.splitlines(), tail=own).action == "stop_job"


def test_the_pid_of_a_launchers_rank_is_what_the_launcher_reports():
    """torchrun (pid 812) names rank 1 as pid 4175: the two are never mixed; without a report no pid is told."""
    raised = Finding(
        sign="python.exception",
        category="app.exception",
        role="self",
        weight=70,
        subject=Subject(rank=1),
        details={"exception": "KeyError", "message": "'labels'"},
    )
    report = Finding(
        sign="torch.elastic-entry", category="unknown", role="follower", weight=18, subject=Subject(rank=1, pid=4175)
    )
    launcher = {"member": "command-0", "node": "n1", "rank": None, "pid": 812, "exit_code": 1, "signal": None}
    assert from_exit(**launcher, log_findings=[raised, report], now=5.0).culprit == Subject(node="n1", rank=1, pid=4175)
    assert from_exit(**launcher, log_findings=[raised], now=5.0).culprit == Subject(node="n1", rank=1, pid=None)


def test_a_refusal_is_the_end_and_its_own_sentence():
    """Another start would end the same way: the job stops with what the member said, whatever echoes its log holds."""
    tail = GLOO + refusal("data.corrupt", "record 3 of ledger/1.journal is damaged; restore the file")
    got = verdict(REFUSED, lines=GLOO.splitlines(), tail=tail)
    assert (got.category, got.action, got.fault_of) == ("data.corrupt", "stop_job", "platform")
    assert "record 3 of ledger/1.journal is damaged; restore the file" in got.summary
    assert verdict(REFUSED, tail="refused [no.such]: x").category == "unknown"
    assert verdict(1, tail=tail).action == "restart_process"


def test_a_good_end_is_benign():
    """Exit code 0 is nothing to act upon."""
    assert verdict(0).action == "ignore"


def test_an_unknown_exit_code_is_not_blamed_on_anyone():
    """Exit code 3 without any sign: unknown, low confidence."""
    got = verdict(3)
    assert got.category == "unknown"
    assert got.confidence < 0.5
