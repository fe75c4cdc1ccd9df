"""Worker processes for rewards that may hang or die. A hung or dying worker costs one attempt of one reward, never the member.

    submit -> waiting -> given to a free worker -> answered in time | deadline passed or worker died: killed, replaced, tried again

After `ATTEMPTS` attempts the answer earns nothing, and that is counted. All is driven by `poll`, which never blocks: one thread, no
queues between threads. What waits is bounded by the completions in work.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

import msgspec
import structlog

ATTEMPTS = 2
START_SECONDS = 60.0
"""A fresh worker imports sympy; on a busy machine that takes a while."""
QUIET_STARTS = 3
"""So many workers in a row that never became ready are a fault of the installation."""

log = structlog.get_logger("rewards")


class PoolError(Exception):
    """Workers cannot be started at all; the message carries what the last one wrote."""


class _Question(msgspec.Struct, kw_only=True):
    key: str
    text: str
    answer: str
    attempts: int = 0


class _Worker(msgspec.Struct, kw_only=True):
    process: "subprocess.Popen[bytes]"
    deadline: float
    """For what it does now: starting, or its question."""
    ready: bool = False
    question: _Question | None = None
    received: bytearray = msgspec.field(default_factory=bytearray)


class MathsPool:
    """Scores texts against answers by math-verify in `workers` processes."""

    def __init__(self, *, workers: int, deadline_seconds: float, command: Sequence[str] | None = None) -> None:
        self._command = list(command or (sys.executable, "-m", "rl_runtime.rewards.maths_worker"))
        self._deadline_seconds = deadline_seconds
        self._waiting: deque[_Question] = deque()
        self._selector = selectors.DefaultSelector()
        self._failed_starts = 0
        self.given_up = 0
        """Answers that earned nothing because no worker could judge them in time."""
        self._workers = [self._start() for _ in range(workers)]

    @property
    def process_ids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def submit(self, key: str, text: str, answer: str) -> None:
        self._waiting.append(_Question(key=key, text=text, answer=answer))

    def poll(self) -> list[tuple[str, float]]:
        """Return the scores that have come in, as (key, score); hand out what waits; replace who is late or dead."""
        scores = []
        for place, _ in self._selector.select(timeout=0):
            scores += self._read(place.data)
        now = time.monotonic()
        for number, worker in enumerate(self._workers):
            if worker.process.poll() is not None or now > worker.deadline:
                scores += self._replace(number, worker)
        for worker in self._workers:
            if worker.ready and worker.question is None and self._waiting:
                self._give(worker, self._waiting.popleft(), now)
        return scores

    def close(self) -> None:
        for worker in self._workers:
            self._end(worker)
        self._selector.close()

    def _start(self) -> _Worker:
        process = subprocess.Popen(
            [*self._command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,  # into the member's log
        )
        worker = _Worker(process=process, deadline=time.monotonic() + START_SECONDS)
        assert process.stdout is not None  # noqa: S101 - asked for above
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, worker)
        return worker

    def _read(self, worker: _Worker) -> list[tuple[str, float]]:
        assert worker.process.stdout is not None  # noqa: S101 - see _start
        data = worker.process.stdout.read(65536)
        if not data:
            return []  # its end; poll() finds the death
        worker.received += data
        scores = []
        *lines, rest = worker.received.split(b"\n")
        worker.received = bytearray(rest)
        for line in lines:
            answer = json.loads(line)
            if not worker.ready:
                worker.ready, worker.deadline, self._failed_starts = True, float("inf"), 0
            elif worker.question is not None:
                scores.append((worker.question.key, float(answer["score"])))
                worker.question, worker.deadline = None, float("inf")
        return scores

    def _give(self, worker: _Worker, question: _Question, now: float) -> None:
        question.attempts += 1
        worker.question, worker.deadline = question, now + self._deadline_seconds
        line = json.dumps({"number": question.attempts, "text": question.text, "answer": question.answer}) + "\n"
        assert worker.process.stdin is not None  # noqa: S101 - see _start
        with contextlib.suppress(BrokenPipeError):  # it died; the next poll replaces it and tries the question again
            worker.process.stdin.write(line.encode())
            worker.process.stdin.flush()

    def _replace(self, number: int, worker: _Worker) -> list[tuple[str, float]]:
        """End a late or dead worker, start another, and put its question first, or give it up."""
        scores = []
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= QUIET_STARTS:
                raise PoolError(
                    f"{self._failed_starts} reward workers in a row did not start (exit code {worker.process.poll()}):"
                    f" run `{' '.join(self._command)} {os.getpid()}` by hand to see why"
                )
        question = worker.question
        if question is not None:
            log.warning(
                "reward worker hung or died; replaced",
                pid=worker.process.pid,
                exit_code=worker.process.poll(),
                attempt=question.attempts,
            )
            if question.attempts < ATTEMPTS:
                self._waiting.appendleft(question)
            else:
                self.given_up += 1
                scores.append((question.key, 0.0))
        self._end(worker)
        self._workers[number] = self._start()
        return scores

    def _end(self, worker: _Worker) -> None:
        process = worker.process
        assert process.stdin is not None  # noqa: S101 - see _start
        assert process.stdout is not None  # noqa: S101 - see _start
        self._selector.unregister(process.stdout)
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # a line it never read
            process.stdin.close()
