"""The verdict on one member's end: its own words and exit first, then what its node's hardware said of itself at the time."""

from typing import Final

from msgspec.structs import replace

from aimaster.brain.diagnose import diagnose, from_exit
from aimaster.brain.exits import at_the_end
from aimaster.brain.state import Incident, Member, State
from aimaster.wire.health import REFUSED, Finding, Verdict, category, read_refusal
from aimaster.wire.messages import MemberExited

NEAR_SECONDS: Final = 60.0
"""Faults of a node's hardware this long around a death may explain it."""
BEFORE_SECONDS: Final = 900.0
"""A collective may stand still for so long before anybody complains."""
WEAK: Final = frozenset({"benign", "unknown", "process.killed", "hang.unknown"})
"""Verdicts that name no cause."""
_SIGBUS: Final = 7
KILLED: Final = frozenset({137, -9})
"""Exit codes that stand for SIGKILL."""


def of_exit(state: State, member: Member, event: MemberExited) -> Verdict:
    """What ended the member."""
    own = from_exit(
        member.member,
        member.node,
        _rank(state, member),
        event.process.pid if event.process is not None else None,
        event.exit_code,
        event.signal,
        (*event.findings, *_full_memory(state, member, event)),
        log_tail="\n".join(event.log_tail),
        now=event.at,
    )
    hardware = [
        finding
        for finding in state.findings
        if category(finding.category).fault_of == "hardware"
        and finding.role == "self"
        and member.node in (finding.node, finding.subject.node)
        and finding.time_seconds is not None
        and abs(finding.time_seconds - event.at) <= NEAR_SECONDS
    ]
    if hardware:
        whole = diagnose((*hardware, *event.findings), event.at)
        if whole.fault_of == "hardware":
            return whole
    if own.category == "app.segfault" and state.plan.kind == "rl":
        return _crashed(state, member, own, event.at)
    return _explained(own, diagnose(at_the_end(event.findings, event.at), event.at), event.at)


def _explained(own: Verdict, whole: Verdict, at: float) -> Verdict:
    """An end without words of its own, or an exception that something deeper explains, as finished logs would be read."""
    refines = own.category == "app.exception" and whole.action == own.action
    recent = whole.time_seconds is None or at - BEFORE_SECONDS <= whole.time_seconds
    if not (own.category == "unknown" or refines) or whole.category in WEAK or whole.action == "ignore" or not recent:
        return own
    return replace(whole, traceback=whole.traceback or own.traceback)


def _crashed(state: State, member: Member, verdict: Verdict, at: float) -> Verdict:
    """A crash in native code may be of one moment: it is tried again; the same member crashing again will go on doing so."""
    before = [
        incident.incident
        for incident in state.incidents.values()
        if incident.subject == member.member
        and incident.verdict.category == verdict.category
        and not incident.drill
        and at - incident.occurred_at <= state.plan.restart_window_seconds
    ]
    if not before:
        return replace(verdict, action="restart_process")
    return replace(verdict, action="stop_job", summary=f"{verdict.summary} It crashed so before ({before[-1]}).")


def _full_memory(state: State, member: Member, event: MemberExited) -> tuple[Finding, ...]:
    """What its node's agent said of a full memory folder around a SIGBUS: the page that could not be had."""
    if event.signal != _SIGBUS and event.exit_code not in (-_SIGBUS, 128 + _SIGBUS):
        return ()
    return tuple(
        finding
        for finding in state.findings
        if finding.category == "node.shm_full"
        and member.node in (finding.node, finding.subject.node)
        and finding.time_seconds is not None
        and abs(finding.time_seconds - event.at) <= NEAR_SECONDS
    )


def of_echoes(incident: Incident, whole: Verdict | None, now: float) -> Verdict:
    """What the statements of several dead tell together when none of them is the root by itself; where that is little, what all nodes'
    logs tell (`whole`) of the time shortly before; else the first one's verdict.
    """
    own = diagnose(incident.findings, now)
    if own.category not in WEAK:
        return own
    if whole is not None and whole.category not in WEAK:
        at = whole.time_seconds
        if at is None or incident.occurred_at - BEFORE_SECONDS <= at <= incident.occurred_at + NEAR_SECONDS:
            return whole
    return incident.verdict if own.category in ("benign", "unknown") else own


def is_victim(verdict: Verdict, event: MemberExited) -> bool:
    """Whether it ended because a peer was gone: by an exit code, and not even its own verdict is about itself."""
    return verdict.category == "process.killed" and event.signal is None and event.exit_code not in KILLED


def was_killed(event: MemberExited) -> bool:
    """SIGKILL comes from outside, whatever its log said before."""
    return event.signal == 9 or event.exit_code in KILLED


def has_refused(event: MemberExited) -> bool:
    """It said why it will not run: no echo, whatever else its log holds."""
    return event.exit_code == REFUSED and read_refusal("\n".join(event.log_tail)) is not None


def _rank(state: State, member: Member) -> int | None:
    """Its global rank where it has one; a wrapped launcher's ranks are named by its log."""
    spec = state.plan.members[member.member]
    return spec.rank if member.role == "policy" or "RANK" in spec.env else None
