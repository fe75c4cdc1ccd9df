"""What lines of the kernel's log mean, by the catalogue's signs, the same code that reads finished logs. No I/O, no clock."""

from collections.abc import Iterable
from typing import Final

import msgspec

from aimaster.catalogue import Catalogue
from aimaster.catalogue.findings import collect
from aimaster.catalogue.scan import LogScan
from aimaster.telemetry.scrub import MAX_LINE_CHARACTERS, scrub
from aimaster.wire.health import Finding

SOURCES: Final = frozenset({"kernel", "nvidia", "infiniband", "storage", "host"})
KINDS: Final = ("sign", "announcement")
KEPT_LINES: Final = 3
"""A lost GPU is told in three lines, which may come in two pieces."""
COLLAPSE_SECONDS: Final = 60.0
MOST_KEYS: Final = 1000


class KernelRules:
    """Judges the kernel's log, piece by piece."""

    def __init__(self, catalogue: Catalogue, node: str) -> None:
        self._catalogue = catalogue
        self._node = node
        self._before = ""

    def judge(self, text: str, now: float) -> list[Finding]:
        """What these whole lines say, in order; each with an id of its own."""
        scan = LogScan(self._catalogue, node=self._node, file="kernel", count_lines=False)
        scan.feed((self._before + text).encode())
        scan.finish()
        seen = len(self._before.encode())
        self._before = "".join((self._before + text).splitlines(keepends=True)[-KEPT_LINES:])
        return [
            self._named(one, now)
            for one in collect([scan], self._catalogue.xids, now=now)
            if one.kind in KINDS
            and one.role != "benign"
            and one.sign.partition(".")[0] in SOURCES
            and one.evidence
            and one.evidence[0].offset >= seen
        ]

    def _named(self, finding: Finding, now: float) -> Finding:
        at = now if finding.time_seconds is None else finding.time_seconds
        who = finding.subject.gpu or finding.subject.pid or finding.details.get("device") or ""
        name = f"{self._node}:{finding.sign}:{finding.details.get('xid', '')}:{who}:{at:.3f}"
        proof = tuple(
            msgspec.structs.replace(one, text=scrub(one.text[:MAX_LINE_CHARACTERS]), time_seconds=at)
            for one in finding.evidence
        )
        return msgspec.structs.replace(finding, id=name, time_seconds=at, evidence=proof)


class Collapse:
    """The same trouble told again within a minute is the same event, whichever sensor tells it; 800,000 lines may be 29 events."""

    def __init__(self, decided_by_text: frozenset[int]) -> None:
        """`decided_by_text`: Xids of which the code alone does not say what they mean."""
        self.collapsed = 0
        self._decided_by_text = decided_by_text
        self._told: dict[tuple[str, ...], float] = {}

    def fresh(self, findings: Iterable[Finding], now: float) -> list[Finding]:
        """Those that are news."""
        news = []
        for one in findings:
            key = self._key(one)
            last = self._told.pop(key, None)
            self._told[key] = now  # the newest last
            if last is None or now - last > COLLAPSE_SECONDS:
                news.append(one)
            else:
                self.collapsed += 1
        for key in list(self._told)[: max(0, len(self._told) - MOST_KEYS)]:
            del self._told[key]
        return news

    def _key(self, finding: Finding) -> tuple[str, ...]:
        """What makes two findings one event. Of an Xid it is code and GPU, whoever names a process with it; where the kernel's words
        decide, its line is news even after NVML has told the code.
        """
        xid = finding.details.get("xid", "")
        if xid.isdigit():
            says_more = int(xid) in self._decided_by_text and finding.sign != "nvml.xid"
            return ("xid-line" if says_more else "xid", xid, str(finding.subject.gpu))
        details = finding.details
        return (
            finding.sign,
            str(finding.subject.gpu),
            str(finding.subject.pid),
            details.get("device", ""),
            details.get("group", ""),
        )
