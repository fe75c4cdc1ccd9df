"""How two findings, or one and all others, relate: what came before, what explains what, what is the same fault. Pure."""

from __future__ import annotations

from aimaster.brain.correlate import Picture
from aimaster.brain.suspects import level
from aimaster.wire.health import Finding


def clearly_before(root: Finding, notice: Finding) -> bool:
    """Whether a root was there well before an announced end."""
    if root.time_seconds is None or notice.time_seconds is None:
        return False
    return root.time_seconds < notice.time_seconds - 30.0


def explains_removal(removal: Finding, finding: Finding) -> bool:
    """Whether a removed node or pod is why something died or was lost."""
    if finding.category not in ("node.lost", "ray.head_lost", "process.killed"):
        return False
    if removal.subject.node not in (None, removal.node, finding.subject.node):
        return False
    if finding.role == "follower" and removal.subject.node != finding.subject.node:
        return False
    if removal.time_seconds is None or finding.time_seconds is None:
        return True
    return removal.time_seconds - 60.0 <= finding.time_seconds <= removal.time_seconds + 900.0


def everywhere(root: Finding, picture: Picture) -> bool:
    """The same error on several nodes at once: shared code or setting, nobody's fault in particular."""
    if root.category not in ("app.exception", "app.config", "app.nan"):
        return False
    same = [
        one
        for one in picture.findings
        if one.sign == root.sign
        and one.details.get("exception") == root.details.get("exception")
        and one.role == "self"
    ]
    return len({one.subject.node for one in same if one.subject.node}) > 1


def same_fault(root: Finding, other: Finding) -> bool:
    """Whether another statement of the same node is likely about the same process."""
    if (
        root.category.startswith(("node.disk_full", "net.", "node.kernel", "node.lost", "node.limits"))
        and other.subject.rank is not None
    ):
        return root.category == other.category or level(other) >= 4
    return True
