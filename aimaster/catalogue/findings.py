"""Turns what the scans of many logs kept into findings on one clock, with every node under one name.

Incomplete times are completed from the collection itself; host names, addresses and Ray's node ids are joined to the folders the logs lie in; Xid
lines get their meaning from the table; tracebacks, torchrun reports and flight-recorder tables become findings of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from aimaster.catalogue.blocks import FlightTable, HangDump, TorchrunReport, Traceback
from aimaster.catalogue.exceptions import judge_exception
from aimaster.catalogue.hits import Hit, ProgressMark
from aimaster.catalogue.kept import Log
from aimaster.catalogue.lines import DAY, Stamp, complete, read_speaker, read_stamp
from aimaster.catalogue.names import Names, expand_hosts, is_address
from aimaster.catalogue.xid import APPLICATION_FIRST, XidTable, sxid_is_fatal
from aimaster.telemetry.scrub import scrub
from aimaster.wire.health import Action, Evidence, FaultOf, Finding, Role, Severity, Subject

_MILD = re.compile(
    r"\"level\": ?\"(?:debug|info|warn(?:ing)?)\"|(?<!NCCL )(?<!=)\b(?:DEBUG|INFO|WARNING)\b|\[W\d{3,4} |^W\d{4} "
)
"""A program that logs an echo as a warning has caught it: by itself that is no failure."""
_PCI = re.compile(r"^(?:0000)?([0-9a-fA-F]{4}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})")

_OWN_ACCUSATIONS: Final = frozenset({"kubernetes", "ray"})
"""Sources whose accusations lie among the accused node's own logs when they name nobody (kubectl describe)."""

LAST_BYTES: Final = 2048
"""A traceback with no more than that behind it ends its log."""
TASK_BYTES: Final = 4096
"""So near behind Ray's heading of a task's error, an exception without its traceback is the task's."""
MOST_RANKS: Final = 64
"""Of the ranks that one line names."""
EXIT_MEANINGS: Final[dict[int, tuple[str, Role, int]]] = {
    -11: ("app.segfault", "self", 52),
    139: ("app.segfault", "self", 52),
    -7: ("app.segfault", "self", 50),
    135: ("app.segfault", "self", 50),
    -9: ("process.killed", "self", 40),
    137: ("process.killed", "self", 40),
}
"""What an exit code alone suggests; every other code only says that the process ended."""


def collect(scans: Iterable[Log], xids: XidTable, *, now: float) -> list[Finding]:
    """Findings of all scans, in order of time; `now` dates logs that tell no date at all."""
    scans = list(scans)
    near = _reference(scans, now)
    names = Names(scans)
    found: list[Finding] = []
    for scan in scans:
        one = _OneLog(scan, names, xids, near)
        found += one.findings()
    found.sort(key=lambda finding: (finding.time_seconds is None, finding.time_seconds or 0.0))
    return found


