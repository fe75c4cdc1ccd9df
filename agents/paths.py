"""Logs beside the members' own that the agent was told to follow: a Ray session's folder, a launcher's log, a system log.

Patterns are looked through each second, which also works on network file systems, where notices of changes are silent. What a file held
when the agent came is history; one that appears later is read from its beginning, unless it is a known file under a new name. Of all
files together a bounded amount is read a tick, and each keeps a bounded memory: after some megabytes its scan begins anew.
"""

import glob
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
import structlog

from agents.logs import NEWS, NEWS_WEIGHT
from agents.tail import Tail
from aimaster.catalogue import Catalogue
from aimaster.catalogue.findings import collect
from aimaster.catalogue.kept import Kept, join, keep
from aimaster.catalogue.scan import LogScan
from aimaster.telemetry.scrub import MAX_LINE_CHARACTERS, scrub
from aimaster.wire.health import Finding
from aimaster.wire.ids import NodeId
from aimaster.wire.messages import AgentEvent, Found

DISCOVERY_SECONDS = 1.0
MOST_FILES = 256
TICK_BYTES = 4 << 20
SCAN_BYTES = 16 << 20
AGAIN_SECONDS = 600.0
"""The same sign of the same file is news again after this long."""
log = structlog.get_logger()


class _Named:
    """One file."""

    def __init__(self, path: str, offset: int) -> None:
        self.path = path
        self.tail = Tail(Path(path), offset)
        self.began = offset
        """Where the present scan began, in the file."""
        self.scan: LogScan | None = None
        self.past: Kept | None = None
        """What the scans before it have kept."""
        self.seen = 0
        self.told: dict[str, float] = {}


class NamedLogs:
    """Follows all files that the patterns name; used by the event loop alone."""

    def __init__(
        self,
        node: NodeId,
        patterns: Sequence[str],
        catalogue: Catalogue,
        report: Callable[[AgentEvent, float], None],
    ) -> None:
        self.bytes_read = 0
        self.left_out = 0
        """Files beyond the most that are followed."""
        self._node = node
        self._patterns = patterns
        self._catalogue = catalogue
        self._report = report
        self._files: dict[str, _Named] = {}
        self._inodes: set[int] = set()
        self._next_look = 0.0
        self._begun = False

    def __len__(self) -> int:
        return len(self._files)

    def tick(self) -> None:
        """Read what is new, a bounded amount, and tell the news."""
        if not self._patterns:
            return
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + DISCOVERY_SECONDS
            self._discover()
        budget = TICK_BYTES
        for named in list(self._files.values()):
            budget -= self._read(named, budget)
            if budget <= 0:
                break
        self._files = dict(
            sorted(self._files.items(), key=lambda pair: pair[1].tail.bytes_read)
        )  # the flood comes last

    def close(self) -> None:
        for named in self._files.values():
            named.tail.close()

    def _discover(self) -> None:
        found = [path for pattern in self._patterns for path in glob.iglob(pattern, recursive=True)]
        self.left_out = 0
        for path in found:
            if path in self._files:
                continue
            try:
                status = os.stat(path)
            except OSError:
                continue
            if not os.path.isfile(path):
                continue
            if len(self._files) >= MOST_FILES:
                self.left_out += 1
                continue
            known = status.st_ino in self._inodes or not self._begun
            self._inodes.add(status.st_ino)
            self._files[path] = _Named(path, status.st_size if known else 0)
        for path in set(self._files) - set(found):
            self._files.pop(path).tail.close()
        self._begun = True

    def _read(self, named: _Named, budget: int) -> int:
        before = named.tail.bytes_read
        try:
            for piece in named.tail.read(budget):
                scan = named.scan
                if scan is None or scan.bytes_read - named.began > SCAN_BYTES:
                    scan = self._begin_scan(named)
                scan.feed(piece)
            if named.scan is not None and len(named.scan.hits) > named.seen:
                named.seen = len(named.scan.hits)
                self._tell(named, named.scan)
        except Exception:  # a sign that fails blinds us for this file's present piece alone
            log.exception("log_not_judged", file=named.path)
            named.scan = None
        gained = named.tail.bytes_read - before
        self.bytes_read += gained
        return gained

    def _begin_scan(self, named: _Named) -> LogScan:
        if named.scan is not None:
            named.past = join(named.past, keep(named.scan))
            named.began = named.scan.bytes_read
        named.scan = LogScan(self._catalogue, node=self._node, file=named.path, count_lines=False)
        named.scan.bytes_read = named.began  # offsets are those of the file
        named.seen = 0
        return named.scan

    def followed(self) -> Iterable[_Named]:
        """The logs there are."""
        return self._files.values()

    def _tell(self, named: _Named, scan: LogScan) -> None:
        now = time.time()
        for finding in collect([scan], self._catalogue.xids, now=now):
            last = named.told.get(finding.sign)
            if finding.kind not in NEWS or finding.weight < NEWS_WEIGHT or finding.role == "benign":
                continue
            if last is not None and now - last < AGAIN_SECONDS:
                continue
            named.told[finding.sign] = now
            self._report(Found(finding=self._named(named, finding, now)), now)

    def _named(self, named: _Named, finding: Finding, now: float) -> Finding:
        proof = tuple(
            msgspec.structs.replace(one, text=scrub(one.text[:MAX_LINE_CHARACTERS])) for one in finding.evidence
        )
        name = f"{self._node}:{named.path}:{finding.sign}:{now:.0f}"
        at = now if finding.time_seconds is None else finding.time_seconds
        return msgspec.structs.replace(finding, id=name, evidence=proof, time_seconds=at)
