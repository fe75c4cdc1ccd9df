"""The members' logs: every byte goes past the catalogue of signs once; the last lines are kept for the day the member dies.

A statement that needs attention is news while the member still runs, once for each sign and start; when it ends, all that its log says
goes with the report of its end, by the same code that reads finished logs. Excerpts are bounded and freed of secrets.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import structlog

from agents import stacks
from agents.member import Member
from agents.tail import BUDGET_BYTES, Tail
from aimaster.catalogue import Catalogue, XidTable
from aimaster.catalogue.findings import collect
from aimaster.catalogue.kept import Kept, keep
from aimaster.catalogue.scan import LogScan
from aimaster.catalogue.templates import Piece, new_lines
from aimaster.telemetry.scrub import MAX_LINE_CHARACTERS, excerpt, scrub
from aimaster.wire.health import NEW_LINE, Evidence, Finding, Subject
from aimaster.wire.ids import MemberId, NodeId
from aimaster.wire.messages import AgentEvent, Found, MemberExited

MOST_FINDINGS = 50
"""Of one start of a member."""
EARLIER_BYTES = 1024 * 1024
END_BYTES = 64 * 1024
"""Of the earlier starts of a member, and of its last one, when nothing known explains its end."""
NEWS = ("sign", "announcement")
"""Kinds of statement that are reported at once; facts and progress are not."""
NEWS_WEIGHT = 50
"""Lighter signs support a failure but raise none."""
logger = structlog.get_logger()


class _Log:
    """The log of one start."""

    def __init__(self, member: Member, catalogue: Catalogue, node: NodeId) -> None:
        self.member = member
        self.tail = Tail(member.folder / "output.log", member.ordered.log_offset)
        self.scan = LogScan(catalogue, node=node, file=f"members/{member.name}/output.log")
        self.scan.bytes_read = member.ordered.log_offset  # offsets are those of the file
        self.past: Kept | None = None
        self.fresh = b""
        """The last piece of what the last read gained."""
        self.seen = 0
        """Hits of the scan that were looked at."""
        self.told: set[str] = set()
        self.judged = True
        """False after a sign failed on it: the log is only followed then."""

    def read(self) -> bool:
        """Feed what is new; True when there was something."""
        before = self.tail.bytes_read
        self.fresh = b""
        for piece in self.tail.read():
            self.fresh = piece
            if self.judged:
                self._judge(partial(self.scan.feed, piece))
        return self.tail.bytes_read > before

    def findings(self, xids: XidTable, now: float, *, final: bool = False) -> list[Finding]:
        """What the log says so far."""
        found: list[Finding] = []

        def collect_all() -> None:
            if final:
                self.scan.finish()
            found.extend(collect([self.scan], xids, now=now))

        if self.judged:
            self._judge(collect_all)
        return found

    def _judge(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # a sign that fails blinds us for this log alone, never the agent
            self.judged = False
            logger.exception("log_not_judged", member=self.member.name)


class LogWatch:
    """Follows output.log of each member."""

    def __init__(
        self,
        node: NodeId,
        catalogue: Catalogue,
        report: Callable[[AgentEvent, float], None],
        heard: Callable[[Member, bytes], None] | None = None,
        ended: Callable[[Kept], None] | None = None,
    ) -> None:
        """`heard` is given the end of what each log gains; `ended` what a log that is followed no more has said."""
        self.bytes_read = 0
        self.events: dict[tuple[str, str], int] = {}
        """Statements of signs told while the member ran, by category and role."""
        self._node = node
        self._catalogue = catalogue
        self._report = report
        self._heard = heard
        self._ended = ended
        self._logs: dict[MemberId, _Log] = {}

    def followed(self) -> Iterable[_Log]:
        """The logs of living members that can be judged."""
        return [log for log in self._logs.values() if log.judged]

    def add(self, member: Member) -> None:
        self._logs[member.name] = _Log(member, self._catalogue, self._node)

    def tick(self) -> None:
        """Read what is new in all logs, a bounded amount of each, and tell the news."""
        for log in self._logs.values():
            before = log.tail.bytes_read
            log.read()
            gained = log.tail.bytes_read - before
            self.bytes_read += gained
            # While old lines are made up for, after a restart of this agent, their pace is ours and not the member's.
            if log.fresh and gained < BUDGET_BYTES and self._heard is not None:
                self._heard(log.member, log.fresh)
            if len(log.scan.hits) > log.seen and len(log.told) < MOST_FINDINGS:
                log.seen = len(log.scan.hits)
                self._tell_news(log)

    def _tell_news(self, log: _Log) -> None:
        now = time.time()
        for finding in self._findings(log, now):
            if finding.sign in log.told or finding.weight < NEWS_WEIGHT or finding.role == "benign":
                continue
            log.told.add(finding.sign)
            key = (finding.category, finding.role)
            self.events[key] = self.events.get(key, 0) + 1
            self._report(Found(finding=finding), now)

    def exit_report(self, member: Member, exit_code: int | None, number: int | None, at: float) -> MemberExited:
        """Read the log to its end, stop following it, and tell how the member ended with what it said last."""
        log = self._logs.pop(member.name, None)
        if log is None or log.member is not member:
            log = _Log(member, self._catalogue, self._node)
        while log.read():
            pass
        log.tail.close()
        findings = self._findings(log, at, final=True)
        if self._ended is not None and log.judged:
            self._ended(keep(log.scan))
        if exit_code == 1 and (fence := self._fence_finding(member, at)):
            findings.append(fence)
        return MemberExited(
            member=member.name,
            role=member.spec.role,
            incarnation=member.incarnation,
            process=member.process,
            exit_code=exit_code,
            signal=number,
            at=at,
            expected=member.ordered.stopping or exit_code == 0,
            findings=tuple(findings[-MOST_FINDINGS:]) + self._new_lines(log, exit_code, at),
            log_tail=excerpt(log.tail.last_lines()),
        )

    def _new_lines(self, log: _Log, exit_code: int | None, at: float) -> tuple[Finding, ...]:
        """After a bad end: what this start printed that no sign knows and no earlier start of the member printed."""
        begin = log.member.ordered.log_offset
        if not exit_code or not begin:
            return ()
        path = log.member.folder / "output.log"
        try:
            with path.open("rb") as file:
                file.seek(max(0, begin - EARLIER_BYTES))
                before = file.read(begin - file.tell()).splitlines()
                file.seek(max(begin, path.stat().st_size - END_BYTES))
                start, end = file.tell(), file.read(END_BYTES)
        except OSError:
            return ()
        now = []
        for line in end.splitlines(keepends=True):
            if not self._catalogue.match(line.rstrip()):
                now.append((start, line))
            start += len(line)
        piece = Piece(self._node, f"members/{log.member.name}/output.log", before, now)
        return tuple(
            Finding(
                sign=NEW_LINE, category="unknown", role="benign", kind="fact", severity="info", weight=0,
                subject=Subject(node=self._node), node=self._node, time_seconds=at, evidence=(line,),
            )
            for line in new_lines([piece])
        )  # fmt: skip

    def _findings(self, log: _Log, now: float, *, final: bool = False) -> list[Finding]:
        """What the log says so far, each about this member."""
        found = []
        for finding in log.findings(self._catalogue.xids, now, final=final):
            if finding.kind not in NEWS:
                continue
            evidence = tuple(
                msgspec.structs.replace(one, text=scrub(one.text[:MAX_LINE_CHARACTERS])) for one in finding.evidence
            )
            at = now if finding.time_seconds is None else finding.time_seconds
            identity = f"{self._node}:{log.member.name}:{log.member.incarnation}:{finding.sign}"
            found.append(msgspec.structs.replace(finding, id=identity, evidence=evidence, time_seconds=at))
        return found

    def _fence_finding(self, member: Member, at: float) -> Finding | None:
        """Exit code 1 after the self-fence's dump is a hang, never an exception of the program."""
        text = stacks.read_from(member.folder / "stacks.txt", member.ordered.stacks_offset)
        begin = text.rfind(stacks.FENCE_MARK)
        if begin < 0:
            return None
        file = f"members/{member.name}/stacks.txt"
        proof = text[begin : begin + MAX_LINE_CHARACTERS]
        return Finding(
            sign="agent.self_fence",
            category="hang.straggler",
            role="self",
            severity="critical",
            subject=Subject(node=self._node, pid=member.process.pid if member.process else None),
            node=self._node,
            time_seconds=at,
            weight=100,
            evidence=(Evidence(node=self._node, file=file, time_seconds=at, text=proof, sign="agent.self_fence"),),
        )
