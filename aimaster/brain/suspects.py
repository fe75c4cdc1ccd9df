"""Ranks the statements that may be the root: earliest first, the deeper cause before its symptom, self before accusation. Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import msgspec

from aimaster.brain.causes import explains
from aimaster.brain.correlate import Picture
from aimaster.wire.health import Finding

TOGETHER_SECONDS: Final = 120.0
"""Statements that close to each other are one moment: logs are buffered and clocks differ; there the deeper cause wins."""
STALE_SECONDS: Final = 1800.0
"""Beyond the longest watchdog timeout, a statement that old before the first echo did not cause it."""

_LEVELS: Final[tuple[tuple[str, int], ...]] = (
    ("gpu.row_remap_pending", 5),
    ("gpu.access_lost", 1),
    ("gpu.memory_held", 2),
    ("gpu.", 1),
    ("net.port_down", 1),
    ("net.nic_fault", 1),
    ("net.rdma_error", 2),
    ("net.", 3),
    ("node.lost", 2),
    ("node.shared_fs", 2),
    ("node.", 1),
    ("ray.", 2),
    ("sched.", 0),
    ("app.exception", 4),
    ("app.", 3),
    ("data.", 3),
    ("serve.", 3),
    ("process.killed", 4),
    ("hang.", 4),
)


class Ranked(msgspec.Struct, frozen=True, kw_only=True):
    """One suspect in its place, and why it is not first."""

    finding: Finding
    why: str = ""


def level(finding: Finding) -> int:
    """How deep a category lies: 1 hardware and host, 2 a node or its service, 3 a specific and 4 a vague program error."""
    return next((depth for prefix, depth in _LEVELS if finding.category.startswith(prefix)), 5)


_OF_A_JOB: Final = re.compile(
    r"(?i)^(?:python|pt_|ray|torch|vllm|sglang|engine|deepspeed|mpi|train|main|worker|llm|cuda|dataloader|rank)"
)
"""What processes and threads of training and inference are called."""


def is_foreign(kill: Finding, picture: Picture) -> bool:
    """Whether a process that was killed for memory is none of the job's: no log knows its pid, and its name is another program's."""
    name = kill.details.get("name") or kill.details.get("name2") or ""
    if not name or _OF_A_JOB.match(name):
        return False
    pid = kill.subject.pid
    return not any(
        one.subject.pid == pid
        and one.subject.node in (kill.subject.node, None)
        and not one.category.startswith("node.oom")
        for one in (*picture.findings, *picture.facts, *picture.progress.values())
        if pid
    )


# ------------------------------------------------------------------------------------------------------------ refining


def refine(picture: Picture) -> list[Finding]:
    """Findings whose meaning depends on others get it: repeated Xids, recovery actions, contained errors, votes."""
    findings = list(picture.findings)
    findings = [_lasting(one) for one in findings]
    findings = _recovery_actions(findings)
    findings = _came_back(findings)
    findings = _firmware_again(findings)
    findings = _repeated_faults(findings)
    findings = _contained(findings)
    findings = _file_server_back(findings, picture)
    findings = _pod_started(findings, picture)
    findings = _accused_by_most(findings)
    findings = _head_lost(findings, picture)
    return _advertised(findings, picture)


def _xid(finding: Finding) -> int | None:
    code = finding.details.get("xid", "")
    return int(code) if code.isdigit() else None


def _lasting(finding: Finding) -> Finding:
    """A slowdown is a fault when it lasts; one look at it only supports a failure that others prove."""
    if finding.category != "gpu.slowdown" or finding.count >= 3 or finding.details.get("xid"):
        return finding
    return msgspec.structs.replace(finding, weight=min(finding.weight, 30))


def _recovery_actions(findings: list[Finding]) -> list[Finding]:
    """Xid 154 carries the driver's verdict on the GPU: it raises the action of the hardware Xid before it."""
    asks = {
        (one.subject.node, one.subject.gpu)
        for one in findings
        if _xid(one) == 154
        and any(word in one.details.get("text", "") for word in ("Reset Required", "Reboot Required", "Drain"))
    }
    return [
        msgspec.structs.replace(one, action="replace_node")
        if (one.subject.node, one.subject.gpu) in asks
        and one.role == "self"
        and one.fault_of in ("hardware", "platform")
        and one.category.startswith("gpu.")
        and one.category != "gpu.ecc_contained"
        else one
        for one in findings
    ]


