"""Pictures of now, and what may be concluded from them. `observe` moves the view; `conclusions` looks at state and view and says
which events follow. Nothing here changes the state: a conclusion counts once it is journaled and stepped.
"""

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from aimaster.brain import members, overview, placement, recovery, unheard
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
from aimaster.brain.state import LIVE, Commit, Member, Node, NodeView, Rewind, State, View
from aimaster.wire.actions import StartMember
from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.messages import ControllerPulse

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


MAX_COMMITS: Final = 50


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
    yield from unheard.conclusions(state, view, now)
    for incident in state.incidents.values():
        if incident.settle_at is not None and now >= incident.settle_at:
            yield IncidentSettled(incident=incident.incident)
        elif incident.decided_at is not None and (incident.resumed_at is None or incident.healed_at is None):
            yield from recovery.moves(state, view, incident)


# -- the view -----------------------------------------------------------------------------------------------------------


def _node_view(state: State, view: View, seen: AgentPulsed, now: float) -> NodeView:
    alive = {(picture.member, picture.incarnation): picture for picture in seen.pulse.members if picture.alive}
    old = view.nodes.get(seen.node)
    since = old.absent_since if old is not None else {}
    asking = old.asking_since if old is not None else {}
    there = {member.member: alive.get((member.member, member.incarnation)) for member in state.members_on(seen.node)}
    absent = {
        member.member: since.get(member.member, now)
        for member in state.members_on(seen.node)
        if member.state in LIVE and (member.member, member.incarnation) not in alive
    }
    asks = {name: asking.get(name, now) for name, shown in there.items() if shown and unheard.is_asking(shown)}
    logs = overview.with_pictures(old.logs if old is not None else {}, seen.node, seen.pulse.logs)
    return NodeView(pulse=replace(seen.pulse, logs=()), at=now, absent_since=absent, asking_since=asks, logs=logs)


def _hear(view: View, pulse: ControllerPulse, now: float) -> View:
    """The controller's times are taken as ages, so that clocks of two hosts need not agree."""
    heard = {name: now - max(0.0, pulse.at - at) for name, at in pulse.seen.items()}
    old, rewind = view.controller, view.rewind
    if old is not None and pulse.lineage > old.lineage:
        rewind = Rewind(at=now, from_step=old.step, to_step=min(pulse.step, old.step))
    goes_on = old is not None and old.incarnation == pulse.incarnation
    paused = now - view.controller_at >= unheard.FRESH_SECONDS
    return replace(
        view,
        controller=pulse,
        controller_at=now,
        controller_since=view.controller_since if goes_on and not paused else now,
        commits=_with_commit(view, pulse, now),
        heard=view.heard | heard,
        rewind=rewind,
    )


def _with_commit(view: View, pulse: ControllerPulse, now: float) -> tuple[Commit, ...]:
    """The commits with the newest that the pulse tells of, if that is another one."""
    old = view.controller
    known = old is not None and (old.incarnation, old.committed_at) == (pulse.incarnation, pulse.committed_at)
    if not pulse.committed_at or known:
        return view.commits
    # The epoch may have changed between the commit and the pulse.
    told = next((one for one in (pulse, old) if one and one.epoch == (pulse.committed_epoch or pulse.epoch)), None)
    members = {name: told.incarnations.get(name, Incarnation(0)) for name in told.in_epoch} if told else None
    at = now - max(0.0, pulse.at - pulse.committed_at)
    return (*view.commits, Commit(at=at, controller=pulse.incarnation, members=members))[-MAX_COMMITS:]


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
        pulse = view.controller
        newest = None if pulse is None else Version(pulse.lineage, pulse.step)
        yield NodeLost(node=node.node, silent_since=since, newest=newest)


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
    shown = recovery.picture_of(view, member)
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
