"""The engine: `step(state, event, now) -> (state, actions)`. No clock, no I/O, no chance; the same events give the same state.

`begin` makes the first state. Observations go to `aimaster.brain.watch.observe`, which may answer with conclusions; these come
back here as events once they are journaled.
"""

from msgspec.structs import replace

from aimaster.brain import endings, incidents, leases, members, reports, unheard, verdicts
from aimaster.brain.budget import Budget
from aimaster.brain.draft import Draft
from aimaster.brain.events import (
    Action,
    AgentConnected,
    AgentDisconnected,
    DrillMarked,
    Event,
    FrontGone,
    GraceOver,
    HangConfirmed,
    IncidentMoved,
    IncidentSettled,
    JobFinished,
    MasterStarted,
    MemberUnheard,
    MemberVanished,
    NodeLost,
    PortChosen,
    Reported,
    StartDue,
    StopRequested,
    SuspicionWithdrawn,
)
from aimaster.brain.state import ENDED, LIVE, Member, Node, State
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.topology import JobPlan

MAX_DRILLS = 100


def begin(event: MasterStarted, now: float) -> State:
    """The state of a run whose first master starts."""
    plan = event.plan
    return State(
        plan=plan,
        term=event.term,
        attempt=event.attempt,
        started_at=now,
        term_started_at=now,
        members={name: _planned(plan, name, now, Incarnation(0)) for name in plan.members},
        nodes={name: Node(node=name) for name in plan.nodes},
    )


def step(state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    """Believe one event. What is to be done comes back in order; of a state that has ended nothing does."""
    d = Draft(state, now)
    if isinstance(event, MasterStarted):
        _master_started(d, event)
    elif state.phase not in ENDED:
        _believe(d, event)
    return d.state, tuple(d.actions)


def _believe(d: Draft, event: Event) -> None:
    match event:
        case AgentConnected() if event.hello.node in d.state.nodes:
            reports.connected(d, event.hello)
        case AgentDisconnected() if event.node in d.state.nodes:
            reports.disconnected(d, event.node, event.seen_at)
        case Reported():
            reports.reported(d, event.node, event.outbox_id, event.report)
        case NodeLost() if event.node in d.state.nodes:
            reports.lost(d, event.node, event.silent_since, event.newest)
        case IncidentMoved():
            incidents.moved(d, event)
        case IncidentSettled():
            incidents.settled(d, event.incident, event.verdict)
        case PortChosen():
            members.port_chosen(d, event.port, event.incarnation)
        case HangConfirmed() | SuspicionWithdrawn() | MemberUnheard() | MemberVanished() | StartDue():
            _believe_of_member(d, event)
        case _:
            _believe_of_job(d, event)


def _believe_of_member(
    d: Draft, event: HangConfirmed | SuspicionWithdrawn | MemberUnheard | MemberVanished | StartDue
) -> None:
    match event:
        case HangConfirmed():
            leases.hang_confirmed(d, event.member, event.incarnation, event.why)
        case SuspicionWithdrawn():
            leases.withdrawn(d, event.member, event.incarnation)
        case MemberUnheard():
            unheard.go_on_without(d, event)
        case MemberVanished():
            _member_vanished(d, event)
        case StartDue():
            members.start_due(d, event.member, event.incarnation)


def _believe_of_job(d: Draft, event: Event) -> None:
    match event:
        case StopRequested():
            endings.begin(d, "stopped", f"stopped by {event.by}: {event.reason}")
        case FrontGone():
            reason = f"the front process (pid {event.pid}) is gone"
            endings.begin(d, "stopped", reason, front_gone=True, flush_seconds=endings.FRONT_GONE_SECONDS)
        case DrillMarked():
            drills = d.state.drills | {event.subject: event.note}
            d.change(drills=dict(list(drills.items())[-MAX_DRILLS:]))
        case JobFinished():
            endings.begin(d, "finished", f"all {event.step} steps are committed")
            leases.end_silent(d)
        case GraceOver():
            endings.grace_over(d, event.waited_for)
        case _:
            pass  # it speaks of a node that is not of this job


def _member_vanished(d: Draft, event: MemberVanished) -> None:
    member = d.state.members.get(event.member)
    if member is None or member.incarnation != event.incarnation or d.state.ending is not None:
        return
    if member.state in LIVE or member.state == "finished":
        incidents.death(d, event.member, verdicts.vanished(member, d.now, event.why), d.now)
        members.ask_for_port(d)


# -- a new master -------------------------------------------------------------------------------------------------------


def _master_started(d: Draft, event: MasterStarted) -> None:
    """The next master of the same run goes on where the last one was; one with a new front begins a new attempt."""
    state = d.state
    d.change(plan=event.plan, term=event.term, attempt=event.attempt, term_started_at=d.now, next_order=1)
    if event.attempt != state.attempt:
        _attempt_again(d, event.plan)
        return
    if state.phase in ENDED:
        return
    for node in state.nodes.values():
        if node.state == "connected":
            d.node(node.node, state="silent", seen_at=d.now)
    d.renew_orders()
    if state.ending is not None:
        deadline = d.now + endings.FLUSH_SECONDS
        d.change(ending=replace(state.ending, deadline_at=deadline))
        return
    occurred_at = event.previous_alive_at or d.now
    reports.healed_in_place(d, "master", "master", verdicts.master_gone(occurred_at, d.now - occurred_at), occurred_at)


def _attempt_again(d: Draft, plan: JobPlan) -> None:
    """The same run under a new front: everything is started again, with fresh budgets and the next incarnations."""
    old_members, old_nodes = d.state.members, d.state.nodes
    members_now: dict[MemberId, Member] = {}
    for name in plan.members:
        old = old_members.get(name)
        following = Incarnation(old.incarnation + (old.started_at > 0)) if old is not None else Incarnation(0)
        members_now[name] = _planned(plan, name, d.now, following)
    nodes_now = {
        name: Node(node=name, outbox_id=old_nodes[name].outbox_id, acknowledged=old_nodes[name].acknowledged)
        if name in old_nodes
        else Node(node=name)
        for name in plan.nodes
    }
    d.change(
        phase="starting",
        ended_at=None,
        ending=None,
        regroup=None,
        orders={},
        members=members_now,
        nodes=nodes_now,
        group_budget=Budget(),
        drills={},
    )


def _planned(plan: JobPlan, name: MemberId, now: float, incarnation: Incarnation) -> Member:
    return Member(
        member=name, role=plan.members[name].role, node=plan.placement[name], since=now, incarnation=incarnation
    )
