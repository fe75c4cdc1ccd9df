"""Pictures of now, and what may be concluded from them. `observe` moves the view; `conclusions` looks at state and view and says
which events follow. Nothing here changes the state: a conclusion counts once it is journaled and stepped.
"""

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from aimaster.brain import members, placement
from aimaster.brain.endings import leaving, waits_for_nodes
from aimaster.brain.events import (
    Action,
    AgentPulsed,
    ChoosePort,
    Conclude,
    ControllerPulsed,
    Event,
    GraceOver,
    HangConfirmed,
    IncidentMoved,
    IncidentSettled,
    JobFinished,
    MemberVanished,
    NodeLost,
    Observation,
    StartDue,
    SuspicionWithdrawn,
    Tick,
)
from aimaster.brain.remedy import is_node_lost
from aimaster.brain.state import LIVE, Incident, Member, Node, NodeView, Rewind, State, View
from aimaster.wire.actions import StartMember
from aimaster.wire.ids import MemberId
from aimaster.wire.messages import ControllerPulse, MemberPicture, Pulse

ABSENT_SECONDS: Final = 5.0
"""A member that its node's pulses do not show for so long, with no report of its end, is gone."""
START_SECONDS: Final = 30.0
"""The same while the agent has not yet said that it carried out the start."""
WAITING_SECONDS: Final = 30.0
"""A node whose agent never came is given at least so long."""
LONG_SILENCES: Final = 3.0
"""With the controller silent too, a node is lost after so many times `node_silent_seconds`."""
LEFT_EARLY_SECONDS: Final = 10.0
"""A member that left with exit code 0 while the controller goes on is missed after so long."""


def observe(state: State, view: View, seen: Observation, now: float) -> tuple[View, tuple[Action, ...]]:
    """Move the view, and conclude what can be concluded now."""
    match seen:
        case AgentPulsed():
            view = replace(view, nodes=view.nodes | {seen.node: _node_view(state, view, seen, now)})
        case ControllerPulsed():
            view = _hear(view, seen.pulse, now)
        case Tick():
            pass
    actions: list[Action] = [Conclude(event=event) for event in conclusions(state, view, now)]
    if state.regroup is not None and state.ending is None and members.group_nodes(state) is not None:
        actions.append(ChoosePort(incarnation=state.regroup.incarnation))
    return view, tuple(actions)


def conclusions(state: State, view: View, now: float) -> Iterator[Event]:
    """What follows from the view, in the order in which it should be believed."""
    if state.ending is not None:
        yield from _of_ending(state, now)
        return
    if view.controller is not None and view.controller.finished and view.controller_at > state.term_started_at:
        yield JobFinished(step=view.controller.step)
        return
    for node in state.nodes.values():
        yield from _of_node(state, view, node, now)
    for member in state.members.values():
        yield from _of_member(state, view, member, now)
    for incident in state.incidents.values():
        if incident.settle_at is not None and now >= incident.settle_at:
            yield IncidentSettled(incident=incident.incident)
        elif incident.decided_at is not None and (incident.resumed_at is None or incident.healed_at is None):
            yield from _of_incident(state, view, incident)


# -- the view -----------------------------------------------------------------------------------------------------------


def _node_view(state: State, view: View, seen: AgentPulsed, now: float) -> NodeView:
    alive = {(picture.member, picture.incarnation) for picture in seen.pulse.members if picture.alive}
    old = view.nodes.get(seen.node)
    since = old.absent_since if old is not None else {}
    absent = {
        member.member: since.get(member.member, now)
        for member in state.members_on(seen.node)
        if member.state in LIVE and (member.member, member.incarnation) not in alive
    }
    return NodeView(pulse=seen.pulse, at=now, absent_since=absent)


def _hear(view: View, pulse: ControllerPulse, now: float) -> View:
    """The controller's times are taken as ages, so that clocks of two hosts need not agree."""
    heard = {name: now - max(0.0, pulse.at - at) for name, at in pulse.seen.items()}
    old, rewind = view.controller, view.rewind
    if old is not None and pulse.lineage > old.lineage:
        rewind = Rewind(at=now, from_step=old.step, to_step=min(pulse.step, old.step))
    return replace(view, controller=pulse, controller_at=now, heard=view.heard | heard, rewind=rewind)


def picture_of(view: View, member: Member) -> MemberPicture | None:
    """The member's present incarnation as its node's agent last showed it."""
    seen = view.nodes.get(member.node)
    shown = seen.pulse.members if seen is not None else ()
    return next((p for p in shown if (p.member, p.incarnation) == (member.member, member.incarnation)), None)


# -- conclusions --------------------------------------------------------------------------------------------------------


def _of_ending(state: State, now: float) -> Iterator[Event]:
    ending = state.ending
    if ending is not None and state.phase == "stopping" and now >= ending.deadline_at:
        yield GraceOver(waited_for=", ".join(waits_for_nodes(state) if ending.nodes_ordered else leaving(state)))


def _of_node(state: State, view: View, node: Node, now: float) -> Iterator[Event]:
    there = [member for member in state.members_on(node.node) if member.state in LIVE or member.state == "planned"]
    if node.state not in ("silent", "waiting") or not there:
        return
    patience = state.plan.node_silent_seconds
    # A master that has only just begun to look has not yet heard anybody.
    since = max(node.seen_at, state.term_started_at, view.since)
    if node.state == "waiting":
        patience = max(patience, WAITING_SECONDS)
    heard = any(now - view.heard.get(member.member, 0.0) < patience for member in there)
    has_ears = state.heard_by_controller and all(member.role != "controller" for member in there)
    controller_heard = not has_ears or now - view.controller_at < patience
    lost = is_node_lost(
        agent_silent=now - since >= patience,
        members_heard=heard,
        controller_heard=controller_heard,
        waited_long=now - since >= LONG_SILENCES * patience,
    )
    elsewhere = any(other.state == "connected" for other in state.nodes.values())
    if lost and elsewhere:
        yield NodeLost(node=node.node, silent_since=since)


