"""Logs beside the members' own that the agent was told to follow: a Ray session's folder, a launcher's log, a system log.

Files are found and read by a thread (follow.py); what they gain is judged here, on the event loop. Each keeps a bounded memory: after some
megabytes its scan begins anew, and what the scan before had kept is kept.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import structlog

from agents.follow import Follower, FollowThread, Gain
from agents.logs import NEWS, NEWS_WEIGHT
from aimaster.catalogue import Catalogue
from aimaster.catalogue.findings import collect
from aimaster.catalogue.kept import Kept, join, keep
from aimaster.catalogue.scan import LogScan
from aimaster.telemetry.scrub import MAX_LINE_CHARACTERS, scrub
from aimaster.wire.health import Finding
from aimaster.wire.ids import NodeId
from aimaster.wire.messages import AgentEvent, Found

SCAN_BYTES = 16 << 20
QUIET_SECONDS = 2.0
AGAIN_SECONDS = 600.0
"""The same sign of the same file is news again after this long."""
log = structlog.get_logger()


class _Named:
    """One file."""

    def __init__(self, path: str, offset: int) -> None:
        self.path = path
        self.began = offset
        """Where the present scan began, in the file."""
        self.scan: LogScan | None = None
        self.past: Kept | None = None
        """What the scans before it have kept."""
        self.seen = 0
        self.told: dict[str, float] = {}


class NamedLogs:
    """All files that the patterns name; used by the event loop alone."""

    def __init__(
        self,
        node: NodeId,
        patterns: Sequence[str],
        catalogue: Catalogue,
        report: Callable[[AgentEvent, float], None],
        ended: Callable[[Kept], None] | None = None,
    ) -> None:
        """`ended` is given what a file that is there no more has said."""
        self.bytes_read = 0
        self._patterns = patterns
        self._node = node
        self._catalogue = catalogue
        self._report = report
        self._ended = ended
        self._files: dict[str, _Named] = {}
        self._follower: Follower | None = None

    @property
    def why_not_begun(self) -> str | None:
        """Why what is written now may not be seen; None once it will be."""
        if not self._patterns or (self._follower is not None and self._follower.begun):
            return None
        return "the named logs were not looked at yet"

    async def run(self, pause_seconds: float) -> None:
        """Judge what the thread reads, until cancelled."""
        if not self._patterns:
            return
        from agents.discovery import Discovery  # a megabyte that most nodes have no use for

        loop = asyncio.get_running_loop()
        follower = self._follower = Follower(self._patterns, Discovery(self._patterns))
        waiting: asyncio.Queue[list[Gain]] = asyncio.Queue()

        def hand_on(gains: list[Gain]) -> None:
            loop.call_soon_threadsafe(waiting.put_nowait, gains)

        thread = FollowThread(follower, hand_on, pause_seconds)
        thread.start()
        try:
            while True:
                try:
                    gains = await asyncio.wait_for(waiting.get(), QUIET_SECONDS)
                except TimeoutError:
                    self.settle()
                    continue
                self.take(gains)
                thread.taken()
        finally:
            thread.close()

    def take(self, gains: Iterable[Gain]) -> None:
        """Judge what files have gained, and tell the news."""
        for gain in gains:
            if gain.pieces:
                named = self._files.setdefault(gain.path, _Named(gain.path, gain.begins_at))
                self._feed(named, gain.pieces)
            elif (left := self._files.pop(gain.path, None)) is not None and left.scan is not None and self._ended:
                self._ended(join(left.past, keep(left.scan)))

    def settle(self) -> None:
        """Nothing was gained for a while: last lines without an end are as whole as they will be."""
        for named in self._files.values():
            self._feed(named, (), settles=True)

    def _feed(self, named: _Named, pieces: Iterable[bytes], *, settles: bool = False) -> None:
        try:
            for piece in pieces:
                self.bytes_read += len(piece)
                self._feed_piece(named, piece)
            if named.scan is not None and settles:
                named.scan.settle()
            self._tell_news(named)
        except Exception:  # a sign that fails blinds us for this file's present piece alone
            log.exception("log_not_judged", file=named.path)
            named.scan = None

    def _feed_piece(self, named: _Named, piece: bytes) -> None:
        """A scan that has read enough gives way to another between two statements."""
        scan = named.scan or self._begin_scan(named)
        if scan.bytes_read - named.began > SCAN_BYTES and (cut := piece.rfind(b"\n") + 1):
            scan.feed(piece[:cut])
            piece = piece[cut:]
            if scan.between_statements:
                scan = self._begin_scan(named)
        scan.feed(piece)

    def _begin_scan(self, named: _Named) -> LogScan:
        if named.scan is not None:
            self._tell_news(named)
            named.past = join(named.past, keep(named.scan))
            named.began = named.scan.bytes_read
        named.scan = LogScan(self._catalogue, node=self._node, file=named.path, count_lines=False)
        named.scan.bytes_read = named.began  # offsets are those of the file
        named.seen = 0
        return named.scan

    def followed(self) -> Iterable[_Named]:
        """The logs there are."""
        return self._files.values()

    def _tell_news(self, named: _Named) -> None:
        if named.scan is not None and len(named.scan.hits) > named.seen:
            named.seen = len(named.scan.hits)
            self._tell(named, named.scan)

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
