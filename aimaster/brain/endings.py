"""How a job ends: finished, failed or stopped; members leave, agents flush and stop, then the master ends.

    finished -> members leave by themselves -> StopNode to all -> all stopped -> ended
    failed, stopped ------------------------^
Each wait has a deadline; what did not answer by then is named in the reason.
"""

from typing import Final

from msgspec.structs import replace

from aimaster.brain.draft import REACHABLE, Draft
from aimaster.brain.state import LIVE, Ending, Outcome, State
from aimaster.wire import actions as orders
from aimaster.wire.health import Finding
from aimaster.wire.ids import MemberId, NodeId

LEAVE_SECONDS: Final = 30.0
"""For members of a finished job to seal their last snapshot and leave."""
FLUSH_SECONDS: Final = 30.0
"""For agents to flush and stop their members."""
FRONT_GONE_SECONDS: Final = 8.0
"""The same after the front is gone: agents and shims end everything by themselves within 10 s."""


def begin(
    d: Draft, outcome: Outcome, reason: str, *, front_gone: bool = False, flush_seconds: float = FLUSH_SECONDS
) -> None:
    """Begin the end; an end that has begun keeps its outcome, and only its deadline may come nearer."""
    if d.state.phase in ("finished", "failed"):
        return
    if d.state.ending is not None:
        deadline = min(d.state.ending.deadline_at, d.now + flush_seconds)
        gone = front_gone or d.state.ending.front_gone
        d.change(ending=replace(d.state.ending, deadline_at=deadline, front_gone=gone))
        return
    ending = Ending(outcome=outcome, reason=reason, at=d.now, front_gone=front_gone, deadline_at=d.now + LEAVE_SECONDS)
    d.change(phase="stopping", ending=ending, regroup=None)
    d.drop_orders(lambda _, action: isinstance(action, orders.StartMember))
    if outcome == "finished" and leaving(d.state):
        return
    stop_nodes(d, flush_seconds)


def stop_nodes(d: Draft, flush_seconds: float = FLUSH_SECONDS) -> None:
    """Order every node to flush and stop."""
    ending = d.state.ending
    if ending is None:
        return
    d.change(ending=replace(ending, nodes_ordered=True, deadline_at=d.now + flush_seconds))
    for node in d.state.nodes:
        stop_node(d, node)
    end_if_stopped(d)


def stop_node(d: Draft, node: NodeId) -> None:
    """Order one node to flush and stop, unless that order is open already."""
    ending = d.state.ending
    ordered = any(to == node and isinstance(order.action, orders.StopNode) for to, order in d.state.orders.values())
    if ending is not None and not ordered:
        d.order(node, orders.StopNode(remove_memory=not ending.front_gone), ending.reason)


def node_stopped(d: Draft, node: NodeId) -> None:
    """A node has done it."""
    d.node(node, state="stopped")
    d.drop_orders(lambda to, _: to == node)
    for member in d.state.members_on(node):
        if member.state in LIVE:
            d.member(member.member, state="stopped")
    end_if_stopped(d)


def member_left(d: Draft) -> None:
    """A member of an ending job is gone; after the last, the nodes stop."""
    ending = d.state.ending
    if ending is not None and not ending.nodes_ordered and not leaving(d.state):
        stop_nodes(d)


def leaving(state: State) -> list[MemberId]:
    """Members that are still to leave by themselves. The controller serves them to the last, and is stopped with its node."""
    return [m.member for m in state.members.values() if m.state in LIVE and m.role != "controller"]


def grace_over(d: Draft, waited_for: str) -> None:
    """Give up the present wait."""
    ending = d.state.ending
    if ending is None or d.state.phase != "stopping" or d.now < ending.deadline_at:
        return
    if ending.outcome == "finished":  # nothing is missing of the job itself
        d.find(_not_waited_for(waited_for, d.now))
    else:
        d.change(ending=replace(ending, reason=f"{ending.reason}; gave up waiting for {waited_for}"))
    if ending.nodes_ordered:
        _end(d)
    else:
        stop_nodes(d)


def _not_waited_for(waited_for: str, now: float) -> Finding:
    return Finding(
        id="end.not-waited-for",
        sign="end.not-waited-for",
        category="unknown",
        role="self",
        severity="warning",
        time_seconds=now,
        details={"message": f"the job is finished; gave up waiting for {waited_for} to leave"},
    )


def end_if_stopped(d: Draft) -> None:
    if d.state.ending is not None and d.state.ending.nodes_ordered and not waits_for_nodes(d.state):
        _end(d)


def waits_for_nodes(state: State) -> list[NodeId]:
    """Nodes that have not said that they stopped; one whose agent has yet to come is told when it does."""
    return [node.node for node in state.nodes.values() if node.state in REACHABLE or node.state == "waiting"]


def _end(d: Draft) -> None:
    ending = d.state.ending
    if ending is not None and d.state.phase == "stopping":
        d.change(phase="finished" if ending.outcome == "finished" else "failed", ended_at=d.now, orders={})
