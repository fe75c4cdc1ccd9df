"""Progress leases: reads what the training threads say, and when one falls silent looks for evidence and reports the suspicion.

A lease is the member's own, learnt in its process or from its log; a young one borrows that of its role once it is past the first silence
of the phase; unlearnt, it is `startup_hang_seconds`. A process stopped by a signal for longer than the shortest lease counts as silent at
once. Two looks follow: a second apart, and one lease apart with a stack dump each. Ranks of a wrapped command are looked at together
(rank_watch.py), since the silent one may only wait for another. A beat withdraws the suspicion. Nobody is killed here.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog

from agents import ranks, stacks
from agents.config import Pace
from agents.member import Member
from agents.rank_watch import COMMAND_ROLE, RankWatch
from agents.rules.hang import STOPPED, Look, evidence
from agents.sensors.process import read_process
from agents.steps import LogSteps
from aimaster.client import Leases, ProgressReading, read_progress
from aimaster.wire.ids import MemberId
from aimaster.wire.messages import AgentEvent, HangSuspected, MemberPicture, Progress
from aimaster.wire.places import progress_file

LONGEST_BETWEEN_REPORTS = 60.0
GROUP_PHASES = frozenset({"reduce"})
"""There a member waits for others: to stand in one place is no fault of its own."""
LOG_APART_SECONDS = 60.0
"""A lone program known by its log alone must stand still for at least so long, and use no processor: its phases are not known for sure."""
log = structlog.get_logger()


class _Watched:
    """One living member."""

    def __init__(self, member: Member, path: Path, now: float) -> None:
        self.member = member
        self.path = path
        self.since = now
        """Start of the present silence: the last beat, or when the watch began."""
        self.reading: ProgressReading | None = None
        self.stopped_since: float | None = None
        self.state_read_at = 0.0
        self.investigated = False
        self.lease_seconds: float | None = None
        """What was learnt for the phase it is in."""
        self.steps: LogSteps | None = None
        """Where it reports none itself."""

    @property
    def pid(self) -> int:
        return self.member.process.pid if self.member.process is not None else -1

    @property
    def beats(self) -> int:
        return -1 if self.reading is None else self.reading.beats

    def read(self) -> None:
        """Take the newest whole reading, if it is another one; the file is gone or torn at times, which tells nothing."""
        reading = read_progress(self.path)
        if reading is None and self.steps is not None:
            reading = self.steps.reading()
        if reading is not None and (
            self.reading is None or reading.beats != self.reading.beats or reading.pid != self.reading.pid
        ):
            self.reading = reading
            self.since = max(self.since, reading.monotonic)


class HangWatch:
    """All members of the node."""

    def __init__(
        self,
        memory: Path,
        *,
        node: str,
        pace: Pace,
        report: Callable[[AgentEvent, float], None],
        spawn: Callable[[str, Coroutine[Any, Any, None]], None],
    ) -> None:
        self.suspected: dict[str, int] = {}
        """Suspicions raised, by role."""
        self._node = node
        self._memory = memory
        self._pace = pace
        self._report = report
        self._spawn = spawn
        self._watched: dict[MemberId, _Watched] = {}
        self._role_leases: dict[tuple[str, str], float] = {}
        self._ranks = RankWatch(
            node, self._watched, pace=pace, broken=self._broken_command, progress=self.progress, tell=self._tell,
            report=report, spawn=spawn,
        )  # fmt: skip

    def add(self, member: Member) -> None:
        watched = _Watched(member, progress_file(self._memory, member.name), time.monotonic())
        if not member.spec.reports_progress:
            watched.steps = LogSteps(watched.pid, Leases(member.spec.lease_floor_seconds))
        self._watched[member.name] = watched

    def hear(self, member: Member, fresh: bytes) -> None:
        """What the member's log has gained: its steps are progress where it reports none itself."""
        watched = self._watched.get(member.name)
        if watched is not None and watched.member is member and watched.steps is not None:
            watched.steps.feed(fresh, time.monotonic(), time.time())

    def remove(self, member: Member) -> None:
        watched = self._watched.get(member.name)
        if watched is not None and watched.member is member:
            del self._watched[member.name]

    def tick(self) -> None:
        """Read everybody's progress once; begins an investigation of who is silent for too long."""
        now = time.monotonic()
        for watched in self._watched.values():
            watched.read()
            self._learn(watched)
            watched.lease_seconds = self._learnt(watched)
            self._note_state(watched, now)
        self._ranks.tick(now)
        for watched in self._watched.values():
            grouped = watched.member.spec.role == COMMAND_ROLE and not self._ranks.alone
            if watched.investigated or not self._broken(watched, now) or (grouped and watched.stopped_since is None):
                continue
            watched.investigated = True
            self._spawn(f"look at {watched.member.name}", self._investigate(watched))

    def _broken_command(self) -> Member | None:
        """A rank of a command whose own lease is broken."""
        now = time.monotonic()
        ranked = (one for one in self._watched.values() if one.member.spec.role == COMMAND_ROLE)
        return next((one.member for one in ranked if self._broken(one, now)), None)

    def progress(self, member: MemberId) -> Progress:
        """The member's progress as the master shows it."""
        watched = self._watched.get(member)
        if watched is None:
            return Progress()
        reading, age = watched.reading, time.monotonic() - watched.since
        if reading is None:
            return Progress(age_seconds=age)
        return Progress(
            phase=reading.phase,
            step=reading.step,
            lineage=reading.lineage,
            beats=reading.beats,
            age_seconds=age,
            lease_seconds=watched.lease_seconds,
        )

    def picture(self, member: Member) -> MemberPicture | None:
        """The member now; None before it is known who it is."""
        if member.process is None:
            return None
        facts = read_process(member.process.pid) if member.alive else None
        return MemberPicture(
            member=member.name,
            role=member.spec.role,
            incarnation=member.incarnation,
            process=member.process,
            alive=member.alive,
            progress=self.progress(member.name),
            cpu_seconds=facts.cpu_seconds if facts else 0.0,
            resident_bytes=facts.resident_bytes if facts else 0,
        )

    async def dump(self, member: Member) -> str | None:
        """The stacks of all threads of whoever beats for this member."""
        watched = self._watched.get(member.name)
        if watched is None:
            return None
        pid = watched.reading.pid if watched.reading is not None else watched.pid
        return await stacks.dump(pid, member.folder / "stacks.txt", self._pace.dump_seconds)

    # -- leases ------------------------------------------------------------------------------------------------------

    def _learn(self, watched: _Watched) -> None:
        reading = watched.reading
        if reading is not None and reading.lease_hint_seconds is not None:
            self._role_leases[watched.member.spec.role, reading.phase] = reading.lease_hint_seconds

    def _learnt(self, watched: _Watched) -> float | None:
        """The lease that was learnt for the phase the member is in."""
        reading = watched.reading
        if reading is None:
            return None
        if reading.lease_hint_seconds is not None:
            return reading.lease_hint_seconds
        return self._role_leases.get((watched.member.spec.role, reading.phase)) if reading.seen > 0 else None

    def _broken(self, watched: _Watched, now: float) -> bool:
        spec = watched.member.spec
        if watched.stopped_since is not None and now - watched.stopped_since > spec.lease_floor_seconds:
            return True
        if watched.reading is None and not spec.reports_progress:
            return False
        lease = self._learnt(watched)
        return now - watched.since > (spec.startup_hang_seconds if lease is None else lease)

    def _note_state(self, watched: _Watched, now: float) -> None:
        if now - watched.state_read_at < self._pace.look_seconds:
            return
        watched.state_read_at = now
        facts = read_process(watched.pid)
        if facts is None or facts.state != STOPPED:
            watched.stopped_since = None
        elif watched.stopped_since is None:
            watched.stopped_since = now

    # -- looks -------------------------------------------------------------------------------------------------------

    async def _investigate(self, watched: _Watched) -> None:
        """Until the member beats or ends: every further look is compared with the first, at growing distance."""
        try:
            beats = watched.beats
            first, text = await self._look(watched)
            await asyncio.sleep(self._pace.look_seconds)
            later, _ = await self._look(watched, with_dump=False)
            pause = self._learnt(watched) or watched.member.spec.startup_hang_seconds
            while self._still_silent(watched, beats):
                self._suspect(watched, first, later, text)
                await asyncio.sleep(max(pause, self._pace.look_seconds))
                later, text = await self._look(watched)
                pause = min(2 * pause, max(pause, LONGEST_BETWEEN_REPORTS))
        finally:
            watched.investigated = False

    def _still_silent(self, watched: _Watched, beats: int) -> bool:
        watched.read()
        return watched.member.alive and watched.beats == beats and self._broken(watched, time.monotonic())

    async def _look(self, watched: _Watched, *, with_dump: bool = True) -> tuple[Look, str]:
        at = time.monotonic()
        pid = watched.reading.pid if watched.reading is not None else watched.pid
        facts = read_process(pid) or read_process(watched.pid)
        text = None
        if with_dump and facts is not None and facts.state != STOPPED:
            text = await stacks.dump(pid, watched.member.folder / "stacks.txt", self._pace.dump_seconds)
        thread = watched.reading.thread if watched.reading is not None else 0
        look = Look(
            at=at,
            state=facts.state if facts else "?",
            cpu_seconds=facts.cpu_seconds if facts else 0.0,
            stack=stacks.stack_of(text, thread) if text else None,
        )
        return look, text or ""

    def _suspect(self, watched: _Watched, first: Look, second: Look, text: str) -> None:
        reading = watched.reading
        alone = reading is not None and reading.phase not in GROUP_PHASES and not ranks.is_rank(watched.member)
        lease = self._learnt(watched) if alone else None
        by_log = watched.steps is not None and reading is not None and reading.thread == 0
        if lease is not None and by_log:
            lease = max(lease, LOG_APART_SECONDS)
        words = evidence(first, second, lease_seconds=lease)
        if by_log and "no-cpu" not in words:
            words = tuple(word for word in words if word != "same-frame-twice")
        self._tell(watched.member, self.progress(watched.member.name), words, tuple(text.splitlines()))

    def _tell(
        self, member: Member, progress: Progress, words: tuple[str, ...], lines: tuple[str, ...], *,
        rank: int | None = None, pid: int | None = None, seen_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        role = member.spec.role
        self.suspected[role] = self.suspected.get(role, 0) + 1
        log.warning("hang_suspected", member=member.name, incarnation=member.incarnation, evidence=list(words))
        now = time.time()
        self._report(
            HangSuspected(
                member=member.name,
                role=role,
                incarnation=member.incarnation,
                progress=progress,
                evidence=words,
                stacks=lines[: stacks.MOST_LINES],
                rank=rank,
                pid=pid,
                seen_seconds=seen_seconds,
                at=now,
            ),
            now,
        )
