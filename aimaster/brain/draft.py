"""A state in the making: the engine's handlers change it through a few plain verbs, and collect the actions beside it.

Records stay frozen; a draft only holds which ones count now. It lives for one step and is never kept.
"""

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from aimaster.brain.events import Action, Send
from aimaster.brain.state import Incident, Member, Node, State
from aimaster.wire import actions as orders
from aimaster.wire.health import Finding
from aimaster.wire.ids import Incarnation, IncidentId, MemberId, NodeId, OrderId

MAX_FINDINGS: Final = 20
REACHABLE: Final = frozenset({"connected", "silent"})
"""Nodes that an order may be given to; for a silent one it waits for the agent's return."""


class Draft:
    """One step of the engine."""

    def __init__(self, state: State, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[Action] = []

    # -- records -------------------------------------------------------------------------------------------------------

    def change(self, **changes: Any) -> None:
        """Change fields of the state itself."""
        self.state = replace(self.state, **changes)

    def member(self, name: MemberId, **changes: Any) -> Member:
        """Change a member; a new `state` also sets `since`."""
        old = self.state.members[name]
        if "state" in changes and changes["state"] != old.state:
            changes.setdefault("since", self.now)
        new = replace(old, **changes)
        self.change(members=self.state.members | {name: new})
        return new

    def node(self, name: NodeId, **changes: Any) -> Node:
        """Change a node."""
        new = replace(self.state.nodes[name], **changes)
        self.change(nodes=self.state.nodes | {name: new})
        return new

    def incident(self, name: IncidentId, **changes: Any) -> Incident:
        """Change an incident."""
        new = replace(self.state.incidents[name], **changes)
        self.change(incidents=self.state.incidents | {name: new})
        return new

    def find(self, finding: Finding) -> None:
        """Keep a finding; the same one seen again takes the place of the older."""
        key = finding.id or (finding.sign, finding.node, finding.subject)
        others = [old for old in self.state.findings if (old.id or (old.sign, old.node, old.subject)) != key]
        self.change(findings=(*others, finding)[-MAX_FINDINGS:])

    # -- orders --------------------------------------------------------------------------------------------------------

    def order(self, node: NodeId, action: orders.Action, cause: str) -> None:
        """Give an order to a node that can be reached; never to one that is lost or stopped."""
        if self.state.nodes[node].state not in REACHABLE:
            return
        order = self.name_order(action, cause)
        self.change(orders=self.state.orders | {order.order_id: (node, order)})
        if self.state.nodes[node].state == "connected":
            self.actions.append(Send(node=node, order=order))

    def name_order(self, action: orders.Action, cause: str) -> orders.Order:
        """An order under the present term, with a name that no agent has heard before."""
        term, number = self.state.term, self.state.next_order
        self.change(next_order=number + 1)
        name = OrderId(f"{term}.{number}.{round(self.state.term_started_at * 1000)}")
        return orders.Order(order_id=name, term=term, cause=cause, action=action)

    def renew_orders(self) -> None:
        """Orders that are still open are given again under the present term; each is harmless when it was carried out already."""
        open_before = self.state.orders.values()
        self.change(next_order=1)
        renewed = [(node, self.name_order(order.action, order.cause)) for node, order in open_before]
        self.change(orders={order.order_id: (node, order) for node, order in renewed})

    def drop_orders(self, unwanted: Callable[[NodeId, orders.Action], bool]) -> None:
        """Forget open orders that have lost their sense."""
        kept = {
            name: (node, order) for name, (node, order) in self.state.orders.items() if not unwanted(node, order.action)
        }
        if len(kept) < len(self.state.orders):
            self.change(orders=kept)

    def drop_orders_about(self, name: MemberId) -> None:
        """Forget open orders about one member."""
        self.drop_orders(lambda _, action: concerns(action) == name)

    def start(
        self, name: MemberId, node: NodeId, incarnation: Incarnation, cause: str, env: dict[str, str] | None = None
    ) -> None:
        """Order a start of the member as this incarnation."""
        spec = self.state.plan.members[name]
        spec = replace(spec, env=spec.env | self.state.plan.node_env.get(node, {}) | (env or {}))
        self.drop_orders_about(name)
        self.member(
            name,
            node=node,
            state="starting",
            since=self.now,
            incarnation=incarnation,
            started_at=self.now,
            start_at=None,
            process=None,
            suspicion=None,
            condemned_in=None,
            unheard_in=None,
            exit_code=None,
        )
        self.order(node, orders.StartMember(spec=spec, incarnation=incarnation), cause)


def concerns(action: orders.Action) -> MemberId | None:
    """The member an order is about."""
    match action:
        case orders.StartMember():
            return action.spec.member
        case orders.KillMember() | orders.StopMember() | orders.DumpStacks():
            return action.member
        case orders.SetPeers() | orders.TakeOverFlush() | orders.StopNode():
            return None
