"""Orders from the master to an agent. Each is carried out once per id, refused when its term is old, and answered by an outcome."""

import msgspec

from aimaster.wire.ids import Incarnation, MemberId, NodeId, OrderId, Term
from aimaster.wire.topology import MemberSpec


class StartMember(msgspec.Struct, frozen=True, kw_only=True, tag="start_member"):
    """Start a member; if this incarnation already runs, adopt it and say so."""

    spec: MemberSpec
    incarnation: Incarnation


class KillMember(msgspec.Struct, frozen=True, kw_only=True, tag="kill_member"):
    """SIGKILL the member's whole process tree, if it still is this incarnation."""

    member: MemberId
    incarnation: Incarnation
    reason: str


class StopMember(msgspec.Struct, frozen=True, kw_only=True, tag="stop_member"):
    """SIGTERM, then SIGKILL after the grace; the exit is expected and no incident."""

    member: MemberId
    incarnation: Incarnation
    grace_seconds: float = 10.0


class DumpStacks(msgspec.Struct, frozen=True, kw_only=True, tag="dump_stacks"):
    """Take a stack dump of the member and report it as a finding's evidence."""

    member: MemberId
    incarnation: Incarnation


class SetPeers(msgspec.Struct, frozen=True, kw_only=True, tag="set_peers"):
    """Addresses of all agents of the run, for peer copies."""

    peers: dict[NodeId, str]


class StopNode(msgspec.Struct, frozen=True, kw_only=True, tag="stop_node"):
    """Flush what is sealed, stop all members, and end the agent."""

    grace_seconds: float = 10.0
    remove_memory: bool = False
    """True at the clean end of a run: the node's segment folder is removed after the flush."""


Action = StartMember | KillMember | StopMember | DumpStacks | SetPeers | StopNode


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """One action with its identity."""

    order_id: OrderId
    term: Term
    cause: str
    """Who or what caused it: `plan`, `incident i-3`, `operator`."""
    action: Action
