"""The words of health, from a sensor's fact to the verdict about a job.

A `Reading` is a fact, never a judgement. A `Finding` is what one rule made of readings or of a log line. An `Incident` is findings that belong
together in time and topology. A `Verdict` says who failed first, why, whose fault it is and what to do first, and also what was ruled out.
`CATEGORIES` is the closed taxonomy: for each root category the usual fault and the first rung of the remedy. Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

Role = Literal["self", "accusation", "follower", "benign"]
Severity = Literal["info", "warning", "error", "critical"]
Action = Literal["ignore", "restart_process", "reform_without", "replace_node", "restart_job", "stop_job"]
FaultOf = Literal["hardware", "platform", "user_code", "transient", "none"]
Kind = Literal["sign", "fact", "progress", "end", "announcement"]
ReadingState = Literal["ok", "bad", "unsupported", "unreadable"]
Scalar = bool | int | float | str | None

REFUSED: Final = 78
"""Exit code of a member that will not run however often it is started; the last line of its log is then a `refusal`. (EX_CONFIG of sysexits.)"""
NEW_LINE: Final = "new"
"""Sign of a line that no sign knows and that no earlier attempt printed: a candidate for a reader, never more."""
ROLES: Final[tuple[Role, ...]] = get_args(Role)
ACTIONS: Final[tuple[Action, ...]] = get_args(Action)
FAULTS: Final[tuple[FaultOf, ...]] = get_args(FaultOf)


class Category(msgspec.Struct, frozen=True, kw_only=True):
    """One root category of the taxonomy."""

    fault_of: FaultOf
    """Whose fault it usually is."""
    action: Action
    """The first rung of the remedy."""
    advice: str
    """What a person can do, one sentence."""
    announced: bool = False
    """An end that was announced beforehand explains everything after it."""


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """The thing a finding speaks of; None means not known."""

    node: str | None = None
    """Node name, or its address where only that is known."""
    rank: int | None = None
    """Global rank."""
    gpu: str | None = None
    """GPU index as text, or its PCI address (0000:b3:00)."""
    pid: int | None = None
    """Process id on that node."""


Culprit = Subject


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One line (or reading) that a judgement rests on, and where to find it."""

    node: str | None = None
    """Node whose file it stands in."""
    file: str = ""
    """File, relative to what was read; or the sensor's name."""
    line: int = 0
    """Line number from 1; 0 when it is no line."""
    offset: int = 0
    """Byte offset of the line's start in the (unpacked) file."""
    time_seconds: float | None = None
    """When it happened, on the common clock; None when the line tells no time."""
    text: str = ""
    """The line, bounded and without secrets."""
    role: Role = "self"
    """What part it plays in the cascade."""
    sign: str = ""
    """Id of the sign that matched."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A fact one sensor read at one time."""

    sensor: str
    """Name of the sensor: gpu, kernel_log, process, log, host, fabric, progress."""
    kind: str
    """What was read: gpu.xid, gpu.presence, process.exit, log.line …"""
    node: str
    """Node it was read on."""
    time_seconds: float
    """When, seconds since the epoch on this node's clock."""
    state: ReadingState = "ok"
    """`unsupported` and `unreadable` are answers, never faults."""
    subject: Subject = Subject()
    """What it was read about."""
    values: dict[str, Scalar] = {}
    """The numbers and words read, base units."""
    text: str = ""
    """The raw line where there is one."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule made of readings or of a log line."""

    id: str = ""
    """Idempotence key; the same fault seen again keeps it. Empty offline."""
    sign: str
    """Id of the sign or rule that spoke."""
    category: str
    """A key of CATEGORIES; for followers the category they echo, or `follower`."""
    role: Role
    """Only self statements and accusations vote for a culprit."""
    kind: Kind = "sign"
    """What it tells: a sign of failure, who is who (fact), a finished step (progress), a good end, or an end announced beforehand."""
    severity: Severity = "error"
    """How bad it is if true."""
    subject: Subject = Subject()
    """Whom it speaks of: the node itself (self), or the accused (accusation)."""
    node: str | None = None
    """Node that said it."""
    time_seconds: float | None = None
    """When it happened; None when unknown."""
    fault_of: FaultOf | None = None
    """Overrides the category's usual fault."""
    action: Action | None = None
    """Overrides the category's first rung."""
    weight: int = 50
    """How decisive it is: below 20 an echo, 20-49 supports a failure but raises none, 50 plain, 80 and more the thing itself."""
    count: int = 1
    """How often the same was said; repeats are collapsed into the first."""
    last_seconds: float | None = None
    """When it was said last, if more than once."""
    details: dict[str, str] = {}
    """Named groups of the sign, for example xid, peer, sequence."""
    traceback: str = ""
    """The Python traceback it ended, when it did."""
    evidence: tuple[Evidence, ...] = ()
    """Lines or readings it rests on."""


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Findings that belong together in time and topology."""

    id: str = ""
    """Stable while the incident lasts."""
    opened_at_seconds: float | None = None
    """Time of the earliest finding in it."""
    findings: tuple[Finding, ...] = ()
    """In time order."""
    nodes: tuple[str, ...] = ()
    """Nodes that spoke or were spoken of."""


class RuledOut(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate that was considered and dropped."""

    category: str
    """What it would have been."""
    culprit: Culprit = Culprit()
    """Whom it would have blamed."""
    why: str
    """The reason it was dropped, one sentence."""
    evidence: tuple[Evidence, ...] = ()
    """The lines that suggested it."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Who failed first and why, and the first thing to do."""

    category: str
    """A key of CATEGORIES, `unknown` when there is a failure that no sign explains, `benign` when there is none."""
    culprit: Culprit = Culprit()
    """None in a field: the evidence does not determine it."""
    fault_of: FaultOf = "none"
    """Whose fault it is."""
    action: Action = "ignore"
    """The first rung of the remedy ladder."""
    confidence: float = 0.0
    """From 0 to 1."""
    summary: str = ""
    """The verdict in one sentence."""
    advice: str = ""
    """What a person can do."""
    traceback: str = ""
    """The user's own traceback, for app.* verdicts."""
    time_seconds: float | None = None
    """When the root happened."""
    evidence: tuple[Evidence, ...] = ()
    """In time order; the root has role `self` or `accusation`."""
    ruled_out: tuple[RuledOut, ...] = ()
    """What was considered and why it is not the root."""
    candidates: tuple[Evidence, ...] = ()
    """Lines no sign knows, offered with low confidence; they never evict anything."""