def _came_back(findings: list[Finding]) -> list[Finding]:
    """RDMA trouble with the same peer that returns: the second rung at once."""
    moments: dict[str | None, set[int]] = defaultdict(set)
    for one in findings:
        if one.category == "net.rdma_error" and one.role == "accusation" and one.time_seconds is not None:
            moments[one.subject.node].add(int(one.time_seconds // 300))
    return [
        msgspec.structs.replace(one, action="reform_without")
        if one.category == "net.rdma_error" and len(moments[one.subject.node]) > 2
        else one
        for one in findings
    ]


def _firmware_again(findings: list[Finding]) -> list[Finding]:
    """A GPU whose engine or firmware timed out more than once needs more than another process."""
    moments: dict[tuple[str | None, str | None], int] = defaultdict(int)
    for one in findings:
        if one.category == "gpu.firmware" and one.role == "self" and _xid(one) is not None:
            moments[(one.subject.node, one.subject.gpu)] += one.count
    return [
        msgspec.structs.replace(one, action="replace_node")
        if one.category == "gpu.firmware" and moments[(one.subject.node, one.subject.gpu)] > 1
        else one
        for one in findings
    ]


def _repeated_faults(findings: list[Finding]) -> list[Finding]:
    """Faults that stay on one GPU are the GPU's; faults that move between GPUs are the program's."""
    events: dict[str | None, dict[str | None, set[float | int | None]]] = defaultdict(lambda: defaultdict(set))
    for one in findings:
        if one.category in ("app.illegal_access", "gpu.exec_fault") and _xid(one) is not None and one.role == "self":
            at = None if one.time_seconds is None else one.time_seconds // 60
            events[one.subject.node][one.subject.gpu].add(at if at is not None else one.subject.pid)
    changed = []
    for one in findings:
        gpus = events.get(one.subject.node, {})
        total = sum(len(times) for times in gpus.values())
        if one.category not in ("app.illegal_access", "gpu.exec_fault") or total < 2:
            changed.append(one)
        elif len(gpus) > 1:
            changed.append(
                msgspec.structs.replace(
                    one,
                    category="app.illegal_access",
                    fault_of="user_code",
                    action="stop_job",
                    subject=_without_gpu(one),
                )
            )
        elif _xid(one) is not None:
            changed.append(
                msgspec.structs.replace(
                    one,
                    category="gpu.exec_fault",
                    fault_of="hardware",
                    action="replace_node",
                    weight=max(one.weight, 80),
                )
            )
        else:
            changed.append(one)
    return changed


def _without_gpu(finding: Finding) -> msgspec.Struct:
    return msgspec.structs.replace(finding.subject, gpu=None, pid=None)


def _contained(findings: list[Finding]) -> list[Finding]:
    """An ECC text of the program beside a contained Xid 94 (and no uncontained one) is the contained error."""
    contained = {one.subject.node for one in findings if one.category == "gpu.ecc_contained"}
    uncontained = {
        one.subject.node
        for one in findings
        if one.category == "gpu.ecc" and _xid(one) is not None and _xid(one) != 48 and one.role == "self"
    }
    nodes = contained - uncontained
    return [
        msgspec.structs.replace(
            one, category="gpu.ecc_contained", fault_of="hardware", action="restart_process", weight=min(one.weight, 60)
        )
        if one.category == "gpu.ecc" and one.subject.node in nodes and one.role == "self"
        else one
        for one in findings
    ]


def _file_server_back(findings: list[Finding], picture: Picture) -> list[Finding]:
    """A file server that answered again is no fault; a port that came back is judged by the job's progress."""
    back = {(fact.node, fact.details.get("server")) for fact in picture.facts if fact.sign == "kernel.nfs-ok"}
    return [
        one
        for one in findings
        if not (one.sign == "kernel.nfs-not-responding" and (one.node, one.details.get("server")) in back)
    ]


def _pod_started(findings: list[Finding], picture: Picture) -> list[Finding]:
    """A volume that could not be mounted at first held up nothing once the pod's container started: the kubelet tries again."""
    starts = [
        (fact.evidence[0].file, fact.details.get("pod"), fact.evidence[0].offset)
        for fact in picture.facts
        if fact.sign == "kubernetes.container-started"
    ]
    return [
        one
        for one in findings
        if one.sign != "kubernetes.mount-failed"
        or not any(
            (file, pod) == (one.evidence[0].file, one.details.get("pod")) and offset > one.evidence[0].offset
            for file, pod, offset in starts
        )
    ]


def _accused_by_most(findings: list[Finding]) -> list[Finding]:
    """Votes for a silent peer: one accusation of the node that most others name; a node that accuses everybody accuses itself."""
    votes: dict[str, set[str | None]] = defaultdict(set)
    accusers: dict[str | None, set[str]] = defaultdict(set)
    for one in findings:
        if one.category == "net.rdma_error" and one.role == "accusation" and one.subject.node:
            votes[one.subject.node].add(one.node)
            accusers[one.node].add(one.subject.node)
    if not votes:
        return findings
    weight = {node: len(names) + (len(accusers[node]) if node in accusers else 0) for node, names in votes.items()}
    for node, accused in accusers.items():
        if node is not None:
            weight[node] = max(weight.get(node, 0), len(accused))
    top = max(weight.values())
    chosen = sorted(node for node, count in weight.items() if count == top)
    if len(chosen) != 1:
        chosen = sorted(node for node in chosen if node in votes)
    guilty = chosen[0]
    kept = []
    for one in findings:
        if one.category != "net.rdma_error" or one.role != "accusation":
            kept.append(one)
        elif one.subject.node in (guilty, None) or one.node == guilty:
            subject = msgspec.structs.replace(one.subject, node=guilty)
            kept.append(msgspec.structs.replace(one, subject=subject))
    return kept


def _head_lost(findings: list[Finding], picture: Picture) -> list[Finding]:
    """All raylets lose the GCS: the head is meant, whatever address they print."""
    if not any(one.category == "ray.head_lost" for one in findings):
        return findings
    head = next((node for node in picture.nodes if "head" in node), None)
    changed = []
    for one in findings:
        if one.category == "ray.head_lost" and one.role == "accusation":
            address = one.details.get("address")
            node = address if address in picture.nodes else head or address
            changed.append(
                msgspec.structs.replace(
                    one, subject=msgspec.structs.replace(one.subject, node=node, rank=None, pid=None)
                )
            )
        else:
            changed.append(one)
    return changed


def _advertised(findings: list[Finding], picture: Picture) -> list[Finding]:
    """An address that cannot be reached is the fault of the one who advertised it."""
    publishers = {
        fact.details["address"]: fact
        for fact in picture.facts
        if fact.sign == "openrlhf.group-address" and fact.subject.rank == 0 and "address" in fact.details
    }
    changed = []
    for one in findings:
        address = one.details.get("address")
        if one.category != "net.unreachable" or not address or one.role == "follower":
            changed.append(one)
            continue
        publisher = publishers.get(address)
        if publisher is not None:
            subject = msgspec.structs.replace(publisher.subject, rank=None)
        elif address in picture.nodes:
            subject = msgspec.structs.replace(one.subject, node=address, rank=None, pid=None)
        else:
            subject = one.subject
        changed.append(msgspec.structs.replace(one, subject=subject))
    return changed


# ------------------------------------------------------------------------------------------------------------- ranking


def rank_suspects(candidates: Iterable[Finding], echoes: list[Finding]) -> list[Ranked]:
    """All suspects, the root first."""
    suspects = _without_stale(list(candidates), echoes)
    if not suspects:
        return []
    explained: dict[int, str] = {}
    for index, one in enumerate(suspects):
        cause = next((other for other in suspects if other is not one and explains(other, one)), None)
        if cause is not None:
            explained[index] = f"{cause.category} of the same node explains it"
    times = _effective_times(suspects)
    free = [index for index in range(len(suspects)) if index not in explained] or list(range(len(suspects)))
    start = min(times[index] for index in free)
    first_decisive = min((times[i] for i in free if suspects[i].weight >= 50), default=start)

    def place(index: int) -> tuple[float, ...]:
        one = suspects[index]
        in_first_moment = times[index] <= first_decisive + TOGETHER_SECONDS
        decisive = one.weight >= 50
        return (
            index in explained,
            not decisive,
            not in_first_moment,
            level(one) if in_first_moment else 0,
            one.subject.node is None,
            one.role == "accusation",
            one.weight < 75,
            times[index],
            level(one),
            -one.weight,
            index,
        )

    order = sorted(range(len(suspects)), key=place)
    return [Ranked(finding=suspects[index], why=explained.get(index, "")) for index in order]


def _without_stale(suspects: list[Finding], echoes: list[Finding]) -> list[Finding]:
    timeouts = [
        int(echo.details["timeout_ms"]) / 1000 for echo in echoes if echo.details.get("timeout_ms", "").isdigit()
    ]
    moments = [echo.time_seconds for echo in echoes if echo.time_seconds is not None and echo.weight >= 8]
    if not moments:
        return suspects
    oldest = min(moments) - max(timeouts, default=0.0) - STALE_SECONDS
    fresh = [one for one in suspects if one.time_seconds is None or (one.last_seconds or one.time_seconds) >= oldest]
    return fresh or suspects


def _effective_times(suspects: list[Finding]) -> list[float]:
    """A statement without a time is placed beside the earliest of its node, else of all."""
    known = [one.time_seconds for one in suspects if one.time_seconds is not None]
    earliest = min(known, default=0.0)
    by_node: dict[str | None, float] = {}
    for one in suspects:
        if one.time_seconds is not None:
            by_node[one.subject.node] = min(by_node.get(one.subject.node, one.time_seconds), one.time_seconds)
    return [
        one.time_seconds if one.time_seconds is not None else by_node.get(one.subject.node, earliest)
        for one in suspects
    ]
