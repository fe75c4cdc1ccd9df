"""What agent and master say over their one WebSocket, `GET /v1/agents/NODE` on the master; msgpack, one record a message.

Upwards everything that must not be lost is a `Report` with a sequence number, resent until acknowledged and journaled before
the acknowledgement; `Pulse` is a picture of now, sent every second and never resent.
"""

import msgspec

from aimaster.wire.actions import Order
from aimaster.wire.checkpoint import SnapshotPlace
from aimaster.wire.health import Finding, Reading
from aimaster.wire.ids import Incarnation, MemberId, NodeId, OrderId, RunId, Term
from aimaster.wire.topology import ProcessId


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What the training thread last said of itself."""

    phase: str = "startup"
    step: int = -1
    lineage: int = 0
    beats: int = 0
    age_seconds: float = 0.0
    """Since the last beat."""
    lease_seconds: float | None = None
    """Learnt for this phase; None while unlearnt."""


class MemberPicture(msgspec.Struct, frozen=True, kw_only=True):
    """One member as its agent sees it."""

    member: MemberId
    role: str
    incarnation: Incarnation
    process: ProcessId
    alive: bool
    progress: Progress
    cpu_seconds: float = 0.0
    resident_bytes: int = 0


# -- reports: events that must not be lost ------------------------------------------------------------------------------


class MemberStarted(msgspec.Struct, frozen=True, kw_only=True, tag="member_started"):
    member: MemberId
    incarnation: Incarnation
    process: ProcessId
    adopted: bool = False
    """True when a restarted agent found it running."""


class MemberExited(msgspec.Struct, frozen=True, kw_only=True, tag="member_exited"):
    member: MemberId
    role: str
    incarnation: Incarnation
    process: ProcessId | None
    """None when it could not be started at all."""
    exit_code: int | None
    signal: int | None
    at: float
    """Unix seconds of the death as the shim or the pidfd saw it."""
    expected: bool
    """True after an order to stop, or exit code 0."""
    findings: tuple[Finding, ...] = ()
    """From the tail of its log."""
    log_tail: tuple[str, ...] = ()
    """At most 50 lines, bounded and scrubbed of secrets."""


class HangSuspected(msgspec.Struct, frozen=True, kw_only=True, tag="hang_suspected"):
    """A progress lease is broken. Evidence is what the agent's two looks found; without any, nothing may be killed."""

    member: MemberId
    role: str
    incarnation: Incarnation
    progress: Progress
    evidence: tuple[str, ...]
    """Of: `state-T-twice`, `same-frame-twice`, `apart-from-group-twice` (the other ranks of its node wait for it), `no-cpu`; dumps in `stacks`.
    Where all ranks of a node stand together: `waits-twice` in a collective, `elsewhere-twice` anywhere else."""
    stacks: tuple[str, ...] = ()
    rank: int | None = None
    """The rank that stands apart, and its process: one member may hold several."""
    pid: int | None = None
    seen_seconds: float = 0.0
    """For how long before `at` a whole node was seen where it stands."""
    at: float


class Found(msgspec.Struct, frozen=True, kw_only=True, tag="found"):
    """A finding that belongs to no death: disk full, log sign, host trouble."""

    finding: Finding


class SnapshotMoved(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot_moved"):
    """A snapshot reached a tier, or could not (`error`)."""

    place: SnapshotPlace
    error: str | None = None


class SnapshotsDeleted(msgspec.Struct, frozen=True, kw_only=True, tag="snapshots_deleted"):
    """Retention has removed checkpoints from storage."""

    folders: tuple[str, ...]
    """Within the storage folder."""


class OrderDone(msgspec.Struct, frozen=True, kw_only=True, tag="order_done"):
    order_id: OrderId
    ok: bool
    detail: str = ""


AgentEvent = MemberStarted | MemberExited | HangSuspected | Found | SnapshotMoved | SnapshotsDeleted | OrderDone


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """One event with its place in the node's outbox. `(node, agent_boot, sequence)` is its id."""

    sequence: int
    at: float
    event: AgentEvent


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message on a connection."""

    protocol: int
    run_id: RunId
    node: NodeId
    outbox_id: str
    """New with each emptied node folder; sequences start again with it."""
    url: str
    """The agent's own HTTP address."""
    pid: int
    term_seen: Term
    starts: int = 0
    """How many agents have served this node in its present folder; 0 where that is not counted."""
    members: tuple[MemberPicture, ...]
    started: dict[MemberId, Incarnation] = {}
    """The newest start of each member on this node, also of those that have ended: no later one may have its number."""
    labels: dict[str, str] = {}
    """Failure domains, widest first: for example rack and switch."""
    shards: str = ""
    """`HOST:PORT` on which the agent gives and takes segments."""


class LogPicture(msgspec.Struct, frozen=True, kw_only=True):
    """What one log says so far; opaque here, a record of `aimaster.catalogue.kept`. It replaces what was known of that log."""

    file: str
    whole: bytes = b""
    """All that was kept of it (`Kept`); empty where only `steps` changed."""
    steps: bytes = b""
    """How far it has come (`Steps`)."""


class Pulse(msgspec.Struct, frozen=True, kw_only=True, tag="pulse"):
    """The node now, once a second."""

    at: float
    members: tuple[MemberPicture, ...]
    snapshots: tuple[SnapshotPlace, ...] = ()
    """Sealed segments in this node's memory, own and peer copies, and (from the agent that flushed last) none of storage."""
    readings: tuple[Reading, ...] = ()
    """Those made since the pulse before; all at the first of a connection."""
    logs: tuple[LogPicture, ...] = ()
    """The same of the node's logs."""


AgentMessage = Hello | Report | Pulse

# -- downwards ----------------------------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    term: Term
    acknowledged: int
    """Highest sequence of this outbox already journaled; the agent drops up to there."""


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    sequence: int


MasterMessage = Welcome | Ack | Order

# -- agent to controller ------------------------------------------------------------------------------------------------


class DeathNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Agent to controller, `POST /v1/deaths`, at the moment a member of a run is known dead."""

    node: NodeId
    member: MemberId
    incarnation: Incarnation
    at: float


# -- controller to master -----------------------------------------------------------------------------------------------


class ControllerPulse(msgspec.Struct, frozen=True, kw_only=True):
    """Controller to master, `POST /v1/controller`, once a second and on every commit, epoch and end: the second path of liveness."""

    url: str
    incarnation: Incarnation
    epoch: int
    lineage: int
    step: int
    """Newest committed step."""
    steps: int
    seen: dict[MemberId, float]
    """Unix seconds of the last word of each member."""
    incarnations: dict[MemberId, Incarnation] = {}
    in_epoch: tuple[MemberId, ...] = ()
    figures: dict[str, float] = {}
    """reward_mean, tokens_per_second, staleness_mean, buffered_groups, leased, admitted, dealt, trained, ..."""
    at: float
    committed_at: float = 0.0
    committed_epoch: int = 0
    """Epoch of the newest commit; 0 where it is not known any more."""
    waiting_for: str = ""
    """What the controller waits for now, in words; empty when training."""
    finding: str = ""
    """Category of a trouble of its own, for example `storage.full`."""
    finished: bool = False
