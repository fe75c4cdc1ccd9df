"""Orders from the master to an agent. Each is carried out once per id, refused when its term is old, and answered by an outcome."""

import msgspec

from aimaster.wire.checkpoint import Version
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


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where another node's agent is, and in which failure domains."""

    url: str
    shards: str = ""
    """`HOST:PORT` on which it gives and takes segments; empty: it does not."""
    labels: dict[str, str] = {}
    """Failure domains, widest first."""


class SetPeers(msgspec.Struct, frozen=True, kw_only=True, tag="set_peers"):
    """All agents of the run, the one that is told included, for peer copies."""

    peers: dict[NodeId, PeerAddress]


class TakeOverFlush(msgspec.Struct, frozen=True, kw_only=True, tag="take_over_flush"):
    """A node is lost: bring to storage the newest whole step of its members that is held here, unless storage has one as new.

    Given to every node, since who holds which copy may have changed; on storage only one of them writes.
    """

    node: NodeId
    """The lost one."""
    members: tuple[MemberId, ...]
    """Who ran there."""
    newest: Version | None = None
    """The newest committed step, on the live lineage: nothing else is flushed. None: the job has no such word."""


class StopNode(msgspec.Struct, frozen=True, kw_only=True, tag="stop_node"):
    """Flush what is sealed, stop all members, and end the agent."""

    grace_seconds: float = 10.0
    remove_memory: bool = False
    """True at the clean end of a run: the node's segment folder is removed after the flush."""


Action = StartMember | KillMember | StopMember | DumpStacks | SetPeers | TakeOverFlush | StopNode


class Order(msgspec.Struct, frozen=True, kw_only=True, tag="order"):
    """One action with its identity."""

    order_id: OrderId
    term: Term
    cause: str
    """Who or what caused it: `plan`, `incident i-3`, `operator`."""
    action: Action
