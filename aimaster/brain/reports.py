"""What the engine does with an agent's words: who is on the line, what lives there, and what its reports say."""

import msgspec

from aimaster.brain import endings, incidents, leases, members, roots, verdicts
from aimaster.brain.draft import Draft
from aimaster.brain.events import Send
from aimaster.brain.exits import at_the_end
from aimaster.brain.remedy import is_echo
from aimaster.brain.state import LIVE, Member, Node, SubjectKind
from aimaster.wire import actions as orders
from aimaster.wire.checkpoint import Version
from aimaster.wire.health import Finding, Subject, Verdict
from aimaster.wire.ids import Incarnation, MemberId, NodeId, Term
from aimaster.wire.messages import (
    Found,
    HangSuspected,
    Hello,
    MemberExited,
    MemberPicture,
    MemberStarted,
    OrderDone,
    Report,
    SnapshotMoved,
    SnapshotsDeleted,
)

MAX_STORED = 16
MAX_UNSEEN = 20
"""Ends of agents between two that were met, each an incident of its own; more are one cause."""

# -- the line -----------------------------------------------------------------------------------------------------------


def connected(d: Draft, hello: Hello) -> None:
    """An agent is on the line: adopt what lives there, mourn what does not, give it what it has to do."""
    old = d.state.nodes[hello.node]
    emptied = old.outbox_id not in ("", hello.outbox_id)
    new_agent = old.agent_pid not in (0, hello.pid)
    fields = {
        "url": hello.url, "shards": hello.shards, "labels": hello.labels,
        "agent_pid": hello.pid, "agent_starts": hello.starts, "seen_at": d.now,
    }  # fmt: skip
    if old.outbox_id != hello.outbox_id:
        fields |= {"outbox_id": hello.outbox_id, "acknowledged": 0}
    _catch_up(d, hello)
    d.node(hello.node, state="connected", **fields)
    open_before = [name for name, (to, _) in d.state.orders.items() if to == hello.node]
    for picture in hello.members:
        _meet(d, hello.node, picture)
    if emptied and old.state in ("connected", "silent"):
        _replaced(d, old, hello)
    elif new_agent and old.state in ("connected", "silent") and d.state.ending is None:
        occurred_at = old.seen_at if old.state == "silent" else d.now
        verdict = verdicts.agent_gone(hello.node, occurred_at, old.agent_pid)
        healed_in_place(d, "agent", f"agent-{hello.node}", verdict, occurred_at)
        unseen = hello.starts - old.agent_starts - 1 if hello.starts and old.agent_starts else 0
        for _ in range(min(unseen, MAX_UNSEEN)):
            verdict = verdicts.agent_never_came(hello.node, occurred_at)
            healed_in_place(d, "agent", f"agent-{hello.node}", verdict, occurred_at)
    for name in open_before:
        if name in d.state.orders:
            d.actions.append(Send(node=hello.node, order=d.state.orders[name][1]))
    if d.state.ending is None:
        members.start_planned(d, hello.node)
        members.ask_for_port(d)
        _tell_peers(d)
    elif d.state.ending.nodes_ordered:
        endings.stop_node(d, hello.node)


def _catch_up(d: Draft, hello: Hello) -> None:
    """An agent that remembers more than this master (its journal was lost) is believed: terms and starts go on above what it has seen."""
    if hello.term_seen > d.state.term:
        d.change(term=Term(hello.term_seen + 1))
        d.renew_orders()
        for node, order in d.state.orders.values():
            if d.state.nodes[node].state == "connected":
                d.actions.append(Send(node=node, order=order))
    alive = {picture.member for picture in hello.members if picture.alive}
    for name, incarnation in hello.started.items():
        member = d.state.members.get(name)
        if member is not None and member.state == "planned" and name not in alive and incarnation >= member.incarnation:
            d.member(name, incarnation=Incarnation(incarnation + 1))


def healed_in_place(d: Draft, kind: SubjectKind, subject: str, verdict: Verdict, occurred_at: float) -> None:
    """Note the end and the return of a program that training does not notice."""
    incident = incidents.open_incident(d, kind, subject, verdict, occurred_at, ())
    d.incident(incident.incident, action="restart_process", decided_at=d.now)


def disconnected(d: Draft, node: NodeId, seen_at: float) -> None:
    if d.state.nodes[node].state != "connected":
        return
    d.node(node, state="silent", seen_at=seen_at)
    if d.state.ending is not None and d.state.ending.front_gone:
        endings.node_stopped(d, node)  # it has seen that the front is gone, and ended by itself


