"""The verdict on one member's exit, from its code, its signal and what its log said. Pure.

A traceback of the program is the user's; an echo of a dead peer (gloo, NCCL, torchrun's closing signal) is never a root; faulthandler's `Timeout (`
dump with exit 1 is a hang; a bare SIGKILL or SIGTERM is somebody else's doing and worth another try.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from aimaster.brain import wording
from aimaster.wire.health import NEW_LINE, REFUSED, Culprit, Evidence, Finding, Verdict, category, read_refusal

_NAMES: Final = {
    1: "SIGHUP",
    2: "SIGINT",
    4: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
}
"""Linux numbers: members run there, whatever the reader of their journal runs on."""
_SIGTERM: Final = 15
_SIGKILL: Final = 9
ECHO_SECONDS: Final = 60.0
"""What a log said of a peer explains an end that follows this soon; a process that went on longer had lived through it."""
ECHO_LINES: Final = 20
"""And of a log without times, what stands in its last lines."""
CRASHES: Final = frozenset({4, 7, 8, 11})
"""Signals of a crash in native code. SIGBUS too: that /dev/shm is full must be said by somebody who looked, the signal alone does not."""
_EXCEPTION_LINE = re.compile(
    r"^(?:\[[^\]]*\]:? ?)?(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failure|Fault))(?:: (?P<message>.*))?$"
)
_ECHO = re.compile(
    r"Connection closed by peer|Connection reset by peer|Broken pipe|Timed out waiting \d+ms for|gloo/transport|ncclRemoteError|NCCL error|"
    r"DistBackendError|DistNetworkError|DistStoreError|SignalException|ChildFailedError|Socket closed|Connection refused"
)
_RUN_FILE = re.compile(
    r"[^\s'\"]*(?:/dev/shm/aimaster-[\w-]+|/nodes/[\w.-]+/(?:members|agent|outbox)|/nodes/[\w.-]+$|/token\b)[^\s'\";]*"
)
"""Paths that a run makes for itself: a node's two folders and the token file."""
_DUMP = re.compile(r"^(?:\[[^\]]*\]:? ?)?Timeout \([\d:.]+\)!", re.MULTILINE)


def at_the_end(findings: Iterable[Finding], now: float | None) -> tuple[Finding, ...]:
    """The statements that may have to do with an end at `now`: no echo that the process caught, or lived through."""
    return tuple(one for one in findings if one.role != "follower" or _is_last_word(one, now))


def _is_last_word(echo: Finding, now: float | None) -> bool:
    said_at = echo.last_seconds if echo.last_seconds is not None else echo.time_seconds
    late = said_at is None or now is None or now - said_at <= ECHO_SECONDS
    went_on = echo.details.get("steps_after", "0") != "0"
    return late and not went_on and echo.severity != "info"


def from_exit(
    member: str,
    node: str,
    rank: int | None,
    pid: int | None,
    exit_code: int | None,
    signal: int | None,
    log_findings: Iterable[Finding],
    *,
    log_tail: str = "",
    now: float | None = None,
) -> Verdict:
    """What ended this member, by its own words first and by how it ended second.

    `exit_code` may be negative or above 128 for a signal; `log_tail` is searched for a traceback that no sign knows.
    """
    code, number = _normal(exit_code, signal)
    culprit = Culprit(node=node, rank=rank, pid=pid)
    heard = at_the_end(log_findings, now)
    found = [one for one in heard if one.kind == "sign" and one.role != "benign"]
    own = [one for one in found if one.role == "self" and one.weight >= 20 and one.category != "process.killed"]
    trace = _last_traceback(log_tail)
    plain = _plain_end(member, culprit, code, number, own, log_tail, now)
    if plain is not None:
        return plain
    if number is None and (gone := _gone_file(trace)):
        return _without_its_files(member, culprit, f"a file of the run was not there any more: {gone}", now)
    best = max(own, key=lambda one: one.weight, default=None)
    if best is not None and best.weight >= 60:
        return _said(member, culprit, best, code, number, now, found)
    raised = next((one for one in own if one.category == "app.exception"), None)
    if number is None and raised is not None:
        return _said(member, culprit, raised, code, number, now, found)
    if number is None and trace is not None:
        return _raised(member, culprit, trace, now)
    if best is not None and best.weight >= 45 and number != _SIGTERM:
        return _said(member, culprit, best, code, number, now, found)
    if number in CRASHES:
        return _verdict("app.segfault", culprit, 0.75, f"{member} was ended by {_name(number)}", best, now)
    verdict = _echo_or_killed(member, culprit, code, number, found, log_tail, now)
    if verdict.category != "unknown":
        return verdict
    return replace(verdict, candidates=tuple(line for one in heard if one.sign == NEW_LINE for line in one.evidence))


