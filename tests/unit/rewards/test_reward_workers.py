"""Real math-verify workers, killed and stopped while they judge."""

import os
import signal
import sys
import time

import pytest

from rl_runtime.rewards.desk import RewardDesk
from rl_runtime.rewards.pool import MathsPool, PoolError

DEADLINE_SECONDS = 100.0


def collect(poll, count):
    found, give_up_at = [], time.monotonic() + DEADLINE_SECONDS
    while len(found) < count:
        assert time.monotonic() < give_up_at
        found += poll()
        time.sleep(0.005)
    return found


@pytest.fixture(scope="module")
def pool():
    pytest.importorskip("math_verify")
    made = MathsPool(workers=1, deadline_seconds=5.0)
    yield made
    made.close()


def busy(pool):
    """Wait until the worker has a question; return its pid."""
    give_up_at = time.monotonic() + DEADLINE_SECONDS
    while not any(worker.question for worker in pool._workers):
        assert time.monotonic() < give_up_at
        assert pool.poll() == []
        time.sleep(0.005)
    return pool._workers[0].process.pid


def test_answers_are_judged_as_mathematics(pool):
    """Equal values in other spellings are right; what first follows `####` is the result."""
    cases = {
        "fraction": (r"the result is $\frac{1}{2}$", "0.5", 1.0),
        "hashes": ("17 - 5 = 12\n#### 12\n\nQuestion: 3 + 4", "#### 12", 1.0),
        "wrong": ("#### 13", "#### 12", 0.0),
        "empty": ("", "#### 12", 0.0),
    }
    for key, (text, answer, _) in cases.items():
        pool.submit(key, text, answer)
    assert dict(collect(pool.poll, len(cases))) == {key: reward for key, (_, _, reward) in cases.items()}


def test_a_killed_worker_costs_one_attempt(pool):
    """The question goes to a new worker and is answered."""
    os.kill(pool.process_ids[0], signal.SIGSTOP)  # so that it cannot answer before it is killed
    pool.submit("a", "#### 7", "7")
    first = busy(pool)
    os.kill(first, signal.SIGKILL)
    assert collect(pool.poll, 1) == [("a", 1.0)]
    assert pool.process_ids[0] != first
    assert pool.given_up == 0


def test_a_hung_worker_is_killed_at_the_deadline(pool):
    """A worker that stands still is replaced, and its question answered by the next."""
    pool._deadline_seconds = 0.5
    os.kill(pool.process_ids[0], signal.SIGSTOP)
    pool.submit("a", "#### 7", "7")
    first = busy(pool)
    pool._deadline_seconds = 30.0
    assert collect(pool.poll, 1) == [("a", 1.0)]
    assert not os.path.exists(f"/proc/{first}")


def test_an_answer_nobody_can_judge_earns_nothing(pool):
    """After two attempts the answer is given up, counted, and the pool goes on."""
    pool.submit("a", "#### 7", "7")
    for _ in range(2):
        give_up_at = time.monotonic() + DEADLINE_SECONDS
        while not pool._workers[0].ready:
            assert time.monotonic() < give_up_at
            pool._read(pool._workers[0])
            time.sleep(0.005)
        os.kill(pool.process_ids[0], signal.SIGSTOP)
        os.kill(busy(pool), signal.SIGKILL)
        found = pool.poll()
        while pool._workers[0].question is not None:
            found += pool.poll()
    assert found == [("a", 0.0)]
    assert pool.given_up == 1
    pool.submit("b", "#### 7", "7")
    assert collect(pool.poll, 1) == [("b", 1.0)]


def test_workers_that_never_start_are_one_clear_error():
    """The message says how to see why."""
    pool = MathsPool(workers=1, deadline_seconds=1.0, command=[sys.executable, "-c", "import sys; sys.exit(3)"])
    with pytest.raises(PoolError, match="exit code 3"):
        collect(pool.poll, 1)
    pool.close()


def test_quick_and_slow_rewards_are_one_score():
    """A completion is scored once, when the slow part is there."""
    pytest.importorskip("math_verify")
    desk = RewardDesk({"math_verify": 1.0, "format": 0.5}, workers=1, deadline_seconds=20.0)
    desk.submit("a", "#### 7", answer="#### 7", prompt="")
    assert desk.waiting == 1
    (score,) = collect(desk.ready, 1)
    assert score.reward == 1.5
    assert score.rewards == {"math_verify": 1.0, "format": 1.0}
    desk.close()
