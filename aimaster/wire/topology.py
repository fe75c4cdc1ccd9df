"""What runs where: the plan of a job, the specification of a member, and the epoch, the numbered picture of who is in."""

from typing import Literal

import msgspec

from aimaster.wire.ids import Incarnation, MemberId, NodeId, RunId

JobKind = Literal["rl", "command"]
RestartScope = Literal["member", "job"]
"""What a death restarts: the member alone, or (ranks of one wrapped command) all of them together on a new port."""


class MemberSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one member process. Example: `policy-0`, a Python interpreter with `-m rl_runtime.launch policy`."""

    member: MemberId
    role: str
    """`controller`, `policy`, `rollout`; `command` for a user's own program."""
    rank: int = 0
    """Rank within the member's group; 0 for members of one process."""
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    """Added to the agent's environment; never holds a secret, those travel by file."""
    cwd: str | None = None
    startup_hang_seconds: float = 600.0
    """Progress lease while no lease has been learnt."""
    lease_floor_seconds: float = 5.0
    """A learnt lease is never shorter."""
    reports_progress: bool = True
    """False for commands that have not reported any: then silence is never a suspicion by itself."""


class JobPlan(msgspec.Struct, frozen=True, kw_only=True):
    """All a master needs to know of a job; written once as `RUN/plan.json` by the front process."""

    run_id: RunId
    name: str
    kind: JobKind
    nodes: tuple[NodeId, ...]
    members: dict[MemberId, MemberSpec]
    placement: dict[MemberId, NodeId]
    """The node each member starts on; the master may move it when that node is gone."""
    node_env: dict[NodeId, dict[str, str]] = {}
    """Environment of a node: of its agent, and of every member that is started there."""
    restart_scope: RestartScope = "member"
    max_restarts: int = 3
    """Restarts of one member (of all ranks together where the scope is `job`) within `restart_window_seconds`."""
    restart_window_seconds: float = 3600.0
    node_silent_seconds: float = 10.0
    """No word from a node's agent for this long, and none of its members seen alive by the controller: the node is lost."""
    front_pid: int | None = None
    steps: int | None = None
    """Steps after which the job is finished, for progress displays; None where unknown."""


class Epoch(msgspec.Struct, frozen=True, kw_only=True):
    """A numbered, immutable picture of the policy members that are in. Serialized by the controller's ledger."""

    number: int
    members: tuple[MemberId, ...]
    """In rank order of the reduction; the first hosts the store."""
    incarnations: dict[MemberId, Incarnation]
    cause: str = ""


class EpochProposal(msgspec.Struct, frozen=True, kw_only=True):
    """Master to controller, `POST /v1/epoch`: go on without `leave`. Refused (409) when `replaces` is no longer current."""

    term: int
    replaces: int
    leave: tuple[MemberId, ...]
    cause: str


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """A process beyond doubt: a bare pid may have been reused."""

    boot_id: str
    pid: int
    start_ticks: int
    """Field 22 of `/proc/PID/stat`."""