def _plain_end(
    member: str,
    culprit: Culprit,
    code: int | None,
    number: int | None,
    own: list[Finding],
    tail: str,
    now: float | None,
) -> Verdict | None:
    """An end that needs no weighing of words: a refusal, the self-fence, a good end, or one that nobody saw."""
    refused = read_refusal(tail) if code == REFUSED else None
    if refused is not None:
        return _refused(member, culprit, *refused, now)
    hang = next((one for one in own if one.category == "hang.straggler"), None)
    if code == 1 and (hang is not None or _DUMP.search(tail)):
        why = f"{member} stopped itself: its training thread made no progress"
        return _verdict("hang.straggler", culprit, 0.85, why, hang, now)
    if code == 0 and number is None:
        return _verdict("benign", culprit, 0.95, f"{member} ended well", None, now)
    return _ended_unseen(member, culprit, own, now) if code is None and number is None else None


def _ended_unseen(member: str, culprit: Culprit, own: list[Finding], now: float | None) -> Verdict:
    """Nobody saw how it ended: only what stood in the way of its start counts, never a traceback that it may have lived through."""
    stood = [one for one in own if one.category != "app.exception" and one.weight >= 45]
    best = max(stood, key=lambda one: one.weight, default=None)
    if best is not None:
        return _said(member, culprit, best, None, None, now, stood)
    return _without_its_files(
        member, culprit, "nobody saw how: the files in which that stands are gone, or were never written", now
    )


def _gone_file(trace: tuple[str, str, str] | None) -> str:
    """The file of the run that an exception names as absent; empty for any other."""
    if trace is None or not trace[0].endswith(("FileNotFoundError", "NotADirectoryError", "TokenFileError")):
        return ""
    found = _RUN_FILE.search(trace[1])
    return found[0] if found else ""


def _without_its_files(member: str, culprit: Culprit, why: str, now: float | None) -> Verdict:
    """The ground under it was taken away: no fault of the program."""
    found = _verdict("unknown", culprit, 0.4, f"{member} ended, and {why}", None, now)
    advice = "Find out who removes files of a run that is going on; what is needed is made again at the restart."
    return replace(found, fault_of="platform", action="restart_process", advice=advice)


def _normal(exit_code: int | None, signal: int | None) -> tuple[int | None, int | None]:
    """Exit code and signal apart; 128 + n of a shell and -n of subprocess are signals."""
    if signal:
        return None, signal
    if exit_code is not None and exit_code < 0:
        return None, -exit_code
    if exit_code is not None and 128 < exit_code <= 128 + 64 and exit_code != 255:
        return None, exit_code - 128
    return exit_code, None


def _echo_or_killed(
    member: str,
    culprit: Culprit,
    code: int | None,
    number: int | None,
    found: list[Finding],
    tail: str,
    now: float | None,
) -> Verdict:
    echo = max((one for one in found if one.role == "follower"), key=lambda one: one.weight, default=None)
    last_words = "\n".join(tail.splitlines()[-ECHO_LINES:]) if number is None else ""
    # A SIGKILL comes from outside, whatever was said before; only its own end can be caused by what it said.
    if number != _SIGKILL and (echo is not None or _ECHO.search(last_words)):
        how = f"exit code {code}" if number is None else _name(number)
        return _verdict(
            "process.killed",
            culprit,
            0.3,
            f"{member} ended with {how} because a peer was gone; it is a victim",
            echo,
            now,
        )
    if number is not None:
        return _verdict(
            "process.killed", culprit, 0.6, f"{member} was ended by {_name(number)}, and said nothing itself", None, now
        )
    return _verdict(
        "unknown", culprit, 0.2, f"{member} ended with exit code {code} and said nothing that any sign knows", None, now
    )


