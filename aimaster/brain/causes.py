"""Which failure is the reason of which other, when both are said of the same node. Pure."""

from __future__ import annotations

from typing import Final

from aimaster.wire.health import Finding

_EXPLAINED_BY: Final[dict[str, tuple[str, ...]]] = {
    "gpu.access_lost": ("gpu.lost", "gpu.driver_mismatch", "gpu.firmware", "gpu.fabric"),
    "gpu.memory_held": ("gpu.ecc", "gpu.lost"),
    "gpu.nvlink": ("gpu.lost", "gpu.fabric"),
    "gpu.firmware": ("gpu.lost", "gpu.ecc"),
    "gpu.pcie": ("gpu.lost",),
    "gpu.ecc": ("gpu.row_remap_failure",),
    "node.lost": (
        "node.kernel_fault",
        "node.oom",
        "gpu.lost",
        "net.port_down",
        "net.nic_fault",
        "node.disk",
        "ray.node_overloaded",
        "ray.memory_monitor",
    ),
    "ray.head_lost": ("node.", "ray.memory_monitor"),
    "ray.memory_monitor": ("node.oom_cgroup",),
    "node.oom_host": ("node.oom_cgroup",),
    "node.disk_full": ("node.shm_full",),
    "node.disk_fault": ("node.shared_fs",),
    "net.rdma_error": ("net.port_down", "net.nic_fault", "node.lost", "node.kernel_fault", "gpu.lost"),
    "net.unreachable": ("node.lost", "node.kernel_fault", "net.port_down", "net.nic_fault"),
    "process.killed": ("node.", "ray.", "gpu.", "app.", "sched."),
    "app.exception": ("node.", "ray.", "gpu.", "net.", "data.", "serve.", "app.c", "app.d", "app.i", "app.n"),
    "app.segfault": ("gpu.", "node.disk_fault", "node.shm_full"),
    "app.illegal_access": ("gpu.", "app.device_assert"),
    "app.cuda_oom": ("gpu.ecc", "gpu.lost", "gpu.memory_held"),
    "data.corrupt": ("node.disk", "node.shared_fs"),
    "data.remote": ("node.clock_skew", "net.unreachable"),
    "app.config": ("data.corrupt", "node.disk"),
    "hang.straggler": ("gpu.", "node.", "net."),
}
"""Categories that are symptoms of others when both are said of the same node."""

_ENDS_A_PROCESS: Final = ("app.segfault", "app.cuda_oom", "app.illegal_access", "app.device_assert", "node.oom")
_BEFORE: Final = 900.0
_AFTER: Final = 180.0


def explains(cause: Finding, symptom: Finding) -> bool:
    """Whether one statement is the reason of another of the same node."""
    if cause.weight < 40:
        return False
    if cause.category == symptom.category and symptom.sign != "mpi.abort":
        return False
    prefixes = _EXPLAINED_BY.get(symptom.category)
    if cause.category == "node.lost" and cause.weight < 65 and symptom.role == "self":
        return False
    if symptom.category == "node.lost" and symptom.weight < 65 and cause.role == "self":
        prefixes = (
            "app.",
            "data.",
            "serve.",
            "gpu.",
            "node.",
            "net.",
            "process.killed",
        )  # "is dead" of a replica, not of a host
    if symptom.sign == "mpi.abort":
        prefixes = ("app.", *_EXPLAINED_BY["app.exception"])
    if prefixes is None or not cause.category.startswith(prefixes):
        return False
    if symptom.category == "gpu.ecc" and "xid" in symptom.details:
        return False  # the driver named the error itself
    if symptom.category == "node.disk_fault" and symptom.weight >= 75:
        return False  # the kernel named the disk itself
    if cause.subject.node not in (symptom.subject.node, symptom.node) and not _ended_by_itself(cause, symptom):
        return False
    if cause.weight < 50 and symptom.weight >= 60:
        return False
    if cause.time_seconds is None or symptom.time_seconds is None:
        return True
    return cause.time_seconds - _AFTER <= symptom.time_seconds <= cause.time_seconds + _BEFORE


def _ended_by_itself(cause: Finding, symptom: Finding) -> bool:
    """Whether another node's statement is the reason of one that was only seen from outside: who waits for heartbeats cannot tell a dead process
    from a dead node, and mpirun only says which rank asked for the end of all.
    """
    if symptom.sign == "mpi.abort":
        return cause.role == "self" and cause.sign != "mpi.abort" and cause.weight >= 50
    return (
        symptom.sign == "jax.task-heartbeat"
        and symptom.subject.node is None
        and cause.role == "self"
        and cause.weight >= 50
        and cause.category.startswith(_ENDS_A_PROCESS)
    )