def _reference(scans: Sequence[Log], now: float) -> float:
    """A complete time from the logs themselves, else now."""
    stamps: list[Stamp] = [
        stamp
        for scan in scans
        for stamp in (scan.first_stamp, *(hit.stamp for hit in scan.hits[:50]), *(mark.stamp for mark in scan.progress))
        if stamp is not None
    ]
    whole = sorted(stamp.seconds for stamp in stamps if not stamp.missing)
    if whole:
        return whole[len(whole) // 2]
    dated = next((stamp for stamp in stamps if stamp.missing == "year"), None)
    if dated is None:
        return now
    at = complete(dated, now)
    return at if at <= now + DAY else complete(dated, now - 365 * DAY)


def normal_gpu(gpu: str | None) -> str | None:
    """PCI addresses in one spelling: four digits of domain, lower case, without the function."""
    if gpu is None:
        return None
    found = _PCI.match(gpu)
    return f"{found[1]}:{found[2]}:{found[3]}".lower() if found else gpu


class _OneLog:
    def __init__(self, scan: Log, names: Names, xids: XidTable, near: float) -> None:
        self.scan, self.names, self.xids, self.near = scan, names, xids, near
        self._tracebacks = [block for block in scan.blocks if isinstance(block, Traceback) and not block.harmless]

    def findings(self) -> list[Finding]:
        found = [one for hit in self.scan.hits for host in _each_host(hit) for one in _each_rank(self._from_hit(host))]
        found += self._exceptions()
        for block in self.scan.blocks:
            if isinstance(block, TorchrunReport):
                found += self._entries(block)
            elif isinstance(block, FlightTable):
                found += self._missing_ranks(block)
        found += [self._progress(mark) for mark in self.scan.progress]
        found += self._extent()
        return found

    # ------------------------------------------------------------------------------------------------------ one line

    def _from_hit(self, hit: Hit) -> Finding:
        sign, groups = hit.sign, dict(hit.groups)
        said_by = self.names.speaker_node(self.scan, hit.speaker.host)
        category, role = sign.category, sign.role
        severity, weight = sign.severity, sign.weight
        fault_of, action = sign.fault_of, sign.action
        if sign.id in ("nvidia.xid", "nvidia.xid-reported"):
            category, role, severity, weight, fault_of, action = self._xid(groups, weight)
        elif sign.id == "nvidia.sxid" and not sxid_is_fatal(int(groups["sxid"]), groups.get("word", "")):
            role, weight, severity = "follower", 5, "warning"
        elif sign.id == "torch.elastic-failed":
            category, role, weight = EXIT_MEANINGS.get(int(groups["exit_code"]), (category, role, weight))
        if role == "follower" and _MILD.search(hit.text):
            severity = "info"
        subject = self._subject(hit, groups, said_by)
        at = self._time(hit.stamp)
        last = self._time(read_stamp(hit.last_line)) if hit.last_line else None
        if self.scan.progress:
            groups["steps_after"] = str(self.scan.steps_after(max(hit.offset, hit.last_offset)))
        if any(block.exception_offset == hit.offset and self._ends_with(block) for block in self._tracebacks):
            groups["uncaught"] = "true"
        return Finding(
            sign=sign.id,
            category=category,
            role=role,
            kind=sign.kind,
            severity=severity,
            subject=subject,
            node=said_by,
            time_seconds=at,
            fault_of=fault_of,
            action=action,
            weight=weight,
            count=hit.count,
            last_seconds=last,
            details={name: value for name, value in groups.items() if name not in ("node", "rank", "gpu", "pid")},
            traceback=self._traceback_at(hit),
            evidence=(self._evidence(said_by, hit.line, hit.offset, at, hit.text, role, sign.id),),
        )

    def _xid(
        self, groups: dict[str, str], weight: int
    ) -> tuple[str, Role, Severity, int, FaultOf | None, Action | None]:
        code = int(groups["xid"])
        meaning = self.xids.read(code, groups.get("text", ""))
        role: Role = "follower" if meaning.follower else "self"
        if meaning.follower:
            weight = 10
        elif code in APPLICATION_FIRST:
            weight = 62
        return meaning.category, role, meaning.severity, weight, meaning.fault_of, meaning.action

    def _subject(self, hit: Hit, groups: dict[str, str], said_by: str | None) -> Subject:
        speaker, context, about = hit.speaker.subject, hit.context or Subject(), self.scan.about
        node = groups.get("node") or groups.get("name" if "node_id" in groups else "", "")
        if node:
            named: str | None = self.names.resolve(node)
        elif "node_id" in groups:
            named = self.names.ray_node(groups["node_id"]) or (None if hit.sign.role == "accusation" else said_by)
        elif hit.sign.role == "accusation" and hit.sign.source not in _OWN_ACCUSATIONS:
            named = None  # the accused is a rank, or unknown; never the accuser
        elif context.node and not hit.speaker.host and not (self.scan.node and hit.sign.source == "kubernetes"):
            named = self.names.resolve(context.node)
        else:
            named = None if hit.sign.where == "central" else said_by
        accuses = hit.sign.role == "accusation"
        pid = _number(groups.get("pid")) or (None if accuses else speaker.pid or context.pid or about.pid)
        rank = _first(_number(groups.get("rank")), None if accuses else _first(speaker.rank, context.rank))
        if rank is None and not accuses:
            rank = _number(
                groups.get("pg_rank")
            )  # its place in a process group: the world's rank where no prefix tells that
        if rank is None and not accuses and about.rank is not None:
            groups["file_rank"] = str(about.rank)  # a file's name is the weakest witness
        gpu = groups.get("gpu") or (None if accuses else speaker.gpu)
        return Subject(node=named, rank=rank, gpu=normal_gpu(gpu), pid=pid)

    def _traceback_at(self, hit: Hit) -> str:
        if hit.sign.kind != "sign" or hit.sign.role == "benign":
            return ""
        for trace in self._tracebacks:
            if trace.exception_offset == hit.offset:
                return scrub(trace.text())
        for dump in self.scan.blocks:
            if isinstance(dump, HangDump) and dump.offset == hit.offset:
                return scrub(dump.text())
        return ""

    def _time(self, stamp: Stamp | None) -> float | None:
        return None if stamp is None else complete(stamp, self.near)

    def _evidence(
        self, node: str | None, line: int, offset: int, at: float | None, text: str, role: Role, sign: str
    ) -> Evidence:
        return Evidence(
            node=node,
            file=self.scan.file,
            line=line,
            offset=offset,
            time_seconds=at,
            text=scrub(text),
            role=role,
            sign=sign,
        )

    # --------------------------------------------------------------------------------------------------- several lines

    def _exceptions(self) -> list[Finding]:
        """A finding for each traceback whose exception no sign knows."""
        found = []
        for block in self._tracebacks:
            if not block.exception or block.known:
                continue
            role, weight, category = judge_exception(block)
            speaker = read_speaker(block.opening)
            remote = self._remote_task(block)
            node = self.names.speaker_node(self.scan, speaker.host)
            if remote is not None and remote.node:
                node = self.names.resolve(remote.node)
            at = self._time(block.stamp or self._stamp_before(block.offset))
            text = f"{block.exception}: {block.message}" if block.message else block.exception
            details = {"exception": block.exception, "message": scrub(block.message)[:300]}
            if self._ends_with(block):
                details["uncaught"] = "true"
            subject = Subject(
                node=node,
                rank=_first(speaker.subject.rank, self.scan.about.rank),
                pid=_first(remote.pid if remote else None, _first(speaker.subject.pid, self.scan.about.pid)),
            )
            found.append(
                Finding(
                    sign="python.exception",
                    category=category,
                    role=role,
                    severity="error",
                    subject=subject,
                    node=node,
                    time_seconds=at,
                    weight=weight,
                    details=details,
                    traceback=scrub(block.text()),
                    evidence=(
                        self._evidence(
                            node, block.exception_line, block.exception_offset, at, text, role, "python.exception"
                        ),
                    ),
                )
            )
        return found

    def _ends_with(self, block: Traceback) -> bool:
        """Whether the log ends with this traceback: nobody caught the exception."""
        return self.scan.bytes_read - max(
            block.end_offset, block.exception_offset
        ) <= LAST_BYTES and not self.scan.steps_after(block.exception_offset)

    def _remote_task(self, block: Traceback) -> Subject | None:
        """The remote task whose exception this is, where Ray printed both: of tasks within tasks, the innermost."""
        inner = None
        for hit in self.scan.hits:
            first = block.offset - (TASK_BYTES if block.offset == block.exception_offset else 0)
            if hit.sign.id == "ray.task-error" and first <= hit.offset <= block.exception_offset:
                inner = Subject(node=hit.groups.get("node"), pid=_number(hit.groups.get("pid")))
        return inner

    def _stamp_before(self, offset: int) -> Stamp | None:
        earlier = [hit for hit in self.scan.hits if hit.offset <= offset and hit.stamp is not None]
        marks = [mark for mark in self.scan.progress if mark.offset <= offset and mark.stamp is not None]
        choices: list[tuple[int, Stamp | None]] = [(hit.offset, hit.stamp) for hit in earlier[-1:]]
        choices += [(mark.offset, mark.stamp) for mark in marks[-1:]]
        return max(choices, key=lambda pair: pair[0])[1] if choices else self.scan.first_stamp

    def _entries(self, block: TorchrunReport) -> list[Finding]:
        found = []
        for entry in block.entries:
            category, role, weight = EXIT_MEANINGS.get(entry.exit_code, ("unknown", "follower", 18))
            node = self.scan.node or (self.names.resolve(entry.host) if entry.host else None)
            at = self._time(read_stamp(entry.when.encode()))
            found.append(
                Finding(
                    sign="torch.elastic-entry",
                    category=category,
                    role=role,
                    severity="error",
                    subject=Subject(node=node, rank=entry.rank if entry.rank >= 0 else None, pid=entry.pid or None),
                    node=node,
                    time_seconds=at,
                    weight=weight,
                    details={
                        "local_rank": str(entry.local_rank),
                        "exit_code": str(entry.exit_code),
                        "first": str(entry.first).lower(),
                    },
                    evidence=(
                        self._evidence(node, entry.line, entry.offset, at, entry.text, role, "torch.elastic-entry"),
                    ),
                )
            )
        return found

    def _missing_ranks(self, block: FlightTable) -> list[Finding]:
        found = []
        at = self._time(self._stamp_before(block.offset))
        for ranks, offset, line, text in block.rows:
            for rank in ranks:
                proof = self._evidence(self.scan.node, line, offset, at, text, "accusation", "torch.missing-ranks")
                found.append(
                    Finding(
                        sign="torch.missing-ranks",
                        category="hang.straggler",
                        role="accusation",
                        subject=Subject(rank=rank),
                        node=self.scan.node,
                        time_seconds=at,
                        weight=88,
                        evidence=(proof,),
                    )
                )
        return found

    def _progress(self, mark: ProgressMark) -> Finding:
        speaker = read_speaker(mark.text.encode())
        node = self.names.speaker_node(self.scan, speaker.host)
        at = self._time(mark.stamp)
        return Finding(
            sign="progress",
            category="benign",
            role="benign",
            kind="progress",
            severity="info",
            subject=Subject(node=node, rank=speaker.subject.rank),
            node=node,
            time_seconds=at,
            details={"number": str(mark.number)},
            evidence=(self._evidence(node, 0, mark.offset, at, mark.text, "benign", "progress"),),
        )

    def _extent(self) -> list[Finding]:
        """When this log ended: a node that falls silent before the others is telling something."""
        if self.scan.end_stamp is None or self.scan.node is None:
            return []
        at = self._time(self.scan.end_stamp)
        return [
            Finding(
                sign="log.end",
                category="benign",
                role="benign",
                kind="fact",
                severity="info",
                subject=Subject(node=self.scan.node),
                node=self.scan.node,
                time_seconds=at,
                evidence=(
                    Evidence(node=self.scan.node, file=self.scan.file, time_seconds=at, role="benign", sign="log.end"),
                ),
            )
        ]


def _each_host(hit: Hit) -> list[Hit]:
    """A statement about several hosts in one bracket is one about each of them."""
    node = hit.groups.get("node", "")
    if "[" not in node:
        return [hit]
    return [msgspec.structs.replace(hit, groups={**hit.groups, "node": host}) for host in expand_hosts(node)]


def _each_rank(finding: Finding) -> list[Finding]:
    """A statement that names several ranks accuses each of them."""
    ranks = re.findall(r"\d+", finding.details.get("ranks", ""))
    if not ranks or finding.subject.rank is not None:
        return [finding]
    return [
        msgspec.structs.replace(finding, subject=msgspec.structs.replace(finding.subject, rank=int(rank)))
        for rank in ranks[:MOST_RANKS]
    ]


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _first(one: int | None, two: int | None) -> int | None:
    return one if one is not None else two


__all__ = ["EXIT_MEANINGS", "collect", "is_address", "normal_gpu"]
