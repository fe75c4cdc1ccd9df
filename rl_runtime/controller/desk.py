"""The controller as one thing, without HTTP: group, rollouts and ledger on one event loop, answers only after the fsync.

Every question is heard at once and answered when it has an answer: a turn waits up to a second for something to do. Nothing is
told to anybody before the records it rests on are durable; while the disk is full, nothing new is taken in either.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.messages import DeathNotice
from aimaster.wire.rollout import (
    CompleteReply,
    CompleteRequest,
    LeaseReply,
    LeaseRequest,
    StreamReply,
    StreamRequest,
)
from aimaster.wire.topology import Epoch, EpochProposal
from aimaster.wire.training import Turn, Wait, Word
from rl_runtime.controller.errors import LedgerBrokenError
from rl_runtime.controller.figures import Figures
from rl_runtime.controller.group import Group
from rl_runtime.controller.ledger import Ledger
from rl_runtime.controller.rollouts import Rollouts, RowSource
from rl_runtime.controller.settings import ControllerSettings
from rl_runtime.records import Committed, Record

PATIENCE_SECONDS: Final = 1.0
"""A question is held so long at most."""
IDLE_PATIENCE_SECONDS: Final = 0.25
"""As for turns, for a worker that has nothing in hand."""
TICK_SECONDS: Final = 0.05
FRESH_SECONDS: Final = 30.0
"""What went wrong in the group is told for so long; the disk's trouble as long as it lasts."""


class NotNowError(Exception):
    """What was sent could not be made durable in time; it is to be sent again."""


