"""The sentences of a verdict. Pure."""

from __future__ import annotations

from typing import Final

from aimaster.wire.health import Culprit, Finding

_WHAT: Final = {
    "gpu.lost": "a GPU fell off the bus",
    "gpu.ecc": "a GPU has uncorrectable memory errors",
    "gpu.ecc_contained": "a contained GPU memory error ended one process",
    "gpu.row_remap_failure": "a GPU has no spare memory rows left",
    "gpu.row_remap_pending": "a GPU remapped a memory row",
    "gpu.firmware": "a GPU's firmware no longer answers",
    "gpu.exec_fault": "a GPU faults again and again",
    "gpu.silent_corruption": "a GPU computes wrong results",
    "gpu.slowdown": "a GPU is slowed down by heat or power",
    "gpu.nvlink": "an NVLink failed",
    "gpu.fabric": "the NVSwitch fabric is not working",
    "gpu.pcie": "a PCIe link to a GPU failed",
    "gpu.driver_mismatch": "driver and libraries do not match",
    "gpu.access_lost": "the container lost access to its GPUs",
    "gpu.memory_held": "GPU memory is held by a left-over process",
    "net.port_down": "a network port went down",
    "net.nic_fault": "a network adapter failed",
    "net.rdma_error": "RDMA to a peer fails",
    "net.unreachable": "an advertised address cannot be reached",
    "net.port_in_use": "a port is already in use",
    "node.lost": "a node was lost",
    "node.kernel_fault": "a node's kernel crashed",
    "node.oom_host": "a host ran out of memory",
    "node.oom_cgroup": "a memory limit was exceeded",
    "node.shm_full": "/dev/shm is full",  # noqa: S108 - a sentence, not a path
    "node.disk_full": "a disk is full",
    "node.disk_fault": "a disk failed",
    "node.shared_fs": "the shared file system failed",
    "node.limits": "a process, thread or file limit was reached",
    "node.clock_skew": "a node's clock is wrong",
    "sched.preempted": "it was preempted",
    "sched.time_limit": "the job reached its time limit or was cancelled",
    "ray.head_lost": "the Ray head was lost",
    "ray.memory_monitor": "Ray killed a worker because its node ran out of memory",
    "ray.node_overloaded": "a Ray node was too busy to answer health checks",
    "serve.kv_cache": "no memory is left for the KV cache",
    "app.exception": "the program raised an exception",
    "app.config": "the configuration is wrong",
    "app.cuda_oom": "the program ran out of GPU memory",
    "app.device_assert": "a CUDA kernel's assertion failed",
    "app.illegal_access": "a CUDA kernel accessed memory it does not own",
    "app.segfault": "a process crashed in native code",
    "app.nan": "the loss or gradients became NaN",
    "app.collective_mismatch": "ranks run different collectives",
    "app.retryable": "an error that your rules call retryable",
    "data.corrupt": "a file is damaged",
    "data.remote": "a remote store failed",
    "hang.straggler": "a rank never came to the collective",
    "hang.unknown": "the job hangs",
    "process.killed": "a process was killed",
    "unknown": "an unknown failure",
    "benign": "nothing is wrong",
}


def what(category: str) -> str:
    """A category as the rest of a sentence."""
    return _WHAT.get(category, category)


def sentence(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def at(culprit: Culprit) -> str:
    """Where, as far as known."""
    parts = []
    if culprit.rank is not None:
        parts.append(f"rank {culprit.rank}")
    if culprit.gpu is not None:
        parts.append(f"GPU {culprit.gpu}")
    if culprit.pid is not None:
        parts.append(f"pid {culprit.pid}")
    inner = f" ({', '.join(parts)})" if parts else ""
    return f" on {culprit.node}{inner}" if culprit.node else inner


def summary(root: Finding, culprit: Culprit) -> str:
    """The verdict in one sentence."""
    said = root.details.get("message") or root.details.get("why") or ""
    exception = root.details.get("exception")
    if exception:
        said = f"{exception}: {said}" if said else exception
    tail = f": {short(said)}" if said else ""
    times = f" ({root.count} times)" if root.count > 1 else ""
    return f"{sentence(what(root.category))}{at(culprit)}{times}{tail}."


def advice(root: Finding, usual: str) -> str:
    """What to change, with the numbers of this case where the line tells them."""
    if root.category == "ray.memory_monitor":
        task, used, total = root.details.get("task"), root.details.get("used"), root.details.get("total")
        if task and used and total:
            phase = "while it started" if task.endswith("__init__") else "while it worked"
            return (
                f"{task} was killed {phase}: {used} of {total} GB of the node were in use. Start fewer of them on one node, "
                f"reserve memory for each (memory=…), or take nodes with more memory."
            )
    return usual


def later(root: Finding, other: Finding) -> str:
    """Why another statement is not the root."""
    if root.time_seconds is not None and other.time_seconds is not None and other.time_seconds > root.time_seconds:
        return f"it came {other.time_seconds - root.time_seconds:.0f} s after the root"
    if other.role == "accusation" and root.role == "self":
        return "a statement about oneself outweighs one about others"
    return f"{what(root.category)} lies deeper"


def short(text: str, most: int = 160) -> str:
    """One line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"
