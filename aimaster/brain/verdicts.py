"""Verdicts on what no log line speaks of: a lost node, a hang, a member that is gone, a killed agent or master."""

from typing import Final

from msgspec.structs import replace

from aimaster.brain.state import Member
from aimaster.wire.health import Action, Evidence, Subject, Verdict, category
from aimaster.wire.ids import NodeId
from aimaster.wire.messages import HangSuspected

LONG_SILENCE_SECONDS: Final = 6.0
"""A master that is killed is back sooner; its sign of life comes twice a second."""


def node_lost(node: NodeId, silent_since: float, why: str) -> Verdict:
    return _verdict("node.lost", Subject(node=node), silent_since, f"node {node} is lost: {why}", 0.8, (why,))


def node_replaced(node: NodeId, since: float) -> Verdict:
    """A fresh node stands under the lost one's name: nobody need move."""
    why = "its agent came back without the node's folders"
    summary = f"node {node} was lost and replaced: {why}"
    return _verdict("node.lost", Subject(node=node), since, summary, 0.9, (why,), action="restart_process")


def hang(member: Member, suspected: HangSuspected, why: str) -> Verdict:
    progress = suspected.progress
    learnt = (
        f"its lease was {progress.lease_seconds:.1f} s"
        if progress.lease_seconds is not None
        else "its lease was not learnt yet"
    )
    summary = (
        f"{member.member} on {member.node} hangs in phase {progress.phase} at step {progress.step}: "
        f"no progress for {progress.age_seconds:.1f} s ({learnt}), and {why}"
    )
    at = suspected.at - progress.age_seconds
    culprit = _subject(member)
    culprit = replace(culprit, rank=suspected.rank, pid=suspected.pid or culprit.pid)
    return _verdict("hang.straggler", culprit, at, summary, 0.9, (*suspected.evidence, *suspected.stacks[:20]))


def vanished(member: Member, at: float, why: str) -> Verdict:
    return _verdict("unknown", _subject(member), at, f"{member.member} on {member.node} is gone: {why}", 0.3, (why,))


def unheard(member: Member, since: float, now: float) -> Verdict:
    why = f"its agent shows it asking, and the controller has not heard it for {now - since:.0f} s"
    summary = f"{member.member} on {member.node} is cut off from the controller: {why}"
    return _verdict("net.unreachable", _subject(member), since, summary, 0.8, (why,), action="reform_without")


def agent_gone(node: NodeId, at: float, pid: int) -> Verdict:
    summary = f"the agent of {node} (pid {pid}) ended and was started again; its members and snapshots live on"
    return _verdict("process.killed", Subject(node=node, pid=pid), at, summary, 0.9, (), action="restart_process")


def agent_never_came(node: NodeId, at: float) -> Verdict:
    """One between two that were met."""
    summary = f"an agent of {node} ended before it had reached the master, and was started again"
    return _verdict("process.killed", Subject(node=node), at, summary, 0.8, (), action="restart_process")


def master_gone(at: float, silent_seconds: float) -> Verdict:
    """A stopped or hung one is killed by whoever keeps it up: what is known is how long it had been silent."""
    ended = (
        f"gave no sign of life for {silent_seconds:.0f} s before it was started again (stopped, hung, or kept from starting)"
        if silent_seconds >= LONG_SILENCE_SECONDS
        else "ended without a word and was started again"
    )
    summary = f"the master {ended}; it replayed its journal and adopted the living"
    return _verdict("process.killed", Subject(), at, summary, 0.9, (), action="restart_process")


def _subject(member: Member) -> Subject:
    return Subject(node=member.node, pid=member.process.pid if member.process else None)


def _verdict(
    name: str,
    culprit: Subject,
    at: float,
    summary: str,
    confidence: float,
    lines: tuple[str, ...],
    action: Action | None = None,
) -> Verdict:
    row = category(name)
    return Verdict(
        category=name,
        culprit=culprit,
        fault_of=row.fault_of,
        action=action or row.action,
        confidence=confidence,
        summary=summary,
        advice=row.advice,
        time_seconds=at,
        evidence=tuple(Evidence(node=culprit.node, text=line, time_seconds=at) for line in lines),
    )