def _name(number: int) -> str:
    return _NAMES.get(number, f"signal {number}")


def _said(
    member: str,
    culprit: Culprit,
    finding: Finding,
    code: int | None,
    number: int | None,
    now: float | None,
    found: Sequence[Finding],
) -> Verdict:
    row = category(finding.category)
    whole = Culprit(
        node=culprit.node,
        rank=culprit.rank if culprit.rank is not None else finding.subject.rank,
        gpu=finding.subject.gpu,
        pid=_pid(culprit, finding, found),
    )
    how = "nobody saw how" if code is None and number is None else f"exit code {code}"
    how = _name(number) if number is not None else how
    return Verdict(
        category=finding.category,
        culprit=whole,
        fault_of=finding.fault_of or row.fault_of,
        action=finding.action or row.action,
        confidence=round(min(0.95, 0.5 + finding.weight / 200), 2),
        summary=f"{member} ended with {how}: {wording.summary(finding, whole)}",
        advice=wording.advice(finding, row.advice),
        traceback=finding.traceback,
        time_seconds=finding.time_seconds if finding.time_seconds is not None else now,
        evidence=finding.evidence,
    )


def _pid(culprit: Culprit, finding: Finding, found: Sequence[Finding]) -> int | None:
    """The process of the rank that is named. That of a launcher is not its ranks': the launcher's own report tells theirs."""
    rank = finding.subject.rank
    if culprit.rank is not None or rank is None:
        return culprit.pid or finding.subject.pid
    told = [one for one in found if one.subject.rank == rank and one.subject.pid and one.role != "accusation"]
    reported = [one for one in told if one.sign.startswith("torch.elastic")]
    return next((one.subject.pid for one in (*reported, *told)), finding.subject.pid)


def _last_traceback(tail: str) -> tuple[str, str, str] | None:
    """(exception, message, traceback) of the last traceback of the tail that is no echo of a dead peer."""
    start = len(tail)
    while (start := tail.rfind("Traceback (most recent call last)", 0, start)) >= 0:
        for line in tail[start:].splitlines()[1:]:
            found = _EXCEPTION_LINE.match(line)
            if found is None:
                continue
            if _ECHO.search(line) or found["name"].endswith(("KeyboardInterrupt", "SystemExit")):
                break
            end = tail.find(line, start) + len(line)
            return found["name"], (found["message"] or "").strip(), tail[start:end]
    return None


def _raised(member: str, culprit: Culprit, trace: tuple[str, str, str], now: float | None) -> Verdict:
    name, message, text = trace
    row = category("app.exception")
    said = f"{name}: {message}" if message else name
    return Verdict(
        category="app.exception",
        culprit=culprit,
        fault_of=row.fault_of,
        action=row.action,
        confidence=0.9,
        summary=f"{member} raised {wording.short(said)}{wording.at(culprit)}.",
        advice=row.advice,
        traceback=text,
        time_seconds=now,
        evidence=(Evidence(node=culprit.node, time_seconds=now, text=said, sign="python.exception"),),
    )


def _refused(member: str, culprit: Culprit, name: str, why: str, now: float | None) -> Verdict:
    """It said itself that another start will end the same way."""
    row = category(name)
    return Verdict(
        category=name,
        culprit=culprit,
        fault_of="platform" if row.fault_of == "transient" else row.fault_of,
        action="stop_job",
        confidence=0.95,
        summary=f"{member} refuses to run: {why.rstrip('.')}.",
        advice="Do what the sentence says, then give the same command again; nothing was changed.",
        time_seconds=now,
        evidence=(Evidence(node=culprit.node, time_seconds=now, text=why, sign="member.refused"),),
    )


def _verdict(
    name: str, culprit: Culprit, confidence: float, summary: str, finding: Finding | None, now: float | None
) -> Verdict:
    row = category(name)
    return Verdict(
        category=name,
        culprit=Culprit() if name == "benign" else culprit,
        fault_of=row.fault_of,
        action=row.action,
        confidence=confidence,
        summary=f"{summary}.",
        advice=row.advice,
        traceback=finding.traceback if finding is not None else "",
        time_seconds=finding.time_seconds if finding is not None and finding.time_seconds is not None else now,
        evidence=finding.evidence if finding is not None else (),
    )
