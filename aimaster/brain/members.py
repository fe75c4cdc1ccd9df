"""What is done about members: starts, restarts one by one or all together, kills of the hung, and the loss of a node's members."""

from typing import Final

from aimaster.brain import budget, endings, placement
from aimaster.brain import remedy as ladder
from aimaster.brain.draft import Draft
from aimaster.brain.events import ChoosePort, Propose
from aimaster.brain.state import LIVE, Incident, Member, Regroup, State
from aimaster.wire import actions as orders
from aimaster.wire.health import Action
from aimaster.wire.ids import Incarnation, MemberId, NodeId

ELASTIC: Final = frozenset({"policy", "rollout"})
"""Roles whose members come and go while the job goes on."""
GROUP_GRACE_SECONDS: Final = 5.0


def bury(d: Draft, name: MemberId, exit_code: int | None) -> Member:
    """Note that the present incarnation is dead; the open orders about it lose their sense."""
    member = d.state.members[name]
    quick = member.quick_deaths + 1 if d.now - member.started_at < budget.YOUNG_SECONDS else 0
    d.drop_orders_about(name)
    return d.member(name, state="dead", exit_code=exit_code, quick_deaths=quick, suspicion=None, start_at=None)


def start_planned(d: Draft, node: NodeId) -> None:
    """Start what the plan puts on a node that has come."""
    for member in d.state.members_on(node):
        if member.state == "planned":
            d.start(member.member, node, member.incarnation, "plan")


def cure(d: Draft, incident: Incident) -> Action | None:
    """Begin the remedy for every death of the incident that has none; the rung that was taken for the first."""
    taken: Action | None = None
    gone: list[MemberId] = []
    for name, incarnation in incident.deaths:
        member = d.state.members.get(name)
        if member is None or member.incarnation != incarnation or member.state != "dead" or member.start_at is not None:
            continue
        if member.role == "policy":
            gone.append(name)
        if d.state.ending is None and d.state.regroup is None:
            action = choose(d, incident, member)
            alone = action == "restart_job" and len(d.state.members) == 1
            taken = taken or ("restart_process" if alone else action)
            _act(d, incident, member, action)
    if gone:
        d.actions.append(Propose(leave=tuple(gone), cause=f"incident {incident.incident}"))
    return taken


def choose(d: Draft, incident: Incident, member: Member) -> Action:
    """The rung of the ladder for this death, or for the death that is about to be brought about."""
    plan, first = d.state.plan, incident.verdict.action
    purse = d.state.group_budget if d.state.together else member.budget
    used = purse.used(now=d.now, window_seconds=plan.restart_window_seconds)
    others = sum(other.role == member.role and other.state in LIVE for other in d.state.members.values())
    return ladder.choose(
        first=first,
        budget_left=incident.drill or budget.has_budget(used=used, allowed=plan.max_restarts),
        together=d.state.together,
        node_gone=d.state.nodes[member.node].state in ("lost", "stopped"),
        goes_on_without=ladder.may_go_on_without(role_is_elastic=member.role in ELASTIC, others_of_role=others),
    )


