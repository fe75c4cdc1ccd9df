"""The verdict on one member's end: its own words and exit first, then what its node's hardware said of itself at the time."""

from typing import Final

from aimaster.brain.diagnose import diagnose, from_exit
from aimaster.brain.state import Incident, Member, State
from aimaster.wire.health import REFUSED, Verdict, category, read_refusal
from aimaster.wire.messages import MemberExited

NEAR_SECONDS: Final = 60.0
"""Faults of a node's hardware this long around a death may explain it."""
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
        event.findings,
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
    return own


def of_echoes(incident: Incident, now: float) -> Verdict:
    """What the statements of several dead tell together when none of them is the root by itself; else the first one's verdict."""
    whole = diagnose(incident.findings, now)
    return incident.verdict if whole.category in ("benign", "unknown") else whole


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
