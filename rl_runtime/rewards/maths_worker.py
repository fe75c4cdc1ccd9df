"""A worker process that judges mathematical answers by math-verify: a JSON line in, a JSON line out, until its input ends.

math-verify sets alarms, which work in a main thread only, and sympy may run for ever on a strange expression; so it runs here,
where it can be killed, and its parent keeps the time. The process ends with its parent.
"""

import ctypes
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def judge(text: str, answer: str) -> float:
    """Return 1.0 where the text's result equals the answer. A text with `####` is judged by what first follows it."""
    from math_verify import parse, verify

    gold = parse(_result(answer))
    return float(bool(gold) and bool(verify(gold, parse(_result(text)))))


def _result(text: str) -> str:
    _, hashes, after = text.partition("####")
    return after.strip().split("\n")[0] if hashes and after.strip() else text


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return  # the parent died before it could be tied to
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to the log, not between the answers
    judge("1", "1")  # imports and first use, before the first deadline runs
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        score = judge(question["text"], question["answer"])
        print(json.dumps({"number": question["number"], "score": score}), file=answers, flush=True)


if __name__ == "__main__":
    main()