def lost(d: Draft, node: NodeId, silent_since: float, newest: Version | None) -> None:
    """Nobody on the node was heard for too long: its members are placed elsewhere."""
    if d.state.nodes[node].state not in ("silent", "waiting"):
        return
    d.node(node, state="lost", seen_at=silent_since)
    d.drop_orders(lambda to, _: to == node)
    if d.state.ending is not None:
        for member in d.state.members_on(node):
            if member.state in LIVE:
                d.member(member.member, state="dead")
        endings.member_left(d)
        endings.end_if_stopped(d)
        return
    why = f"neither its agent nor any of its members was heard for {d.now - silent_since:.0f} s"
    who = [member for member in d.state.members_on(node) if member.state in LIVE or member.state == "planned"]
    _lose(d, node, who, silent_since, verdicts.node_lost(node, silent_since, why), newest)
    _tell_peers(d)


def _replaced(d: Draft, old: Node, hello: Hello) -> None:
    """The agent came back without its folders: an empty node under the same name; what ran there is gone."""
    alive = {(picture.member, picture.incarnation) for picture in hello.members if picture.alive}
    gone = [
        member
        for member in d.state.members_on(old.node)
        if member.state in LIVE and (member.member, member.incarnation) not in alive
    ]
    if gone and d.state.ending is None:
        since = old.seen_at if old.state == "silent" else d.now
        _lose(d, old.node, gone, since, verdicts.node_replaced(old.node, since), None)


def _lose(d: Draft, node: NodeId, who: list[Member], since: float, verdict: Verdict, newest: Version | None) -> None:
    """Its members are dead in one incident; one that was being killed stays in its own. Who holds copies of theirs flushes them."""
    condemned = [member for member in who if member.condemned_in in d.state.incidents]
    with_it = [member for member in who if member not in condemned]
    for member in with_it:
        members.bury(d, member.member, None)
    names = tuple(member.member for member in with_it)
    incident = incidents.open_incident(d, "node", node, verdict, since, names)
    d.incident(incident.incident, deaths=tuple((member.member, member.incarnation) for member in with_it))
    incidents.decide(d, incident.incident)
    for member in condemned:
        incidents.death(d, member.member, verdict, d.now)
    if not d.state.incidents[incident.incident].action:
        d.incident(incident.incident, action="replace_node")
    if who:
        order = orders.TakeOverFlush(node=node, members=tuple(member.member for member in who), newest=newest)
        for other in d.state.nodes.values():
            if other.node != node and other.state == "connected":
                d.order(other.node, order, f"incident {incident.incident}")


def _meet(d: Draft, node: NodeId, picture: MemberPicture) -> None:
    """Adopt a living member that is ours, kill one of an earlier incarnation or one that runs elsewhere by now."""
    member = d.state.members.get(picture.member)
    if not picture.alive:
        return
    ours = member is not None and member.node == node
    never_ordered = member is not None and member.state == "planned" and picture.incarnation >= member.incarnation
    if member is not None and ours and (member.incarnation == picture.incarnation or never_ordered):
        if member.state not in ("stopped", "finished", "suspected"):
            d.drop_orders(
                lambda _, action: isinstance(action, orders.StartMember) and action.spec.member == picture.member
            )
            started = member.started_at or d.now
            _runs(d, member, picture.incarnation, started)
            members.stop_for_regroup(d, d.member(picture.member, process=picture.process))
        return
    reason = f"a newer {picture.member} was started, or it is not of this job"
    d.order(node, orders.KillMember(member=picture.member, incarnation=picture.incarnation, reason=reason), "fencing")


def _runs(d: Draft, member: Member, incarnation: Incarnation, started_at: float) -> None:
    d.member(
        member.member, state="running", incarnation=incarnation, started_at=started_at, start_at=None, suspicion=None
    )
    if d.state.phase == "starting" and all(
        other.state not in ("planned", "starting") for other in d.state.members.values()
    ):
        d.change(phase="running")


def _tell_peers(d: Draft) -> None:
    """Tell every agent the addresses of all, when they changed."""
    peers = {
        node.node: orders.PeerAddress(url=node.url, shards=node.shards, labels=node.labels)
        for node in d.state.nodes.values()
        if node.state in ("connected", "silent") and node.url
    }
    if len(d.state.nodes) < 2:
        return
    d.drop_orders(lambda _, action: isinstance(action, orders.SetPeers))
    for node in d.state.nodes.values():
        if node.state == "connected":
            d.order(node.node, orders.SetPeers(peers=peers), "plan")


