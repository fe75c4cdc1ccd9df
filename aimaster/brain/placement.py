"""Where a member is started."""

from aimaster.brain.remedy import may_restart_here
from aimaster.brain.state import LIVE, Member, State
from aimaster.wire.ids import NodeId


def choose_node(state: State, member: Member) -> NodeId | None:
    """The member's own node where that is right, else the emptiest connected one; None when there is none: then it waits."""
    connected = [node for node in state.nodes.values() if node.state == "connected"]
    good = [node.node for node in connected if not node.blamed]
    home = state.nodes.get(member.node)
    others = [node for node in good if node != member.node]
    if home is not None and may_restart_here(
        node_connected=home.state == "connected", node_blamed=home.blamed, other_node=bool(others)
    ):
        return home.node
    if home is not None and home.state in ("silent", "waiting") and not home.blamed:
        # Its agent may be there in a second; the loss of the node is decided elsewhere.
        return None
    candidates = others or [node.node for node in connected]
    return min(candidates, key=lambda node: _load(state, member, node), default=None)


def _load(state: State, member: Member, node: NodeId) -> tuple[int, int, str]:
    """Members of the same role first, so that replicas stay apart."""
    there = [other for other in state.members_on(node) if other.state in LIVE and other.member != member.member]
    return sum(other.role == member.role for other in there), len(there), node
