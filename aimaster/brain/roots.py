"""The verdict on one member's exit, from its code, its signal and what its log said."""

from aimaster.brain.state import Member, State
from aimaster.wire.health import Finding, Subject, Verdict, category
from aimaster.wire.messages import MemberExited

SIGNAL_CATEGORIES = {4: "app.segfault", 7: "app.segfault", 8: "app.segfault", 11: "app.segfault"}


def of_exit(state: State, member: Member, event: MemberExited) -> Verdict:
    """Its own strongest statement names the category; without one, the signal does; without both it is unknown."""
    own = [finding for finding in event.findings if finding.role == "self"]
    strongest = max(own, key=lambda finding: finding.weight, default=None)
    rank = state.plan.members[member.member].rank
    subject = Subject(node=member.node, rank=rank, pid=event.process.pid if event.process else None)
    name = strongest.category if strongest else _by_signal(event.signal)
    row = category(name)
    how = f"signal {event.signal}" if event.signal else f"exit code {event.exit_code}"
    return Verdict(
        category=name,
        culprit=subject,
        fault_of=(strongest.fault_of if strongest else None) or row.fault_of,
        action=(strongest.action if strongest else None) or row.action,
        confidence=0.9 if strongest or event.signal else 0.3,
        summary=f"{member.member} on {member.node} ended with {how}: {name}{_said(strongest)}",
        advice=row.advice,
        traceback=strongest.traceback if strongest else "",
        time_seconds=event.at,
        evidence=strongest.evidence if strongest else (),
    )


def _by_signal(number: int | None) -> str:
    if number is None:
        return "unknown"
    return SIGNAL_CATEGORIES.get(number, "process.killed")


def _said(finding: Finding | None) -> str:
    lines = [evidence.text for evidence in finding.evidence if evidence.text] if finding else []
    return f" ({lines[-1]})" if lines else ""