# -- reports ------------------------------------------------------------------------------------------------------------


def reported(d: Draft, node: NodeId, outbox_id: str, report: Report) -> None:
    """Believe a report once."""
    known = d.state.nodes.get(node)
    if known is None or known.outbox_id != outbox_id or report.sequence <= known.acknowledged:
        return
    d.node(node, acknowledged=report.sequence)
    match report.event:
        case MemberStarted() as event:
            _started(d, node, event)
        case MemberExited() as event:
            _exited(d, node, event)
        case HangSuspected() as event:
            if (member := _present(d, event.member, event.incarnation, node)) is not None:
                leases.suspected(d, member, event)
        case Found() as event:
            d.find(event.finding)
        case SnapshotMoved() as event:
            _snapshot(d, node, event)
        case SnapshotsDeleted(folders=folders):
            d.change(stored=tuple(old for old in d.state.stored if old.name.rpartition("/")[0] not in folders))
        case OrderDone() as event:
            _done(d, event)


def _present(d: Draft, name: MemberId, incarnation: Incarnation, node: NodeId) -> Member | None:
    """The member, if the report speaks of its present incarnation there."""
    member = d.state.members.get(name)
    return member if member is not None and (member.incarnation, member.node) == (incarnation, node) else None


def _started(d: Draft, node: NodeId, event: MemberStarted) -> None:
    member = _present(d, event.member, event.incarnation, node)
    if member is not None and member.state in LIVE:
        _runs(d, member, event.incarnation, member.started_at)
        d.member(event.member, process=event.process)


def _exited(d: Draft, node: NodeId, event: MemberExited) -> None:
    member = _present(d, event.member, event.incarnation, node)
    if member is None or member.state not in LIVE:
        return
    if event.expected or d.state.ending is not None:
        if not event.expected and event.member in d.state.drills:
            incidents.noted(d, member, roots.of_exit(d.state, member, event), event.at)
        finished = event.exit_code == 0 and d.state.regroup is None
        d.drop_orders_about(event.member)
        state = "finished" if finished else "stopped"
        member = d.member(event.member, state=state, exit_code=event.exit_code, suspicion=None)
        if finished and d.state.plan.kind == "command":
            incidents.ended_well(d, member)
        _left(d)
        return
    event = msgspec.structs.replace(event, findings=at_the_end(event.findings, event.at))
    verdict = roots.of_exit(d.state, member, event)
    echo = not roots.has_refused(event) and is_echo(
        roles=(finding.role for finding in event.findings if finding.kind == "sign"),
        is_victim=roots.is_victim(verdict, event),
        was_killed=roots.was_killed(event),
    )
    incidents.death(d, event.member, verdict, event.at, findings=event.findings, exit_code=event.exit_code, echo=echo)
    members.ask_for_port(d)


def _left(d: Draft) -> None:
    """After an expected exit: perhaps all are down, or all are done."""
    if d.state.ending is not None:
        endings.member_left(d)
    elif d.state.regroup is not None:
        members.ask_for_port(d)
    elif d.state.plan.kind == "command" and all(member.state == "finished" for member in d.state.members.values()):
        endings.begin(d, "finished", "every process ended with exit code 0")


def _snapshot(d: Draft, node: NodeId, event: SnapshotMoved) -> None:
    place = event.place
    if event.error is None and place.tier == "storage":
        others = [old for old in d.state.stored if old.name != place.name]
        d.change(stored=(*others, place)[-MAX_STORED:])
    elif event.error is not None:
        d.find(
            Finding(
                id=f"snapshot-{node}-{place.tier}",
                sign="snapshot.not_moved",
                category="node.disk_full" if place.tier == "storage" else "unknown",
                role="self",
                severity="warning",
                subject=Subject(node=node),
                node=node,
                time_seconds=d.now,
                details={"message": f"a snapshot of {place.member} did not reach {place.tier}: {event.error}"},
            )
        )


def _done(d: Draft, event: OrderDone) -> None:
    known = d.state.orders.get(event.order_id)
    if known is None:
        return
    node, order = known
    d.drop_orders(lambda to, action: to == node and action == order.action)
    if isinstance(order.action, orders.StopNode):
        endings.node_stopped(d, node)