class Desk:
    """See the module."""

    def __init__(
        self,
        settings: ControllerSettings,
        ledger: Ledger,
        rows: RowSource,
        *,
        boot: str,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.settings = settings
        self.ledger = ledger
        self.clock = clock or steady_clock()
        now = self.clock()
        self.group = Group(settings, ledger.account, self._write, now)
        self.rollouts = Rollouts(settings, ledger.account, self._write, rows, boot=boot, now=now)
        self.figures = Figures(now)
        self.committed_at = 0.0
        """When this controller saw the newest commit."""
        self.committed_epoch = 0
        """Epoch of that commit."""
        self.seen: dict[MemberId, float] = {}
        self.incarnations: dict[MemberId, Incarnation] = {}
        self.broken: LedgerBrokenError | None = None
        """A defect that a request met: the process is to end with it."""
        self.news = asyncio.Event()
        """Set at every commit, epoch and end; whoever reports it clears it."""
        self._changed = asyncio.Event()
        self._changes = (0, 0)

    # -- policy members ------------------------------------------------------------------------------------------------

    async def turn(self, turn: Turn) -> Word:
        """Answer a policy member."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        self._saw(turn.member, turn.incarnation)
        self.figures.note_member(turn.member, turn.figures)
        if self.ledger.trouble is not None:
            await asyncio.sleep(PATIENCE_SECONDS / 2)
            return self._full()
        self.group.hear(turn, self.clock())
        self._spread()
        while True:
            word = self.group.word(turn, self.clock())
            left = deadline - time.monotonic()
            if not isinstance(word, Wait) or left <= 0.0:
                return word if await self.ledger.durable(max(left, PATIENCE_SECONDS / 2)) else self._full()
            await self._change(left)

    async def death(self, notice: DeathNotice) -> bool:
        """Take note of a death; True once nothing more follows from it, so that the notice need not come again."""
        now = self.clock()
        self.rollouts.died(notice.member, notice.incarnation)
        self.group.died(notice.member, notice.incarnation, now)
        self._spread()
        deadline = time.monotonic() + self.settings.master_silence_seconds + PATIENCE_SECONDS
        while not self.group.is_settled(notice.member, notice.incarnation):
            left = deadline - time.monotonic()
            if left <= 0.0:
                return False
            await self._change(left)
        return await self.ledger.durable(PATIENCE_SECONDS)

    async def propose(self, proposal: EpochProposal) -> tuple[bool, Epoch]:
        """Open the epoch that the master proposes; False with the current one when the proposal is of the past."""
        taken = self.group.propose(proposal, self.clock())
        self._spread()
        if not await self.ledger.durable(PATIENCE_SECONDS):
            raise NotNowError(self._why_not())
        return taken, self.ledger.account.epoch

    # -- rollout workers -----------------------------------------------------------------------------------------------

    async def lease(self, request: LeaseRequest) -> LeaseReply:
        """Answer a worker that has room; one that has nothing to do is held a moment while there is nothing for it."""
        self._saw(request.member, request.incarnation)
        self.figures.note_member(request.member, request.figures)
        self._refuse_when_in_trouble()
        deadline = time.monotonic() + IDLE_PATIENCE_SECONDS
        while True:
            reply = self.rollouts.lease(request, self.group.offer(), self.clock())
            if self.group.stopping:
                reply = LeaseReply(dropped=reply.dropped, offer=reply.offer, stop=True)
            left = deadline - time.monotonic()
            if request.holding or left <= 0.0 or _says_something(request, reply):
                await self._durable()
                return reply
            await self._change(left)

    async def stream(self, request: StreamRequest) -> StreamReply:
        """Keep what a worker has generated so far."""
        self._saw(request.member, request.incarnation)
        return self.rollouts.stream(request, self.group.offer(), self.clock())

    async def complete(self, request: CompleteRequest) -> CompleteReply:
        """Admit completions; answered after the fsync of their payloads."""
        self._saw(request.member, request.incarnation)
        self._refuse_when_in_trouble()
        reply = self.rollouts.complete(request)
        admitted = [one for one, result in zip(request.completions, reply.results, strict=True) if result == "admitted"]
        if admitted:
            self.figures.note_tokens(sum(len(one.piece.tokens) for one in admitted), self.clock())
            self.group.tick(self.clock())
            self._spread()
        await self._durable()
        return reply

    # -- time ----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Time went on."""
        now = self.clock()
        self.rollouts.tick(now)
        if self.ledger.trouble is None:
            self.group.tick(now)
        self._spread()

    def stop(self, reason: str) -> None:
        """Let all members go."""
        self.group.stop(reason, self.clock())
        self._spread()

    def record(self, record: Record) -> None:
        """Let something that was found outside become true."""
        self._write(record)

    def numbers(self) -> dict[str, float]:
        """Return all figures by name."""
        return self.figures.numbers(self.ledger, self.group, self.rollouts, self.clock())

    def finding(self) -> tuple[str, str]:
        """Return category and words of what is wrong here now; empty when nothing is."""
        if self.ledger.trouble is not None:
            category = "storage.full" if self.ledger.full else "storage.failed"
            return category, str(self.ledger.trouble)
        newest = self.group.findings[-1] if self.group.findings else None
        if newest is None or newest.at < self.clock() - FRESH_SECONDS:
            return "", ""
        return newest.category, newest.text

    # -- inside --------------------------------------------------------------------------------------------------------

    def _write(self, record: Record) -> None:
        before = (self.ledger.account.head, self.ledger.account.epoch.number, self.ledger.account.finished)
        self.ledger.write(record)
        account = self.ledger.account
        if isinstance(record, Committed):
            self.committed_at, self.committed_epoch = self.clock(), record.epoch
        if (account.head, account.epoch.number, account.finished) != before:
            self.news.set()

    def _spread(self) -> None:
        """Wake those who wait, when something changed."""
        changes = (self.group.changes, self.rollouts.leases.releases)
        if changes == self._changes:
            return
        self._changes = changes
        if self.ledger.account.open_deal is not None and (batch := self.group.batch) is not None:
            self.figures.note_batch(batch)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _change(self, seconds: float) -> None:
        changed = self._changed
        try:
            async with asyncio.timeout(seconds):
                await changed.wait()
        except TimeoutError:
            return

    def _saw(self, member: MemberId, incarnation: Incarnation) -> None:
        self.seen[member] = self.clock()
        self.incarnations[member] = max(incarnation, self.incarnations.get(member, incarnation))

    async def _durable(self) -> None:
        if not await self.ledger.durable(PATIENCE_SECONDS):
            raise NotNowError(self._why_not())

    def _refuse_when_in_trouble(self) -> None:
        if self.ledger.trouble is not None:
            raise NotNowError(self._why_not())

    def _why_not(self) -> str:
        return str(self.ledger.trouble) if self.ledger.trouble is not None else "the disk is slow; send it again"

    def _full(self) -> Wait:
        return Wait(reason=f"{'disk full' if self.ledger.full else 'disk trouble'}: {self._why_not()}")


def steady_clock() -> Callable[[], float]:
    """Return a clock of Unix seconds that no adjustment of the system's time makes jump."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()


def _says_something(request: LeaseRequest, reply: LeaseReply) -> bool:
    newer = reply.offer is not None and reply.offer.version != request.version
    return bool(reply.leases or reply.dropped or reply.stop or newer or not request.capacity)
