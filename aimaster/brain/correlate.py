"""Joins findings of many nodes to one picture: who is who, what belongs together, what the job did afterwards.

Pure. Repeats are collapsed, missing ranks, pids and nodes are filled from lines that name both, and progress is laid beside the findings, so that
`Picture.recovered` can say whether the job went on after a statement. Nothing is judged here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from aimaster.wire.health import Finding, Incident, Subject

GRACE_SECONDS: Final = 5.0
"""Progress that much later than a statement of another log counts as after it: clocks and buffers differ."""
STEPS_AFTER: Final = 2
"""So many steps must follow in the same log to speak of a recovery: one may only have been flushed late."""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known, in order of time."""

    findings: tuple[Finding, ...]
    """Signs only, settled and collapsed."""
    facts: tuple[Finding, ...]
    announcements: tuple[Finding, ...]
    nodes: tuple[str, ...]
    """Every node that spoke."""
    progress: dict[str, Finding]
    """Per file: its last progress."""
    ends: dict[str, float]
    """Per node: when its logs end."""
    finished: tuple[Finding, ...]
    """Good ends."""

    def last_progress_seconds(self, node: str | None = None) -> float | None:
        """When the job (or one node of it) last reported a finished step."""
        times = [
            mark.time_seconds
            for mark in self.progress.values()
            if mark.time_seconds is not None and node in (None, mark.node)
        ]
        return max(times, default=None)

    def recovered(self, finding: Finding) -> bool:
        """Whether the job went on after this: more steps in the same log, or progress clearly later in another one, or a good end."""
        if "uncaught" in finding.details:
            return self._ended_after(finding)  # what others do after it does not bring its process back
        proof = finding.evidence[-1] if finding.evidence else None
        if proof is not None and proof.file in self.progress and "steps_after" in finding.details:
            return int(finding.details["steps_after"]) >= STEPS_AFTER or self._ended_after(finding)
        at = finding.last_seconds or finding.time_seconds
        last = self.last_progress_seconds()
        if at is not None and last is not None and last > at + GRACE_SECONDS:
            return True
        return self._ended_after(finding)

    def outlived_seconds(self, finding: Finding) -> float | None:
        """How long after it the job still made progress; None when the times are not known."""
        at = finding.last_seconds or finding.time_seconds
        last = self.last_progress_seconds()
        return None if at is None or last is None else last - at

    def _ended_after(self, finding: Finding) -> bool:
        proof = finding.evidence[-1] if finding.evidence else None
        for end in self.finished:
            mark = end.evidence[0] if end.evidence else None
            if mark and proof and mark.file == proof.file and mark.file:
                if mark.offset > proof.offset or _same_moment(end, finding):
                    return True
                if finding.role == "follower" and finding.time_seconds is None:
                    return True  # an echo behind the good end of its own log: everybody leaves
            elif end.time_seconds is not None and finding.time_seconds is not None and _same_moment(end, finding):
                return True
        return False


def _same_moment(end: Finding, finding: Finding) -> bool:
    """A good end and what is said while everybody leaves."""
    if end.time_seconds is None or finding.time_seconds is None:
        return False
    return finding.time_seconds <= end.time_seconds + 30.0


class _Who:
    """Which rank, pid, GPU and node belong together."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.rank_node: dict[int, str] = {}
        self.rank_of_pid: dict[tuple[str | None, int], int] = {}
        self.pid_of_rank: dict[tuple[str | None, int], int] = {}
        self.base: dict[str | None, int] = {}
        self.pid_of_gpu: dict[tuple[str | None, str], int] = {}
        self.index_of_bus: dict[tuple[str | None, str], str] = {}
        for finding in findings:
            self._learn(finding)

    def _learn(self, finding: Finding) -> None:
        subject, details = finding.subject, finding.details
        node, rank, pid, gpu = subject.node, subject.rank, subject.pid, subject.gpu
        if rank is not None and node is not None and finding.role != "accusation":
            self.rank_node.setdefault(rank, node)
        if finding.sign == "torch.elastic-entry" and rank is not None:
            if node is not None:
                self.rank_node[rank] = node
            if details.get("local_rank", "-1") != "-1":
                self.base[node] = rank - int(details["local_rank"])
        if rank is not None and pid and finding.role != "accusation":
            self.rank_of_pid.setdefault((node, pid), rank)
            self.pid_of_rank.setdefault((node, rank), pid)
        if gpu is not None and pid:
            self.pid_of_gpu.setdefault((node, gpu), pid)
        if "bus" in details and gpu is not None:
            self.index_of_bus[(node, bus_address(details["bus"]))] = gpu

    def settle(self, finding: Finding) -> Finding:
        """The finding with the fields of its subject filled that other lines determine."""
        subject, details = finding.subject, finding.details
        node, rank, pid = subject.node, subject.rank, subject.pid
        if node is None and rank is not None:
            node = self.rank_node.get(rank)
        if rank is None and pid:
            rank = self.rank_of_pid.get((node, pid))
        if rank is None and "local_rank" in details and node in self.base:
            rank = self.base[node] + int(details["local_rank"])
        if rank is None and "local_rank" in details and not self.base and len(set(self.rank_node.values())) <= 1:
            rank = int(details["local_rank"])
        if not pid and rank is not None:
            pid = self.pid_of_rank.get((node, rank))
        settled = Subject(node=node, rank=rank, gpu=subject.gpu, pid=pid or None)
        return finding if settled == subject else msgspec.structs.replace(finding, subject=settled)


def bus_address(bus: str) -> str:
    """NCCL's busId (3b000) as a PCI address (0000:3b:00)."""
    if ":" in bus:
        return bus.lower()
    digits = bus.rjust(8, "0")
    return f"{digits[:-5].rjust(4, '0')}:{digits[-5:-3]}:{digits[-3:-1]}"