def _row(fault_of: FaultOf, action: Action, advice: str, *, announced: bool = False) -> Category:
    return Category(fault_of=fault_of, action=action, advice=advice, announced=announced)


CATEGORIES: Final[dict[str, Category]] = {
    "gpu.lost": _row("hardware", "replace_node", "Take the node out and have the GPU reseated or replaced."),
    "gpu.ecc": _row(
        "hardware", "replace_node", "Take the node out; reset the GPU and run a memory diagnostic before reuse."
    ),
    "gpu.ecc_contained": _row(
        "hardware", "restart_process", "Restart the process; replace the GPU if it comes back after a reset."
    ),
    "gpu.row_remap_failure": _row(
        "hardware", "replace_node", "Take the node out; the GPU's memory has no spare rows left (RMA)."
    ),
    "gpu.row_remap_pending": _row("hardware", "ignore", "Nothing now; reset the GPU when it is next idle."),
    "gpu.firmware": _row("platform", "replace_node", "Take the node out and reset the GPU or reboot it."),
    "gpu.exec_fault": _row("hardware", "replace_node", "Take the node out; the same GPU faults again with other work."),
    "gpu.silent_corruption": _row(
        "hardware", "replace_node", "Take the node out; the GPU computes wrong results without an error."
    ),
    "gpu.slowdown": _row("hardware", "replace_node", "Take the node out; check cooling and power of the GPU."),
    "gpu.nvlink": _row("hardware", "replace_node", "Take the node out; check NVLink bridges, switch and GPU seating."),
    "gpu.fabric": _row(
        "platform", "replace_node", "Take the node out; restart the fabric manager, check the NVSwitches."
    ),
    "gpu.pcie": _row("hardware", "replace_node", "Take the node out; check the PCIe slot, riser and power."),
    "gpu.driver_mismatch": _row(
        "platform", "replace_node", "Use another node; this one needs a reboot or matching driver libraries."
    ),
    "gpu.access_lost": _row(
        "platform", "replace_node", "Recreate the pod; the container lost its GPU devices, the GPU itself is well."
    ),
    "gpu.memory_held": _row(
        "platform", "replace_node", "Kill the left-over process that holds GPU memory, else use another node."
    ),
    "net.port_down": _row("hardware", "replace_node", "Take the node out; check cable, transceiver and switch port."),
    "net.nic_fault": _row("hardware", "replace_node", "Take the node out; the network adapter failed."),
    "net.rdma_error": _row(
        "platform", "restart_process", "Try again; if it returns, go on without the peer and check the path to it."
    ),
    "net.unreachable": _row("platform", "stop_job", "Correct the advertised address, interface or firewall rule."),
    "net.port_in_use": _row(
        "user_code", "restart_process", "Start again on a free port, or stop the process that holds this one."
    ),
    "node.lost": _row("platform", "replace_node", "Take another node; this one no longer answers."),
    "node.kernel_fault": _row("hardware", "replace_node", "Take the node out and collect its crash dump."),
    "node.oom_host": _row(
        "user_code", "stop_job", "Use less host memory (workers, caches, pinned memory) or larger nodes."
    ),
    "node.oom_cgroup": _row(
        "user_code", "stop_job", "Raise the memory limit of the pod or step, or use less host memory."
    ),
    "node.shm_full": _row("platform", "stop_job", "Give the container more /dev/shm (memory emptyDir or --shm-size)."),
    "node.disk_full": _row("user_code", "stop_job", "Free space, keep fewer checkpoints, or write to a larger volume."),
    "node.disk_fault": _row("hardware", "replace_node", "Take the node out; its disk fails."),
    "node.shared_fs": _row("transient", "restart_process", "Try again; if it returns, look at the file server."),
    "node.limits": _row("platform", "stop_job", "Raise the limit on processes, threads or open files."),
    "node.clock_skew": _row("platform", "replace_node", "Synchronise the node's clock (NTP) or take another node."),
    "sched.preempted": _row(
        "platform", "reform_without", "Nothing is broken; go on without it until capacity returns.", announced=True
    ),
    "sched.time_limit": _row(
        "platform", "stop_job", "Ask for more time, or resume from the newest checkpoint.", announced=True
    ),
    "ray.head_lost": _row(
        "platform", "replace_node", "Restart the head elsewhere; look at its memory, disk and pod events."
    ),
    "ray.memory_monitor": _row(
        "user_code", "stop_job", "Give the actor more memory (num_cpus, memory=) or start fewer at once on a node."
    ),
    "ray.node_overloaded": _row(
        "user_code", "restart_process", "Leave CPUs to the raylet; it was alive but too busy to answer health checks."
    ),
    "serve.kv_cache": _row("user_code", "stop_job", "Lower the model length or raise gpu_memory_utilization."),
    "app.exception": _row("user_code", "stop_job", "Mend the program; the traceback says where."),
    "app.config": _row("user_code", "stop_job", "Correct the configuration named in the message."),
    "app.cuda_oom": _row("user_code", "stop_job", "Use a smaller micro batch or sequence, or shard or offload more."),
    "app.device_assert": _row(
        "user_code", "stop_job", "Check indices and labels fed to the kernel (CUDA_LAUNCH_BLOCKING=1 shows the call)."
    ),
    "app.illegal_access": _row(
        "user_code", "restart_process", "A kernel read memory it does not own; check custom kernels and their versions."
    ),
    "app.segfault": _row("user_code", "stop_job", "A native library crashed; check its version and the core dump."),
    "app.nan": _row("user_code", "stop_job", "Look at the data and learning rate of that step; resume from before it."),
    "app.collective_mismatch": _row(
        "user_code", "stop_job", "Ranks run different collectives; look for a branch that depends on rank or data."
    ),
    "data.corrupt": _row("transient", "restart_process", "Delete the file and fetch it again."),
    "data.remote": _row("transient", "restart_process", "Try again with back-off; the remote store refused or failed."),
    "hang.straggler": _row("transient", "restart_process", "Look at the stack of the rank that is behind."),
    "hang.unknown": _row("transient", "restart_process", "Collect stacks of all ranks; nobody can be blamed."),
    "app.retryable": _row("transient", "restart_process", "The user's rules call this error worth another try."),
    "process.killed": _row(
        "transient", "restart_process", "Find out who sent the signal; the process itself said nothing."
    ),
    "unknown": _row("transient", "restart_process", "No sign explains this; look at the candidate lines."),
    "benign": _row("none", "ignore", "Nothing to do."),
}


def category(name: str) -> Category:
    """The taxonomy's row, or that of `unknown` for a category a user's own rule invented."""
    return CATEGORIES.get(name, CATEGORIES["unknown"])


def refusal(name: str, why: str) -> str:
    """The last line of a member that ends with `REFUSED`: a category, and a sentence with what to do."""
    return f"refused [{name}]: {' '.join(why.split())}"


def read_refusal(log_tail: str) -> tuple[str, str] | None:
    """Category and sentence of the last refusal in a log's tail."""
    for line in reversed(log_tail.splitlines()):
        name, bracket, why = line.removeprefix("refused [").partition("]: ")
        if line.startswith("refused [") and bracket and name in CATEGORIES:
            return name, why
    return None