def _act(d: Draft, incident: Incident, member: Member, action: Action) -> None:
    if action == "stop_job":
        allowed = d.state.plan.max_restarts
        limit = f" (all {allowed} restarts are used up)" if allowed else " (no restart is allowed)"
        spent = "" if incident.verdict.action == "stop_job" else limit
        endings.begin(d, "failed", f"{incident.verdict.summary or member.member + ' died'}{spent}")
        return
    window = d.state.plan.restart_window_seconds
    if action == "restart_job":
        if not incident.drill:
            d.change(group_budget=d.state.group_budget.spend(now=d.now, window_seconds=window))
        begin_regroup(d, incident)
        return
    if action == "replace_node" and d.state.nodes[member.node].state == "connected":
        d.node(member.node, blamed=True)
    used = member.budget.used(now=d.now, window_seconds=window)
    if not incident.drill and not budget.has_budget(used=used, allowed=d.state.plan.max_restarts):
        room_at = member.budget.room_at(window_seconds=window)
        if room_at is not None:  # until then the job goes on without it
            purse = member.budget.spend(now=room_at, window_seconds=window)
            d.member(member.member, budget=purse, start_at=room_at)
        return
    # A drill says nothing about the member: it neither costs a restart nor counts as dying young.
    quick = max(0, member.quick_deaths - 1) if incident.drill else member.quick_deaths
    pause = (
        budget.LONGEST_PAUSE_SECONDS
        if action == "reform_without"
        else budget.pause_seconds(quick_deaths=0 if incident.drill else quick)
    )
    purse = member.budget if incident.drill else member.budget.spend(now=d.now, window_seconds=window)
    d.member(member.member, budget=purse, quick_deaths=quick, start_at=d.now + pause)
    if pause == 0:
        start_due(d, member.member, member.incarnation)


def start_due(d: Draft, name: MemberId, incarnation: Incarnation) -> None:
    """Start a dead member again where there is a node for it; else it goes on waiting."""
    member = d.state.members.get(name)
    if member is None or member.incarnation != incarnation or member.state != "dead" or member.start_at is None:
        return
    node = placement.choose_node(d.state, member)
    if node is None or d.state.ending is not None or d.state.regroup is not None:
        return
    d.member(name, restarts=member.restarts + 1)
    d.start(name, node, Incarnation(member.incarnation + 1), _cause(d, name))


def _cause(d: Draft, name: MemberId) -> str:
    about = [incident.incident for incident in d.state.incidents.values() if name in incident.members]
    return f"incident {about[-1]}" if about else "restart"


# -- all together -------------------------------------------------------------------------------------------------------


def begin_regroup(d: Draft, incident: Incident) -> None:
    """Stop the other ranks; when all are down they start together on a new port."""
    following = Incarnation(1 + max(member.incarnation for member in d.state.members.values()))
    d.change(regroup=Regroup(incident=incident.incident, incarnation=following))
    d.incident(incident.incident, members=tuple(d.state.members))
    for member in d.state.members.values():
        stop_for_regroup(d, member)
    ask_for_port(d)


def stop_for_regroup(d: Draft, member: Member) -> None:
    """While the ranks regroup, one that lives is to stop."""
    if d.state.regroup is not None and member.state in LIVE:
        d.drop_orders_about(member.member)
        stop = orders.StopMember(
            member=member.member, incarnation=member.incarnation, grace_seconds=GROUP_GRACE_SECONDS
        )
        d.order(member.node, stop, f"incident {d.state.regroup.incident}")


def ask_for_port(d: Draft) -> None:
    """Ask for a port once every rank is down and has a node."""
    if d.state.regroup is not None and group_nodes(d.state) is not None:
        d.actions.append(ChoosePort(incarnation=d.state.regroup.incarnation))


def port_chosen(d: Draft, port: int, incarnation: Incarnation) -> None:
    """Start all ranks."""
    regroup = d.state.regroup
    nodes = group_nodes(d.state)
    if regroup is None or regroup.incarnation != incarnation or nodes is None:
        return
    restarts = 1 + max(member.restarts for member in d.state.members.values())
    env = {"MASTER_PORT": str(port), "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    cause = f"incident {regroup.incident}"
    d.change(regroup=None)
    for name, node in nodes.items():
        d.member(name, restarts=restarts)
        wanted = {key: value for key, value in env.items() if key in d.state.plan.members[name].env}
        d.start(name, node, incarnation, cause, wanted)


def group_nodes(state: State) -> dict[MemberId, NodeId] | None:
    """A node for each rank; None while one still runs or one has no node."""
    nodes: dict[MemberId, NodeId] = {}
    for member in state.members.values():
        node = placement.choose_node(state, member)
        if member.state in LIVE or node is None:
            return None
        nodes[member.member] = node
    return nodes
