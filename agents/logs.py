"""The members' logs: every line goes past the catalogue of signs once; the last lines are kept for the day the member dies.

A sign is reported once for each start of a member, at most `MOST_FINDINGS` different ones; what the catalogue calls facts, progress or
benign is not news. Excerpts that leave the node are bounded and freed of secrets.
"""

import time
from collections.abc import Callable

from agents import stacks
from agents.rules.secrets import scrub
from agents.tail import Line, Tail
from agents.trainer import Member
from aimaster.catalogue import Catalogue
from aimaster.wire.health import Evidence, Finding, Subject
from aimaster.wire.ids import MemberId, NodeId
from aimaster.wire.messages import AgentEvent, Found, MemberExited

MOST_FINDINGS = 50
TAIL_LINE_CHARACTERS = 2000
_NEWS = ("sign", "announcement")


class _Log:
    def __init__(self, member: Member) -> None:
        self.member = member
        self.tail = Tail(member.folder / "output.log", member.ordered.log_offset)
        self.findings: dict[str, Finding] = {}


class LogWatch:
    """Follows output.log of each member."""

    def __init__(self, node: NodeId, catalogue: Catalogue, report: Callable[[AgentEvent, float], None]) -> None:
        self.lines_read = 0
        self._node = node
        self._catalogue = catalogue
        self._report = report
        self._logs: dict[MemberId, _Log] = {}

    def add(self, member: Member) -> None:
        self._logs[member.name] = _Log(member)

    def tick(self) -> None:
        """Read what is new in all logs, a bounded amount of each."""
        for followed in self._logs.values():
            self._judge(followed, followed.tail.read())

    def exit_report(self, member: Member, exit_code: int | None, number: int | None, at: float) -> MemberExited:
        """Read the log to its end, stop following it, and tell how the member ended with what it said last."""
        followed = self._logs.pop(member.name, None) or _Log(member)
        while lines := followed.tail.read():
            self._judge(followed, lines, news=False)
        self._judge(followed, followed.tail.read(final=True), news=False)
        followed.tail.close()
        findings = list(followed.findings.values())
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
            findings=tuple(findings),
            log_tail=tuple(scrub(line)[:TAIL_LINE_CHARACTERS] for line in followed.tail.kept),
        )

    def _judge(self, followed: _Log, lines: list[Line], *, news: bool = True) -> None:
        self.lines_read += len(lines)
        if not lines or not self._catalogue.find_literals("\n".join(line.text for line in lines).encode(errors="replace")):
            return
        member, now = followed.member, time.time()
        for line in lines:
            for match in self._catalogue.match(line.text):
                sign = match.sign
                if sign.kind not in _NEWS or sign.role == "benign" or sign.id in followed.findings:
                    continue
                if len(followed.findings) >= MOST_FINDINGS:
                    return
                finding = match.finding(
                    node=self._node,
                    time_seconds=now,
                    about=Subject(node=self._node, rank=member.spec.rank if member.spec.role == "command" else None),
                    evidence=Evidence(
                        node=self._node,
                        file=f"members/{member.name}/output.log",
                        offset=line.offset,
                        time_seconds=now,
                        text=scrub(line.text)[:TAIL_LINE_CHARACTERS],
                        role=sign.role,
                        sign=sign.id,
                    ),
                )
                followed.findings[sign.id] = finding
                if news:
                    self._report(Found(finding=finding), now)

    def _fence_finding(self, member: Member, at: float) -> Finding | None:
        """Exit code 1 after the self-fence's dump is a hang, never an exception of the program."""
        text = stacks.read_from(member.folder / "stacks.txt", member.ordered.stacks_offset)
        begin = text.rfind(stacks.FENCE_MARK)
        if begin < 0:
            return None
        dump = text[begin:]
        return Finding(
            sign="agent.self_fence",
            category="hang.straggler",
            role="self",
            severity="critical",
            subject=Subject(node=self._node, pid=member.process.pid if member.process else None),
            node=self._node,
            time_seconds=at,
            weight=100,
            evidence=(
                Evidence(
                    node=self._node,
                    file=f"members/{member.name}/stacks.txt",
                    time_seconds=at,
                    text=dump[:TAIL_LINE_CHARACTERS],
                    sign="agent.self_fence",
                ),
            ),
        )