def _placed(findings: list[Finding]) -> list[Finding]:
    """What a rank printed into its launcher's log happened where the launcher says that this rank ran."""
    ran_on: dict[tuple[str, int], str] = {}
    for one in findings:
        if one.sign.startswith(("slurm.task-", "mpi.exi")) and one.evidence:
            task = one.details.get("task", "")
            rank = one.subject.rank if one.subject.rank is not None else int(task) if task.isdigit() else None
            node = one.details.get("on") or (one.subject.node if one.role == "accusation" else None)
            if rank is not None and node and "[" not in node:
                ran_on[(one.evidence[0].file, rank)] = node
    if not ran_on:
        return findings
    placed = []
    for one in findings:
        place = (one.evidence[0].file, one.subject.rank) if one.evidence and one.subject.rank is not None else None
        node = ran_on.get(place) if place is not None else None
        if place is None and one.evidence and one.node is None and one.kind == "sign":
            here = {node for (file, _), node in ran_on.items() if file == one.evidence[0].file}
            node = next(iter(here)) if len(here) == 1 else None  # only tasks of one node ended badly
        own = one.role == "self" and one.subject.node == one.node
        placed.append(
            msgspec.structs.replace(one, subject=msgspec.structs.replace(one.subject, node=node))
            if node and own
            else one
        )
    return placed


def correlate(findings: Iterable[Finding]) -> Picture:
    """One picture of all findings."""
    everything = list(findings)
    who = _Who(everything)
    for finding in list(everything):  # pids known by one line give ranks to another
        if finding.sign in ("torch.elastic-failed", "deepspeed.exit", "deepspeed.exit-bus-error"):
            who._learn(who.settle(finding))  # noqa: SLF001 - same module
    settled = _placed([who.settle(finding) for finding in everything])
    signs = collapse(finding for finding in settled if finding.kind == "sign")
    progress: dict[str, Finding] = {}
    ends: dict[str, float] = {}
    for finding in settled:
        if finding.kind == "progress" and finding.evidence:
            known = progress.get(finding.evidence[0].file)
            if known is None or known.evidence[0].offset <= finding.evidence[0].offset:
                progress[finding.evidence[0].file] = finding
        elif finding.sign == "log.end" and finding.node is not None and finding.time_seconds is not None:
            ends[finding.node] = max(ends.get(finding.node, 0.0), finding.time_seconds)
    nodes = {finding.node for finding in settled if finding.node is not None}
    return Picture(
        findings=tuple(signs),
        facts=tuple(finding for finding in settled if finding.kind == "fact"),
        announcements=tuple(finding for finding in settled if finding.kind == "announcement"),
        nodes=tuple(sorted(nodes)),
        progress=progress,
        ends=ends,
        finished=tuple(finding for finding in settled if finding.kind == "end"),
    )


def collapse(findings: Iterable[Finding]) -> list[Finding]:
    """The same said of the same subject by the same node is one finding; it keeps the first line and counts the rest."""
    merged: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        numbers = tuple(
            finding.details.get(name)
            for name in ("xid", "seq", "op", "exception", "message", "exit_code", "peer", "address")
        )
        key = (finding.sign, finding.category, finding.role, finding.subject, finding.node, numbers, _minute(finding))
        known = merged.get(key)
        if known is None:
            merged[key] = finding
            continue
        last = max(
            (at for at in (known.last_seconds, finding.last_seconds, finding.time_seconds) if at is not None),
            default=None,
        )
        merged[key] = msgspec.structs.replace(known, count=known.count + finding.count, last_seconds=last)
    return list(merged.values())


def _minute(finding: Finding) -> int | None:
    """Events an hour apart stay apart: a fault that comes back is another fault."""
    return None if finding.time_seconds is None else int(finding.time_seconds // 600)


def incident(findings: Iterable[Finding], *, name: str = "") -> Incident:
    """The findings as one incident, in order of time."""
    ordered = sorted(findings, key=lambda one: (one.time_seconds is None, one.time_seconds or 0.0))
    times = [one.time_seconds for one in ordered if one.time_seconds is not None]
    nodes = {one.subject.node or one.node for one in ordered}
    return Incident(
        id=name,
        opened_at_seconds=min(times, default=None),
        findings=tuple(ordered),
        nodes=tuple(sorted(node for node in nodes if node)),
    )
