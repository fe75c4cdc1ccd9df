"""Who failed first and why: from the findings of all nodes to one verdict. Pure.

Order of thought: what the job survived is no failure; an end that was announced explains all after it; then the earliest statement about
oneself, the deeper cause before its symptom; then votes of others; then what a stall's numbers tell; and only then "cannot tell". Followers never
win. Whatever was considered and dropped is listed with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from aimaster.brain import wording
from aimaster.brain.correlate import GRACE_SECONDS, Picture, correlate
from aimaster.brain.exits import from_exit
from aimaster.brain.hangs import Stall, explain_stall
from aimaster.brain.relations import clearly_before, everywhere, explains_removal, same_fault
from aimaster.brain.suspects import Ranked, is_foreign, level, rank_suspects, refine
from aimaster.wire.health import Action, Culprit, Evidence, FaultOf, Finding, RuledOut, Verdict, category

__all__ = ["diagnose", "from_exit"]

PLAIN: Final = 50
"""Weight from which a statement raises a failure by itself."""
KILLED: Final = 40
"""Weight from which the end of a process by a signal, with no step after it, is a failure although its cause is not told."""
SUPPORT: Final = 20
"""Weight from which a statement may explain a failure that other lines prove."""
EVIDENCE_LINES: Final = 14
OUTLIVED_SECONDS: Final = 60.0
"""In a job that ends badly, a few more steps after a statement forgive nothing: the end may be its doing."""
DECISIVE_OUTLIVED_SECONDS: Final = 600.0
"""The same for decisive hardware lines: a collective may hang for many minutes before anybody complains."""
NOTICE_SECONDS: Final = 900.0
"""So long after its announcement an end may come; steps made in between do not take it back."""
STICKY: Final = frozenset({"gpu.slowdown", "gpu.row_remap_failure", "gpu.lost", "gpu.silent_corruption"})
"""They do not go away because training goes on."""
BYGONE_SECONDS: Final = 7200.0
"""Steps of other nodes so long after it were made without the node, or after it was mended."""
OUTLIVED_BY_NO_STEP: Final = frozenset({"gpu.lost", "gpu.ecc", "gpu.fabric", "node.kernel_fault"})
"""A node of which one is true makes no more steps: steps a while later are those of a node that was mended before."""

_OF_PEERS: Final = ("torch.", "nccl.", "mpi.", "infiniband.", "python.connection-lost")
"""Signs by which one node complains of others."""


def diagnose(findings: Iterable[Finding], now: float) -> Verdict:
    """The verdict on everything that was found; `now` closes the window of a job that still runs."""
    picture = correlate(
        finding for finding in findings if finding.time_seconds is None or finding.time_seconds <= now + 86400
    )
    signs = refine(picture)
    picture = msgspec.structs.replace(picture, findings=tuple(signs))
    case = _Case(picture)
    return case.announced() or case.rooted() or case.stalled() or case.cancelled() or case.unknown() or case.benign()


class _Case:
    """One picture under judgement; each method is one step of the order of thought."""

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.ruled_out: list[RuledOut] = []
        suspects = [finding for finding in picture.findings if finding.role in ("self", "accusation")]
        suspects = self._drop_announced(suspects)
        echoes = [one for one in picture.findings if one.role == "follower" and not picture.recovered(one)]
        self.echoes = self._drop_announced(echoes)
        self.alarming = [echo for echo in self.echoes if echo.weight >= 3 and echo.severity != "info"]
        self.ends_badly = bool(self.alarming) or any(not picture.recovered(one) for one in suspects)
        self.survived = [one for one in suspects if self._survived(one)]
        self.open = [one for one in suspects if one not in self.survived]
        self.failed = bool(self.alarming) or any(
            one.weight >= PLAIN
            or (one.category == "process.killed" and one.weight >= KILLED)
            or ("uncaught" in one.details and one.weight >= SUPPORT)
            for one in self.open
        )
        for one in self.survived:
            self._rule_out(one, "the job went on after it")

    def _drop_announced(self, suspects: list[Finding]) -> list[Finding]:
        """A node that was taken away on purpose is not lost, and the end of its processes is no failure."""
        removals = [one for one in self.picture.announcements if one.role == "benign"]
        if not removals:
            return suspects
        kept = []
        for one in suspects:
            why = next((removal for removal in removals if explains_removal(removal, one)), None)
            if why is None:
                kept.append(one)
            else:
                self._rule_out(
                    one, "its removal was announced: " + wording.short(why.evidence[0].text if why.evidence else "")
                )
        return kept

    def _survived(self, finding: Finding) -> bool:
        """What progress followed is no failure. In a job that ends badly a few more steps forgive nothing."""
        if self._node_went_on(finding):
            return True
        if finding.category in STICKY and (finding.category != "gpu.slowdown" or finding.count >= 3):
            return False
        if finding.time_seconds is None and finding.category == "app.illegal_access" and "xid" in finding.details:
            # Seconds since boot: nobody knows when it was. A job of which nothing else failed has survived a program's Xid.
            return bool(self.picture.progress) and not self.alarming and not self._timed_suspects(finding)
        if not self.picture.recovered(finding):
            return False
        if not self.ends_badly or self.picture.finished:
            return True
        outlived = self.picture.outlived_seconds(finding)
        decisive = finding.severity == "critical" and finding.weight >= 85
        return outlived is None or outlived >= (DECISIVE_OUTLIVED_SECONDS if decisive else OUTLIVED_SECONDS)

    def _node_went_on(self, finding: Finding) -> bool:
        """The same node's steps after it: a lost GPU would have ended them, and whoever was killed for memory was none of the job."""
        node, at = finding.subject.node, finding.last_seconds or finding.time_seconds
        own = self.picture.last_progress_seconds(node) if node is not None else None
        last = own or self.picture.last_progress_seconds()
        if at is None or last is None or finding.role != "self":
            return False
        if finding.category.startswith("node.oom") and is_foreign(finding, self.picture):
            return own is not None and own > at + GRACE_SECONDS
        return finding.category in OUTLIVED_BY_NO_STEP and last - at >= (OUTLIVED_SECONDS if own else BYGONE_SECONDS)

    def _timed_suspects(self, finding: Finding) -> bool:
        """Whether anything else, with a time, was not survived."""
        return any(
            one is not finding
            and one.role in ("self", "accusation")
            and one.time_seconds is not None
            and one.weight >= SUPPORT
            and not self.picture.recovered(one)
            for one in self.picture.findings
        )

    # ------------------------------------------------------------------------------------------------- the steps

    def announced(self) -> Verdict | None:
        """Preemption, time limit, scale-down: they explain everything after them, but not what was broken before."""
        notices = [one for one in self.picture.announcements if one.role == "self" and not self._outdated(one)]
        if not notices:
            return None
        notice = notices[0]
        ranked = self._ranked()
        root = ranked[0].finding if ranked else None
        if root is not None and clearly_before(root, notice) and root.weight >= 75 and level(root) <= 3:
            self._rule_out(notice, f"{wording.what(root.category)} came first")
            return None
        for one in ranked:
            self._rule_out(one.finding, f"it follows the announced end ({wording.what(notice.category)})")
        if notice.category == "sched.time_limit":
            notice = msgspec.structs.replace(notice, subject=Culprit())
        related = [one.finding for one in ranked if one.finding.subject.node == notice.subject.node]
        return self._verdict(notice, related, confidence=0.9)

    def _outdated(self, notice: Finding) -> bool:
        """Whether the job outlived the notice. Steps within its term are expected, where the job then ends badly."""
        if not self.picture.recovered(notice):
            return False
        outlived = self.picture.outlived_seconds(notice)
        return not self.ends_badly or bool(self.picture.finished) or outlived is None or outlived > NOTICE_SECONDS

    def rooted(self) -> Verdict | None:
        """The best-placed statement, if the job failed or the statement alone proves a failure."""
        ranked = self._ranked()
        if not ranked or not self.failed:
            return None
        best = ranked[0]
        for other in ranked[1:]:
            if (
                other.finding.category != best.finding.category
                or other.finding.subject.node != best.finding.subject.node
            ):
                self._rule_out(other.finding, other.why or wording.later(best.finding, other.finding))
        related = [one.finding for one in ranked[1:] if one.finding.subject.node == best.finding.subject.node]
        return self._verdict(best.finding, related, confidence=_confidence(ranked))

    def stalled(self) -> Verdict | None:
        """Nobody says he failed: numbers, missing ranks, silence."""
        if not self.failed:
            return None
        stall = explain_stall(msgspec.structs.replace(self.picture, findings=tuple(self.echoes)))
        return None if stall is None else self._stall(stall)

    def cancelled(self) -> Verdict | None:
        """A plain cancellation with nothing wrong before it: somebody asked for it."""
        ends = [echo for echo in self.echoes if echo.category == "sched.time_limit"]
        broke = any(
            "exit_code" in echo.details and echo.details["exit_code"] not in ("0", "-15", "143") for echo in self.echoes
        )
        if not ends or broke:
            return None
        first = min(ends, key=_when)
        verdict = self._verdict(first, [], confidence=0.6)
        return msgspec.structs.replace(
            verdict,
            fault_of="user_code" if first.sign == "python.keyboard-interrupt" else verdict.fault_of,
            summary="Somebody cancelled the job, and nothing was wrong before.",
            advice="Nothing is to be mended: start it again if the cancellation was not meant.",
        )

    def unknown(self) -> Verdict | None:
        """Something ended badly and no sign explains it."""
        if not self.failed:
            return None
        first = min(self.echoes, key=_when, default=None)
        row = category("unknown")
        return Verdict(
            category="unknown",
            culprit=self._named(first),
            fault_of=row.fault_of,
            action=row.action,
            confidence=0.2,
            summary="The job ended badly, and no known sign says why.",
            advice=row.advice,
            time_seconds=first.time_seconds if first else None,
            evidence=self._evidence(None),
            ruled_out=tuple(self.ruled_out),
        )

    def _named(self, first: Finding | None) -> Culprit:
        """Whom torchrun reports as the first, else who ended where nobody else spoke; one who complains of a peer is not to blame for it."""
        reported = [one for one in self.echoes if one.details.get("first") == "true"]
        if reported:
            return min(reported, key=_when).subject
        alone = len({echo.node for echo in self.echoes}) == 1
        complains = first is None or (first.category != "unknown" and first.sign.startswith(_OF_PEERS))
        return Culprit(node=first.subject.node if first and alone and not complains else None)

    def benign(self) -> Verdict:
        """Nothing wrong, or nothing that needs more than a note."""
        notes = [
            one
            for one in self.picture.findings
            if one.category == "gpu.row_remap_pending" and not self.picture.progress
        ]
        if notes:
            return self._verdict(notes[0], notes[1:], confidence=0.7)
        for one in self.open:
            self._rule_out(one, "by itself it stops nothing, and nothing failed")
        return Verdict(
            category="benign",
            confidence=0.9 if self.picture.progress or self.picture.finished else 0.6,
            summary="Nothing is wrong."
            if not self.ruled_out
            else "Nothing failed; what looks alarming was survived or harmless.",
            advice=category("benign").advice,
            ruled_out=tuple(self.ruled_out),
        )

    # ------------------------------------------------------------------------------------------------ making verdicts

    def _ranked(self) -> list[Ranked]:
        candidates = [one for one in self.open if one.weight >= (SUPPORT if self.failed else PLAIN)]
        return rank_suspects(candidates, self.echoes)

    def _verdict(self, root: Finding, related: list[Finding], *, confidence: float) -> Verdict:
        row = category(root.category)
        culprit = self._culprit(root, related)
        fault_of: FaultOf = root.fault_of or row.fault_of
        action: Action = root.action or row.action
        traceback = root.traceback or next((one.traceback for one in related if one.traceback), "")
        return Verdict(
            category=root.category,
            culprit=culprit,
            fault_of=fault_of,
            action=action,
            confidence=round(min(confidence, 0.99), 2),
            summary=wording.summary(root, culprit),
            advice=wording.advice(root, row.advice),
            traceback=traceback if row.fault_of == "user_code" else "",
            time_seconds=root.time_seconds,
            evidence=self._evidence(root),
            ruled_out=tuple(self.ruled_out),
        )

    def _culprit(self, root: Finding, related: list[Finding]) -> Culprit:
        """The root's subject, completed by what else was said of the same thing; nobody when all say the same at once."""
        subject = root.subject
        if root.category in ("hang.unknown", "sched.time_limit", "benign"):
            return Culprit()
        if level(root) >= 3 and everywhere(root, self.picture):
            return Culprit()
        rank, gpu, pid = subject.rank, subject.gpu, subject.pid
        bus_pid = next(
            (
                one.subject.pid
                for one in self.picture.findings
                if gpu and one.subject.node == subject.node and one.subject.gpu == gpu and one.subject.pid
            ),
            None,
        )
        pid = pid or bus_pid
        rank = rank if rank is not None else self._rank_of(subject.node, pid)
        for one in sorted(related, key=level):
            if rank is not None and one.subject.rank not in (None, rank):
                continue
            if pid is not None and one.subject.pid not in (None, pid):
                continue
            if same_fault(root, one):
                rank = rank if rank is not None else one.subject.rank
                pid = pid or one.subject.pid
                gpu = gpu or one.subject.gpu
        if root.category.startswith("node.oom") and is_foreign(root, self.picture):
            rank = None
        if rank is None and "file_rank" in root.details:
            rank = int(root.details["file_rank"])
        return Culprit(node=subject.node, rank=rank, gpu=gpu, pid=pid)

    def _rank_of(self, node: str | None, pid: int | None) -> int | None:
        if pid is None:
            return None
        for one in self.picture.findings:
            if one.subject.pid == pid and one.subject.rank is not None and one.subject.node == node:
                return one.subject.rank
        return None

    def _stall(self, stall: Stall) -> Verdict:
        row = category(stall.category)
        nobody = stall.category in ("hang.unknown", "app.collective_mismatch")
        culprit = Culprit() if nobody else stall.subject
        first = stall.evidence[0].time_seconds if stall.evidence else None
        return Verdict(
            category=stall.category,
            culprit=culprit,
            fault_of=row.fault_of,
            action=row.action,
            confidence=stall.confidence,
            summary=f"{wording.sentence(wording.what(stall.category))}{wording.at(culprit)}: {stall.why}.",
            advice=row.advice,
            time_seconds=first,
            evidence=_merge(stall.evidence, self._evidence(None)),
            ruled_out=tuple(self.ruled_out),
        )

    def _evidence(self, root: Finding | None) -> tuple[Evidence, ...]:
        """The root's lines and the first echoes of each kind, in order of time."""
        lines: list[Evidence] = list(root.evidence) if root is not None else []
        seen: set[tuple[str, str | None]] = set()
        for echo in sorted(self.echoes, key=_when):
            if (
                echo is not root
                and (echo.sign, echo.node) not in seen
                and len(lines) < EVIDENCE_LINES
                and echo.evidence
            ):
                seen.add((echo.sign, echo.node))
                lines.append(echo.evidence[0])
        lines.sort(key=lambda line: (line.time_seconds is None, line.time_seconds or 0.0))
        return tuple(lines)

    def _rule_out(self, finding: Finding, why: str) -> None:
        key = (finding.category, finding.subject, why)
        if len(self.ruled_out) < 40 and all((one.category, one.culprit, one.why) != key for one in self.ruled_out):
            self.ruled_out.append(
                RuledOut(category=finding.category, culprit=finding.subject, why=why, evidence=finding.evidence[:1])
            )


def _when(finding: Finding) -> tuple[bool, float]:
    return finding.time_seconds is None, finding.time_seconds or 0.0


def _merge(first: tuple[Evidence, ...], more: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
    known = {(line.file, line.offset) for line in first}
    return first + tuple(line for line in more if (line.file, line.offset) not in known)


def _confidence(ranked: list[Ranked]) -> float:
    best = ranked[0].finding
    value = 0.45 + best.weight / 200.0
    if best.role == "accusation":
        value -= 0.1
    votes = Counter(one.finding.category for one in ranked)
    if votes[best.category] > 1:
        value += 0.05
    return value
