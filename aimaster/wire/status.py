"""The view model: what `GET /v1/status` of the master answers and every command and page shows, so that they cannot disagree."""

import msgspec

from aimaster.wire.checkpoint import SnapshotPlace
from aimaster.wire.health import Verdict
from aimaster.wire.ids import Incarnation, MemberId, NodeId
from aimaster.wire.messages import Progress
from aimaster.wire.topology import ProcessId


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    member: MemberId
    role: str
    node: NodeId
    state: str
    """planned, starting, running, suspected, dead, stopped, finished"""
    incarnation: Incarnation
    process: ProcessId | None = None
    progress: Progress | None = None
    in_epoch: bool = False
    restarts: int = 0


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeId
    state: str
    """waiting, connected, silent, lost, stopped"""
    url: str = ""
    agent_pid: int = 0
    seen_at: float = 0.0
    labels: dict[str, str] = {}
    """Failure domains, widest first."""


class IncidentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One incident: what died, and the four moments of it (Unix seconds; None while still to come)."""

    incident: str
    subject: str
    """Member or node."""
    verdict: Verdict
    action: str
    occurred_at: float
    detected_at: float
    decided_at: float | None = None
    resumed_at: float | None = None
    """The next committed step (or, for a rollout worker and wrapped commands, the restarted member's first sign of life)."""
    healed_at: float | None = None
    """The member is back in."""
    lost: str = "nothing"
    drill: bool = False
    deaths: tuple[MemberId, ...] = ()
    """Members whose deaths belong to it, in order; several where a node was lost or others followed."""


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    run_id: str
    name: str
    kind: str
    state: str
    """starting, running, degraded, stopping, finished, failed"""
    reason: str = ""
    """Why it is failed, stopping or degraded."""
    outcome: str = ""
    """How it ends, from the moment that is decided: finished, failed, stopped (somebody asked for it); empty before."""
    started_at: float
    now: float
    term: int
    epoch: int = 0
    lineage: int = 0
    step: int = 0
    steps: int | None = None
    figures: dict[str, float] = {}
    nodes: tuple[NodeStatus, ...] = ()
    members: tuple[MemberStatus, ...] = ()
    incidents: tuple[IncidentStatus, ...] = ()
    snapshots: tuple[SnapshotPlace, ...] = ()
    controller_url: str = ""
    findings: tuple[str, ...] = ()
    """Open findings in words, newest first, at most 20."""
