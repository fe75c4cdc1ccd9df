"""Looks at all ranks of a wrapped command together, as soon as nobody has made a step for a while, and names the one that the others wait for.

A look harms nobody, so the first comes at half a lease, or after two shortest ones while nothing is learnt, the first step included. What
is concluded, and after how long, is `agents.rules.groups`' business. Where all ranks of this node stand together, the master is told whether they
wait or stand elsewhere: it knows the other nodes. Where there is no rank here, a silent member is looked at alone.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

import msgspec

from agents import ranks
from agents.config import Pace
from agents.member import Member
from agents.rules.groups import (
    LEASES,
    Apart,
    RankLook,
    Silence,
    Standing,
    describe,
    find_apart,
    find_standing,
    group,
    steady,
)
from aimaster.wire.ids import MemberId
from aimaster.wire.messages import AgentEvent, Found, Progress

COMMAND_ROLE = "command"
FIRST_LOOK_FLOORS = 1.0
UNLEARNT_LOOK_FLOORS = 1.6
"""Before any pace is known."""
BETWEEN_FLOORS = 0.5
UNLEARNT_BETWEEN_FLOORS = 0.8
MOST_LOOKS = 10
DENSE_LOOKS = 8
"""Then nothing will soon be decided, unless all stand where they stood at the last look: the pauses grow."""
LONGEST_PAUSE_SECONDS = 60.0
LONGEST_UNLEARNT_PAUSE_SECONDS = 600.0
"""A program that tells of no steps is looked at for as long as it runs."""
AGAIN_SECONDS = 10.0
TELL_SECONDS = 15.0
"""Between two words of one kind: the master compares fresh ones."""
LOOK_SHARE = 0.2
"""Looking takes at most this share of the time: 64 dumps take seconds."""


class Watched(Protocol):
    """What is asked of a watched member."""

    member: Member
    since: float

    @property
    def lease_seconds(self) -> float | None: ...


class Teller(Protocol):
    """How a suspicion is told."""

    def __call__(
        self, member: Member, progress: Progress, words: tuple[str, ...], lines: tuple[str, ...], *,
        rank: int | None = None, pid: int | None = None, seen_seconds: float = 0.0,
    ) -> None: ...  # fmt: skip


class RankWatch:
    """One node's ranks; used by the event loop alone."""

    def __init__(
        self,
        node: str,
        watched: Mapping[MemberId, Watched],
        *,
        pace: Pace,
        broken: Callable[[], Member | None],
        progress: Callable[[MemberId], Progress],
        tell: Teller,
        report: Callable[[AgentEvent, float], None],
        spawn: Callable[[str, Coroutine[Any, Any, None]], None],
    ) -> None:
        """`watched`: all members, as they come and go. `broken`: one of them whose own lease is broken."""
        self.alone = False
        """The last look found no rank."""
        self._node = node
        self._watched = watched
        self._pace = pace
        self._broken = broken
        self._progress = progress
        self._tell = tell
        self._report = report
        self._spawn = spawn
        self._looking = False
        self._done_at = 0.0
        """The last step at the end of the last looking: another look needs another silence, or a launcher that has begun its ranks since."""
        self._again_at = 0.0
        self._told: dict[str, float] = {}
        """When each kind of word is told again."""

    def tick(self, now: float) -> None:
        """Begin to look, if it is time."""
        there = self._command()
        if self._looking or not there:
            return
        last = _last_step(there)
        if now - last < self._first_look_seconds(there) or (last == self._done_at and now < self._again_at):
            return
        self._looking = True
        self._spawn("look at all ranks", self._look_on(last))

    def _command(self) -> list[Watched]:
        return [one for one in self._watched.values() if one.member.spec.role == COMMAND_ROLE]

    def _first_look_seconds(self, there: list[Watched]) -> float:
        floor, lease = _floor(there), _lease(there)
        return (
            UNLEARNT_LOOK_FLOORS * floor if lease is None else max(FIRST_LOOK_FLOORS * floor, LEASES["asleep"] * lease)
        )

    async def _look_on(self, last: float) -> None:
        """Until somebody makes a step, or there is nothing to compare."""
        try:
            found = await self._find()
            history: list[list[RankLook]] = []
            self._told.clear()
            count = 0
            while found and self._silent_since(last):
                began = time.monotonic()
                looks, texts = await ranks.look(found, self._pace.dump_seconds)
                count += 1
                if len(looks) < len(found):  # one has died: if that is not the end of all, the rest is another group
                    found, history = await self._find(), []
                else:
                    history = _shortened([*history, looks])
                    self._conclude(history, texts, last, count)
                stand = len(steady(history)) > 1
                await asyncio.sleep(self._pause_seconds(count, time.monotonic() - began, stand=stand))
            self.alone = not found
        finally:
            self._looking = False
            self._done_at, self._again_at = last, time.monotonic() + AGAIN_SECONDS

    async def _find(self) -> list[ranks.Rank]:
        return await asyncio.to_thread(ranks.find_ranks, [one.member for one in self._command()])

    def _pause_seconds(self, count: int, took: float, *, stand: bool) -> float:
        there = self._command()
        learnt = _lease(there) is not None
        pause = (BETWEEN_FLOORS if learnt else UNLEARNT_BETWEEN_FLOORS) * _floor(there)
        if count == 1:
            pause = min(pause, self._pace.look_seconds)
        if count > (4 * DENSE_LOOKS if stand else DENSE_LOOKS):
            longest = LONGEST_PAUSE_SECONDS if learnt else LONGEST_UNLEARNT_PAUSE_SECONDS
            pause = min(longest, pause * 1.5 ** min(count - DENSE_LOOKS, 20))
        return max(pause, took / LOOK_SHARE - took)

    def _silent_since(self, last: float) -> bool:
        there = self._command()
        return bool(there) and _last_step(there) == last

    def _conclude(self, history: list[list[RankLook]], texts: dict[int, str], last: float, count: int) -> None:
        there = self._command()
        if not self._silent_since(last):
            return
        looks = history[-1]
        seconds = min(one.at for one in looks) - last
        silence = Silence(seconds=seconds, lease_seconds=_lease(there), floor_seconds=_floor(there))
        apart, standing = find_apart(history, silence), find_standing(history, silence)
        silent = self._broken()
        if apart is not None:
            if self._is_news(f"{apart.kind} {apart.ranks}", looks[0].at):
                self._accuse(looks, texts, apart)
        elif standing is not None:
            if self._is_news("waits" if standing.waits else "elsewhere", looks[0].at):
                self._tell_where(looks, texts, standing)
        elif silent is not None and (count == 2 or count > DENSE_LOOKS):
            self._tell(silent, self._progress(silent.name), (), tuple(describe(group(looks))))

    def _is_news(self, word: str, now: float) -> bool:
        """Whether to tell this now: at once, then every fifteen seconds while it is so."""
        if now < self._told.get(word, 0.0):
            return False
        self._told = {word: now + TELL_SECONDS}
        return True

    def _accuse(self, looks: list[RankLook], texts: dict[int, str], apart: Apart) -> None:
        """Report the guilty: as findings, and the members they belong to as suspected with evidence."""
        groups = group(looks)
        now = time.time()
        for finding in ranks.accuse(self._node, looks, groups, apart, now):
            self._report(Found(finding=finding), now)
        if apart.kind != "straggler":
            return
        words = ("apart-from-group-twice",) + (("no-cpu",) if apart.doing == "asleep" else ())
        told: set[str] = set()
        for one in looks:
            guilty = self._watched.get(MemberId(one.member))
            if one.rank not in apart.ranks or one.member in told or guilty is None:
                continue
            told.add(one.member)
            lines = (*describe(groups), f"rank {one.rank} (pid {one.pid}):", *texts[one.rank].splitlines())
            self._tell(guilty.member, self._newest(guilty), words, lines, rank=one.rank, pid=one.pid)

    def _tell_where(self, looks: list[RankLook], texts: dict[int, str], standing: Standing) -> None:
        """Every rank here waits, or stands elsewhere: one word a member."""
        word = "waits-twice" if standing.waits else "elsewhere-twice"
        words = (word, "no-cpu") if standing.doing == "asleep" else (word,)
        for name in dict.fromkeys(one.member for one in looks):
            here = self._watched.get(MemberId(name))
            own = [one for one in looks if one.member == name]
            alone = own[0] if len(own) == 1 else None
            if here is not None:
                lines = (*describe(group(looks)), *texts[own[0].rank].splitlines())
                self._tell(
                    here.member, self._newest(here), words, lines,
                    rank=alone.rank if alone else None, pid=alone.pid if alone else None, seen_seconds=standing.seen_seconds,
                )  # fmt: skip

    def _newest(self, guilty: Watched) -> Progress:
        """The guilty's own progress; of one that reports none, that of the rank whose log tells of the job's."""
        own = self._progress(guilty.member.name)
        known = max(self._command(), key=lambda one: one.since)
        return own if own.beats else msgspec.structs.replace(self._progress(known.member.name), beats=0)


def _last_step(there: list[Watched]) -> float:
    """When anybody made a step, or came."""
    return max(one.since for one in there)


def _floor(there: list[Watched]) -> float:
    return max((one.member.spec.lease_floor_seconds for one in there), default=1.0)


def _lease(there: list[Watched]) -> float | None:
    """The job's: the longest of those that were learnt, None where none is."""
    return max((one.lease_seconds for one in there if one.lease_seconds is not None), default=None)


def _shortened(history: list[list[RankLook]]) -> list[list[RankLook]]:
    """The steady looks at the end, and one before them if there is any; of too many the first is kept."""
    history = history[-(len(steady(history)) + 1) :]
    if len(history) > MOST_LOOKS:
        del history[2]
    return history
