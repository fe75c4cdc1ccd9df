"""What the master believes. `State` is a function of the journaled events alone; `View` is what was seen last and is never kept.

member   planned -> starting -> running <-> suspected -> dead -> (starting, next incarnation)
                                   └-> stopped | finished
node     waiting -> connected <-> silent -> lost | stopped
job      starting -> running -> stopping -> finished | failed      (degraded is running with a gap, seen from outside)
"""

from typing import Literal

import msgspec

from aimaster.brain.budget import Budget
from aimaster.catalogue.kept import Kept
from aimaster.wire.actions import Order
from aimaster.wire.checkpoint import SnapshotPlace
from aimaster.wire.health import Finding, Verdict
from aimaster.wire.ids import Incarnation, IncidentId, MemberId, NodeId, OrderId, Term
from aimaster.wire.messages import ControllerPulse, HangSuspected, Pulse
from aimaster.wire.topology import JobPlan, ProcessId

MemberState = Literal["planned", "starting", "running", "suspected", "dead", "stopped", "finished"]
NodeState = Literal["waiting", "connected", "silent", "lost", "stopped"]
Phase = Literal["starting", "running", "stopping", "finished", "failed"]
Outcome = Literal["finished", "failed", "stopped"]
SubjectKind = Literal["member", "node", "agent", "master"]

LIVE: frozenset[MemberState] = frozenset({"starting", "running", "suspected"})
"""A process of this incarnation exists or was ordered."""
ENDED: frozenset[Phase] = frozenset({"finished", "failed"})


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One member and its present incarnation."""

    member: MemberId
    role: str
    node: NodeId
    state: MemberState = "planned"
    incarnation: Incarnation = Incarnation(0)
    process: ProcessId | None = None
    since: float = 0.0
    """When it came into `state`."""
    started_at: float = 0.0
    """When this incarnation was ordered."""
    start_at: float | None = None
    """When a dead member is to be started again; None when nobody waits for that."""
    budget: Budget = Budget()
    restarts: int = 0
    quick_deaths: int = 0
    """Young deaths in a row."""
    suspicion: HangSuspected | None = None
    condemned_in: IncidentId | None = None
    """The incident in which this incarnation is being killed."""
    unheard_in: IncidentId | None = None
    """The incident in which the group goes on without this incarnation, since the controller does not hear it."""
    unheard_at: float = 0.0
    """When that was last proposed."""
    exit_code: int | None = None


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node and its agent."""

    node: NodeId
    state: NodeState = "waiting"
    url: str = ""
    shards: str = ""
    """`HOST:PORT` on which its agent gives and takes segments."""
    labels: dict[str, str] = {}
    """Failure domains, widest first."""
    outbox_id: str = ""
    acknowledged: int = 0
    """Highest report sequence of that outbox that was believed."""
    agent_pid: int = 0
    agent_starts: int = 0
    """Agents that have served the node's present folder, as the newest counted them."""
    seen_at: float = 0.0
    """For a silent or lost node: its last word."""
    blamed: bool = False
    """A verdict blamed its hardware or platform: nothing is placed here while another node is there."""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """One root death (or loss) and all that followed from it."""

    incident: IncidentId
    subject: str
    kind: SubjectKind
    verdict: Verdict
    action: str = ""
    occurred_at: float
    detected_at: float
    decided_at: float | None = None
    resumed_at: float | None = None
    healed_at: float | None = None
    lost: str = "nothing"
    drill: bool = False
    settle_at: float | None = None
    """Until then other deaths may turn out to be its root."""
    members: tuple[MemberId, ...] = ()
    """Who is to come back before it is healed."""
    deaths: tuple[tuple[MemberId, Incarnation], ...] = ()
    """Every death belongs to exactly one incident."""
    findings: tuple[Finding, ...] = ()
    """What the dead said, for the decision on the root."""


class Regroup(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of a wrapped command are being stopped, to be started together."""

    incident: IncidentId
    incarnation: Incarnation
    """Of the next start."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The job is coming to its end."""

    outcome: Outcome
    reason: str
    at: float
    front_gone: bool = False
    """Nobody is left who would start an agent again; what lies in memory is kept for the run that resumes this one."""
    nodes_ordered: bool = False
    """False while members of a finished job are still given time to leave by themselves."""
    deadline_at: float
    """Then the present wait is given up."""


class State(msgspec.Struct, frozen=True, kw_only=True):
    """All that a master must know again after it was killed."""

    plan: JobPlan
    term: Term = Term(0)
    attempt: int = 0
    phase: Phase = "starting"
    started_at: float = 0.0
    term_started_at: float = 0.0
    ended_at: float | None = None
    ending: Ending | None = None
    members: dict[MemberId, Member] = {}
    nodes: dict[NodeId, Node] = {}
    orders: dict[OrderId, tuple[NodeId, Order]] = {}
    """Given and not yet done; what is sent at every connection."""
    next_order: int = 1
    next_incident: int = 1
    incidents: dict[IncidentId, Incident] = {}
    group_budget: Budget = Budget()
    regroup: Regroup | None = None
    drills: dict[str, str] = {}
    findings: tuple[Finding, ...] = ()
    """Of no death; newest last, bounded."""
    stored: tuple[SnapshotPlace, ...] = ()
    """Newest snapshots on storage, bounded."""

    @property
    def together(self) -> bool:
        """Whether one death restarts all."""
        return self.plan.restart_scope == "job"

    @property
    def heard_by_controller(self) -> bool:
        """Whether there is a second path by which members are heard."""
        return self.plan.kind == "rl"

    def members_on(self, node: NodeId) -> list[Member]:
        return [member for member in self.members.values() if member.node == node]


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node as last seen."""

    pulse: Pulse
    at: float
    """When the pulse came in, on the master's clock."""
    absent_since: dict[MemberId, float] = {}
    """Members that should be running and are not in the pulses."""
    asking_since: dict[MemberId, float] = {}
    """Members that ask the controller and beat, in every pulse since."""
    logs: dict[str, Kept] = {}
    """What its logs say, by file."""


class Rewind(msgspec.Struct, frozen=True, kw_only=True):
    """The controller went back behind a committed step."""

    at: float
    """When it was seen, on the master's clock."""
    from_step: int
    to_step: int


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A commit that the controller told of."""

    at: float
    """When it was made, on the master's clock."""
    controller: Incarnation
    """Who committed it."""
    members: dict[MemberId, Incarnation] | None
    """Its epoch's policy members; None where they were not told in time."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen last; empty after a restart."""

    since: float = 0.0
    """When this master began to look."""
    nodes: dict[NodeId, NodeView] = {}
    controller: ControllerPulse | None = None
    controller_at: float = 0.0
    """When its last pulse came in, on the master's clock."""
    controller_since: float = 0.0
    """Since when this start of it has spoken without a long pause."""
    commits: tuple[Commit, ...] = ()
    """The newest, bounded; newest last."""
    heard: dict[MemberId, float] = {}
    """When the controller last heard each member, on the master's clock."""
    rewind: Rewind | None = None
    """The newest."""