def _of_member(state: State, view: View, member: Member, now: float) -> Iterator[Event]:
    name, incarnation = member.member, member.incarnation
    if member.state in LIVE and _is_absent(state, view, member, now):
        yield MemberVanished(member=name, incarnation=incarnation, why="its node's agent shows no such process")
        return
    if member.state == "suspected" and member.suspicion is not None and member.condemned_in is None:
        yield from _of_suspect(view, member)
    elif member.state == "dead" and member.start_at is not None and now >= member.start_at and state.regroup is None:
        if placement.choose_node(state, member) is not None:
            yield StartDue(member=name, incarnation=incarnation)
    elif member.state == "finished" and state.heard_by_controller and member.role != "controller":
        goes_on = (
            view.controller is not None
            and not view.controller.finished
            and view.controller_at > member.since + LEFT_EARLY_SECONDS
        )
        if goes_on:
            yield MemberVanished(
                member=name, incarnation=incarnation, why="it left with exit code 0 while the job goes on"
            )


def _is_absent(state: State, view: View, member: Member, now: float) -> bool:
    """Whether an agent that does show pictures has not shown the member for too long; longer while its start is still to be carried out."""
    node = view.nodes.get(member.node)
    if node is None or state.nodes[member.node].state != "connected" or now - node.at >= ABSENT_SECONDS:
        return False
    since = max(node.absent_since.get(member.member, now), member.since)
    asked = any(
        isinstance(order.action, StartMember) and order.action.spec.member == member.member
        for _, order in state.orders.values()
    )
    return now - since >= (START_SECONDS if asked else ABSENT_SECONDS)


def _of_suspect(view: View, member: Member) -> Iterator[Event]:
    shown = picture_of(view, member)
    suspicion = member.suspicion
    if suspicion is None:
        return
    if shown is not None and shown.progress.beats > suspicion.progress.beats:
        yield SuspicionWithdrawn(member=member.member, incarnation=member.incarnation)
    elif (
        view.controller is not None
        and view.controller.at > suspicion.at
        and waited_for(view.controller) == {member.member}
    ):
        why = f"all others wait for it ({view.controller.waiting_for})"
        yield HangConfirmed(member=member.member, incarnation=member.incarnation, why=why)


def waited_for(pulse: ControllerPulse) -> set[MemberId]:
    """Policy members that the controller names as those it waits for; empty unless others have already done their part."""
    words = set(pulse.waiting_for.replace(",", " ").replace(";", " ").split())
    named = {member for member in pulse.in_epoch if member in words}
    return named if len(named) < len(pulse.in_epoch) else set()


def _of_incident(state: State, view: View, incident: Incident) -> Iterator[Event]:
    if state.regroup is not None and state.regroup.incident == incident.incident:
        return  # those that still run are being stopped: nobody is back before all are started together
    who = [state.members[name] for name in incident.members if name in state.members]
    back = [at for member in who if (at := _back_at(state, view, member)) is not None]
    if incident.kind in ("agent", "master"):
        nodes = state.nodes.values()
        around = all(node.state != "silent" for node in nodes)
        back, healed = ([max(node.seen_at for node in nodes)] if around else []), around
    else:
        healed = len(back) == len(who)
    resumed_at: float | None = None
    if _waits_for_commit(state, incident, who):
        pulse = view.controller
        if pulse is not None and pulse.committed_at > incident.occurred_at:
            resumed_at = pulse.committed_at
    elif back:
        resumed_at = max(min(back), incident.occurred_at)
    healed_at = max(back, default=incident.detected_at) if healed else None
    news = IncidentMoved(
        incident=incident.incident,
        resumed_at=resumed_at if incident.resumed_at is None else None,
        healed_at=healed_at if incident.healed_at is None else None,
        lost=_lost(view, incident) if resumed_at is not None else "",
    )
    if news.resumed_at is not None or news.healed_at is not None:
        yield news


def _lost(view: View, incident: Incident) -> str:
    """Steps that were committed and had to be computed again from their batches."""
    rewind = view.rewind
    if rewind is None or rewind.at < incident.occurred_at or rewind.from_step == rewind.to_step:
        return ""
    count = rewind.from_step - rewind.to_step
    return f"the compute of {count} step{'s' if count > 1 else ''}"


def _waits_for_commit(state: State, incident: Incident, who: list[Member]) -> bool:
    return state.heard_by_controller and (incident.kind != "member" or any(member.role != "rollout" for member in who))


def _back_at(state: State, view: View, member: Member) -> float | None:
    """When the member was seen to be back in; None when it is not."""
    if member.state not in ("running", "finished"):
        return None
    pulse, name = view.controller, member.member
    if member.role == "controller":
        back = pulse is not None and pulse.incarnation == member.incarnation
        return view.controller_at if back else None
    if member.role == "policy":
        back = pulse is not None and name in pulse.in_epoch and pulse.incarnations.get(name) == member.incarnation
        return view.controller_at if back else None
    seen = view.nodes.get(member.node)
    shown = picture_of(view, member)
    if seen is None or shown is None or not shown.alive:
        return None
    speaks = shown.progress.beats > 0 or not state.plan.members[name].reports_progress
    return _pulse_time(seen.pulse, shown) if speaks else None


def _pulse_time(pulse: Pulse, shown: MemberPicture) -> float:
    """When it last gave a sign of life."""
    return pulse.at - shown.progress.age_seconds
