"""What went wrong with snapshots, as findings for the master. Pure."""

from collections.abc import Iterable

from aimaster.wire.checkpoint import SaveTrouble
from aimaster.wire.health import Finding, Subject
from aimaster.wire.ids import NodeId
from easyckpt.errors import StorageDenied, StorageFull
from easyckpt.scrub import Damage

MOST_CHARACTERS = 500


def flush_failed(node: NodeId, error: Exception, now: float) -> Finding:
    """A flush to storage failed; what was there before is intact, and it is tried again."""
    full = isinstance(error, StorageFull)
    category = "node.disk_full" if full else "node.shared_fs"
    name = f"{node}:flush:{type(error).__name__}"
    severe = full or isinstance(error, StorageDenied)
    return _finding(
        name,
        "agent.flush_failed",
        category,
        node,
        now,
        {"message": f"a flush to storage failed: {error}"},
        severe=severe,
    )


def flush_stalled(node: NodeId, trouble: str, now: float) -> Finding:
    """A flush to storage neither ends nor fails."""
    return _finding(f"{node}:flush-stalled", "agent.flush_stalled", "node.shared_fs", node, now, {"message": trouble})


def save_failed(node: NodeId, trouble: SaveTrouble, now: float) -> Finding:
    """A member's snapshot was lost in the background; training goes on."""
    lineage, step = trouble.version.lineage, trouble.version.step
    message = f"the snapshot of {trouble.member} at step {step} (lineage {lineage}) was lost: {trouble.text}"
    name = f"{node}:{trouble.member}:save"
    return _finding(name, "snapshot.save_failed", "unknown", node, now, {"message": message})


def segments_lost(node: NodeId, names: Iterable[str], now: float) -> Finding:
    """Sealed segments vanished from the node's memory, and neither their writer nor the agent removed them."""
    message = (
        f"sealed segments were removed by somebody else: {', '.join(sorted(names))}; the next tier serves meanwhile"
    )
    return _finding(f"{node}:segments-lost", "snapshot.segment_lost", "unknown", node, now, {"message": message})


def segment_damaged(node: NodeId, damage: Damage, now: float) -> Finding:
    """A sealed segment in the node's memory is not what it was when it was sealed: memory that went bad, or a stray write."""
    whose = f"{damage.name}, step {damage.version[1]} of {damage.member}"
    message = f"{whose} (lineage {damage.version[0]}): {damage.text}"
    return _finding(
        f"{node}:{damage.name}:damaged", "snapshot.segment_damaged", "unknown", node, now, {"message": message}
    )


def strangers_found(node: NodeId, names: Iterable[str], now: float) -> Finding:
    """Files in the segment folder that nothing of ours made: they take memory and are left alone."""
    message = f"files that are no segments lie in the snapshot memory: {', '.join(sorted(names))}; they are left alone"
    return _finding(f"{node}:strangers", "snapshot.foreign_file", "unknown", node, now, {"message": message})


def _finding(
    name: str, sign: str, category: str, node: NodeId, now: float, details: dict[str, str], *, severe: bool = False
) -> Finding:
    return Finding(
        id=name,
        sign=sign,
        category=category,
        role="self",
        severity="critical"
        if severe
        else "error"
        if sign in ("agent.flush_failed", "agent.flush_stalled", "snapshot.segment_damaged")
        else "warning",
        subject=Subject(node=node),
        node=node,
        time_seconds=now,
        details={key: text[:MOST_CHARACTERS] for key, text in details.items()},
    )
