"""The picture of a run that commands and pages show, made from state and view. Pure, so that all of them show the same."""

from collections.abc import Iterator
from typing import Final

from aimaster.brain.recovery import picture_of
from aimaster.brain.state import Incident, Member, Node, State, View
from aimaster.brain.unheard import unheard
from aimaster.wire.checkpoint import SnapshotPlace
from aimaster.wire.health import Finding
from aimaster.wire.status import IncidentStatus, JobStatus, MemberStatus, NodeStatus

MAX_FINDINGS: Final = 20
FRESH_FINDING_SECONDS: Final = 900.0
REASON_SECONDS: Final = 30.0
"""A finding is the reason of how the job stands for so long; one that lasts is found again meanwhile."""


def picture(state: State, view: View, now: float, own_findings: tuple[str, ...] = ()) -> JobStatus:
    """The run now. `own_findings` are the master's about itself, for example a full run disk."""
    pulse = view.controller
    in_epoch = pulse.in_epoch if pulse is not None else ()
    conditions = (*own_findings, *_conditions(state, view, now))
    findings = (*conditions, *_found(state, now, FRESH_FINDING_SECONDS))[:MAX_FINDINGS]
    return JobStatus(
        run_id=state.plan.run_id,
        name=state.plan.name,
        kind=state.plan.kind,
        state=job_state(state, findings_block=bool(own_findings)),
        reason=_reason(state, (*conditions, *_found(state, now, REASON_SECONDS))),
        outcome=state.ending.outcome if state.ending is not None else "",
        started_at=state.started_at,
        now=now,
        term=state.term,
        epoch=pulse.epoch if pulse is not None else 0,
        lineage=pulse.lineage if pulse is not None else 0,
        step=pulse.step if pulse is not None else 0,
        steps=pulse.steps if pulse is not None else state.plan.steps,
        figures=pulse.figures if pulse is not None else {},
        nodes=tuple(_node(node, view) for node in state.nodes.values()),
        members=tuple(_member(member, view, in_epoch=member.member in in_epoch) for member in state.members.values()),
        incidents=tuple(_incident(incident) for incident in state.incidents.values()),
        snapshots=_snapshots(state, view),
        controller_url=pulse.url if pulse is not None else "",
        findings=findings,
    )


def job_state(state: State, *, findings_block: bool = False) -> str:
    """starting, running, degraded, stopping, finished or failed; a job that was asked to stop stays at stopping."""
    if state.ending is not None and state.ending.outcome == "stopped":
        return "stopping"
    if state.phase != "running":
        return state.phase
    whole = all(member.state in ("running", "finished") for member in state.members.values())
    reached = all(
        node.state in ("connected", "waiting") or not state.members_on(node.node) for node in state.nodes.values()
    )
    return "running" if whole and reached and not findings_block else "degraded"


def words(finding: Finding) -> str:
    """A finding in one line."""
    said = finding.details.get("message") or next((e.text for e in finding.evidence if e.text), finding.sign)
    where = finding.node or finding.subject.node
    return f"{finding.category}{f' on {where}' if where else ''}: {said}"


def _conditions(state: State, view: View, now: float) -> Iterator[str]:
    """What holds at this moment."""
    pulse = view.controller
    if pulse is not None and pulse.finding:
        yield f"{pulse.finding}: the controller waits ({pulse.waiting_for or 'no word for what'})"
    for node in state.nodes.values():
        if node.state == "silent":
            heard = [
                m.member
                for m in state.members_on(node.node)
                if now - view.heard.get(m.member, 0.0) < state.plan.node_silent_seconds
            ]
            still = f"; its members {', '.join(heard)} still speak, so nothing is moved" if heard else ""
            yield f"the agent of {node.node} has been silent for {max(0.0, now - node.seen_at):.0f} s{still}"
    for name, since in unheard(state, view, now).items():
        where = state.members[name].node
        yield f"net.unreachable on {where}: {name} asks, and the controller has not heard it for {now - since:.0f} s"


def _found(state: State, now: float, seconds: float) -> Iterator[str]:
    """What was found within so many seconds, the newest first."""
    for finding in reversed(state.findings):
        if finding.time_seconds is None or now - finding.time_seconds < seconds:
            yield words(finding)


def _reason(state: State, findings: tuple[str, ...]) -> str:
    if state.ending is not None:
        return state.ending.reason
    missing = [m for m in state.members.values() if m.state in ("dead", "suspected", "stopped")]
    if missing and state.phase == "running":
        return ", ".join(f"{member.member} is {member.state}" for member in missing)
    return findings[0] if findings and state.phase == "running" else ""


def _node(node: Node, view: View) -> NodeStatus:
    seen = view.nodes.get(node.node)
    at = max(node.seen_at, seen.at if seen is not None and node.state == "connected" else 0.0)
    return NodeStatus(
        node=node.node, state=node.state, url=node.url, agent_pid=node.agent_pid, seen_at=at, labels=node.labels
    )


def _member(member: Member, view: View, *, in_epoch: bool) -> MemberStatus:
    shown = picture_of(view, member)
    return MemberStatus(
        member=member.member,
        role=member.role,
        node=member.node,
        state=member.state,
        incarnation=member.incarnation,
        process=member.process,
        progress=shown.progress if shown is not None else None,
        in_epoch=in_epoch,
        restarts=member.restarts,
    )


def _incident(incident: Incident) -> IncidentStatus:
    return IncidentStatus(
        incident=incident.incident,
        subject=incident.subject,
        verdict=incident.verdict,
        action=incident.action,
        occurred_at=incident.occurred_at,
        detected_at=incident.detected_at,
        decided_at=incident.decided_at,
        resumed_at=incident.resumed_at,
        healed_at=incident.healed_at,
        lost=incident.lost,
        drill=incident.drill,
        deaths=tuple(name for name, _ in incident.deaths),
    )


def _snapshots(state: State, view: View) -> tuple[SnapshotPlace, ...]:
    """What lies in memory as the agents show it, then what is stored; newest first within each."""
    reached = [
        view.nodes[name].pulse.snapshots
        for name, node in state.nodes.items()
        if node.state == "connected" and name in view.nodes
    ]
    in_memory = [place for places in reached for place in places]
    return tuple(
        sorted(in_memory, key=lambda place: place.version, reverse=True)
        + sorted(state.stored, key=lambda place: place.version, reverse=True)
    )
