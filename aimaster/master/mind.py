"""The master's one mind: every event passes here, is journaled, then believed, in one order.

    believe(event) -> queue -> one journal record a batch -> engine.step -> actions -> the waiter goes on (and acknowledges)
    observe(seen)  -> view  -> conclusions, which are events of the queue

On a full run disk nothing is believed and nobody is answered until there is space: it tries again, and says so as a finding.
Only the end of the job needs no space: stopping goes on undurably, and a snapshot closes the gap should space return.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec
import structlog

from aimaster.brain import engine, overview, watch
from aimaster.brain.events import (
    Action,
    Conclude,
    Event,
    FrontGone,
    IncidentSettled,
    MasterStarted,
    Observation,
    StopRequested,
)
from aimaster.brain.state import ENDED, State, View
from aimaster.catalogue import load_xids
from aimaster.journal import Frame, Journal, NotDurableError
from aimaster.wire import codec
from aimaster.wire.health import Verdict

MAX_WAITING: Final = 10_000
MAX_BATCH: Final = 500
DIAGNOSE_SECONDS: Final = 5.0
RETRY_SECONDS: Final = 0.5
log = structlog.get_logger()


class Believed(msgspec.Struct, frozen=True, kw_only=True, tag="believed"):
    """Journal record: events that were believed together."""

    at: float
    events: tuple[Event, ...]


class Summed(msgspec.Struct, frozen=True, kw_only=True, tag="summed"):
    """Journal record: the state after everything before."""

    at: float
    state: State


Record = Believed | Summed


class _Waiting(msgspec.Struct, kw_only=True):
    event: Event
    answer: "asyncio.Future[None] | None" = None
    conclusion: bool = False


def decode_record(payload: bytes) -> Record:
    """Read a journal record."""
    return codec.decode(payload, Record)  # type: ignore[arg-type]  # a union is a type to msgspec


def replay(payloads: Iterable[bytes]) -> State | None:
    """The state that a journal tells of; None of an empty one. Events before the first start of a master speak of no job: skipped."""
    state: State | None = None
    skipped: list[str] = []
    for payload in payloads:
        record = decode_record(payload)
        if isinstance(record, Summed):
            state = record.state
            continue
        for event in record.events:
            if state is None and not isinstance(event, MasterStarted):
                skipped.append(type(event).__name__)
                continue
            state = _believe(state, event, record.at)[0]
    if skipped:
        log.warning("journal_events_skipped", events=skipped[:10], count=len(skipped), why="no master had started yet")
    return state


def describe(frames: Iterable[Frame], first: int) -> Iterator[bytes]:
    """Journal records from sequence `first` on as JSON lines."""
    for frame in frames:
        if frame.sequence >= first:
            yield codec.encode_json({"sequence": frame.sequence, "record": decode_record(frame.payload)}) + b"\n"


def _believe(state: State | None, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
    if state is None:
        if not isinstance(event, MasterStarted):
            msg = f"{type(event).__name__} cannot be believed before the start of a master"
            raise TypeError(msg)
        return engine.begin(event, now), ()
    return engine.step(state, event, now)


class Mind:
    """State, view, and the queue before them. `run` is a task of the master."""

    def __init__(self, journal: Journal, state: State | None, clock: Callable[[], float]) -> None:
        self.view = View(since=clock())
        self.believed = 0
        """Events believed by this master."""
        self.not_durable = ""
        """Why nothing can be journaled now; empty when it can."""
        self.clock = clock
        self.ended = asyncio.Event()
        """Set when the job has ended."""
        self._journal = journal
        self._state = state
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue(MAX_WAITING)
        self._concluding = False
        self._xids = load_xids()
        self._gap = False
        self._perform: Callable[[Action], None] = lambda _: None

    @property
    def state(self) -> State:
        if self._state is None:
            msg = "the first event, the start of a master, is not believed yet"
            raise RuntimeError(msg)
        return self._state

    @property
    def ready(self) -> bool:
        """Whether this master's own start is believed: before, what was replayed is the past, and nothing is concluded from it."""
        return self._state is not None and self.believed > 0

    def perform_by(self, perform: Callable[[Action], None]) -> None:
        """Name who carries out actions."""
        self._perform = perform

    async def believe(self, event: Event) -> None:
        """Return when the event is durable and its actions are on their way."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await self._queue.put(_Waiting(event=event, answer=answer))
        await answer

    def tell(self, event: Event) -> None:
        """Queue an event that nobody waits for. Raises asyncio.QueueFull when far too many wait already."""
        self._queue.put_nowait(_Waiting(event=event))

    def observe(self, seen: Observation) -> None:
        """Move the view; what follows from it is queued, unless earlier conclusions still wait to be believed."""
        if not self.ready:
            return
        self.view, actions = watch.observe(self.state, self.view, seen, self.clock())
        if self._concluding or self._queue.full():
            return
        for action in actions:
            if isinstance(action, Conclude):
                self._concluding = True
                self._queue.put_nowait(_Waiting(event=action.event, conclusion=True))
            else:
                self._perform(action)

    async def diagnose(self, view: View) -> Verdict:
        """Who failed first and why, by all that this view shows of all nodes. In a thread: with a thousand nodes it takes seconds."""
        return await asyncio.to_thread(overview.diagnose_all, self.state, view, self._xids, self.clock())

    async def _see_whole(self, batch: list[_Waiting]) -> None:
        """An incident that settles gets the verdict on everything, which is journaled with it; one that takes too long does without."""
        for waiting in batch:
            if isinstance(waiting.event, IncidentSettled) and self._state is not None:
                with contextlib.suppress(TimeoutError):
                    verdict = await asyncio.wait_for(self.diagnose(self.view), DIAGNOSE_SECONDS)
                    waiting.event = msgspec.structs.replace(waiting.event, verdict=verdict)

    async def run(self) -> None:
        """Believe what is queued; ends only by cancellation."""
        while True:
            batch = [await self._queue.get()]
            self._take_more(batch)
            await self._see_whole(batch)
            while batch:
                batch = await self._believe_batch(batch)
            self._concluding = False
            if self._state is not None and self._state.phase in ENDED:
                self.ended.set()
            if self._journal.compaction_due:
                await self._compact()

    def _take_more(self, batch: list[_Waiting], most: int = MAX_BATCH) -> None:
        while len(batch) < most and not self._queue.empty():
            batch.append(self._queue.get_nowait())

    async def _believe_batch(self, batch: list[_Waiting]) -> list[_Waiting]:
        """Journal and believe the batch; what could not be is returned, after a pause."""
        at = self.clock()
        try:
            if self._gap:
                await self._journal.compact(codec.encode(Summed(at=at, state=self.state)))
                self._gap = False
            await self._journal.append(codec.encode(Believed(at=at, events=tuple(waiting.event for waiting in batch))))
        except NotDurableError as error:
            return await self._without_space(batch, error)
        if self.not_durable:
            log.info("journal_writable_again")
        self.not_durable = ""
        for waiting in batch:
            self._believe_one(waiting, at)
        return []

    def _believe_one(self, waiting: _Waiting, at: float) -> None:
        before = self._state
        self._state, actions = _believe(before, waiting.event, at)
        self.believed += 1
        for action in actions:
            self._perform(action)
        if waiting.answer is not None and not waiting.answer.done():
            waiting.answer.set_result(None)

    async def _without_space(self, batch: list[_Waiting], error: NotDurableError) -> list[_Waiting]:
        if not self.not_durable:
            log.error("journal_not_writable", error=str(error), waiting=len(batch))
        self.not_durable = str(error)
        left: list[_Waiting] = []
        for waiting in batch:
            ending = self._state is not None and self._state.ending is not None
            if self._state is not None and (ending or isinstance(waiting.event, StopRequested | FrontGone)):
                self._gap = True
                self._believe_one(waiting, self.clock())
            else:
                left.append(waiting)
        if left:
            await asyncio.sleep(RETRY_SECONDS)
            self._take_more(left, MAX_WAITING)
        return left

    async def _compact(self) -> None:
        try:
            await self._journal.compact(codec.encode(Summed(at=self.clock(), state=self.state)))
        except NotDurableError as error:
            # The longer file is as good; the next batch tries again.
            log.warning("journal_not_compacted", error=str(error))
