"""The mind over a real journal: order, compaction, and what happens when nothing can be written."""

import asyncio
import contextlib
import errno
import os

import msgspec
import pytest

from aimaster.brain.events import (
    AgentConnected,
    AgentPulsed,
    DrillMarked,
    FrontGone,
    MasterStarted,
    StopRequested,
    Tick,
)
from aimaster.journal import Journal
from aimaster.master.mind import Believed, Mind, Summed, decode_record, describe, replay
from aimaster.wire import PROTOCOL_VERSION, codec
from aimaster.wire.messages import Hello, Pulse
from tests.fakes.world import RL, plan_of

STARTED = MasterStarted(term=1, plan=plan_of(RL), attempt=1)
HELLO = Hello(
    protocol=PROTOCOL_VERSION,
    run_id="0badcafe",
    node="node-0",
    outbox_id="o",
    url="http://node-0",
    pid=1,
    term_seen=0,
    members=(),
)


@contextlib.asynccontextmanager
async def thinking(journal: Journal):
    """A mind at work; what it did is in `performed`."""
    mind = Mind(journal, replay(journal.replay()), clock=lambda: 1000.0)
    mind.performed = []
    mind.perform_by(mind.performed.append)
    task = asyncio.create_task(mind.run(), name="mind")
    try:
        yield mind
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_what_is_believed_together_is_believed_in_order(tmp_path):
    """Events told at once share journal records, keep their order, and replay to the same state."""
    with Journal.open(tmp_path) as journal:
        async with thinking(journal) as mind:
            await mind.believe(STARTED)
            await asyncio.gather(*(mind.believe(DrillMarked(subject=f"m-{n}", note=str(n))) for n in range(50)))
            assert list(mind.state.drills) == [f"m-{n}" for n in range(50)]
            assert journal.last_sequence < 20
            assert replay(journal.replay()) == mind.state


async def test_actions_follow_their_event_to_the_disk(tmp_path):
    """When an order goes out, the event that caused it is durable."""
    with Journal.open(tmp_path) as journal:
        async with thinking(journal) as mind:
            await mind.believe(STARTED)
            seen = []
            mind.perform_by(lambda _: seen.append(replay(journal.replay()).nodes["node-0"].state))
            await mind.believe(AgentConnected(hello=HELLO))
            assert seen
            assert set(seen) == {"connected"}


async def test_the_journal_is_compacted_without_a_change_of_mind(tmp_path):
    """A long history becomes a snapshot; the state after it is the same, and the journal stays small."""
    with Journal.open(tmp_path, compact_bytes=20_000) as journal:
        async with thinking(journal) as mind:
            await mind.believe(STARTED)
            for number in range(300):
                await mind.believe(DrillMarked(subject=f"m-{number % 10}", note="x" * 200))
            assert journal.size_bytes < 60_000
            assert isinstance(decode_record(next(journal.replay())), Summed)
            assert replay(journal.replay()) == mind.state
            lines = list(describe(journal.frames(), journal.last_sequence))
            assert len(lines) == 1


async def test_a_journal_that_begins_with_something_else_is_taken_up_from_the_first_start(tmp_path):
    """What stands before the first start of a master is skipped: it spoke of no job, and the run goes on."""
    stop = Believed(at=999.0, events=(FrontGone(pid=1), StopRequested(reason="early")))
    with Journal.open(tmp_path) as journal:
        journal.append_now([codec.encode(stop)])
        assert replay(journal.replay()) is None
        async with thinking(journal) as mind:
            await mind.believe(STARTED)
            await mind.believe(DrillMarked(subject="m", note=""))
            assert mind.state.phase == "starting"
            assert replay(journal.replay()) == mind.state


async def test_nothing_is_concluded_from_the_past_before_the_own_start_is_believed(tmp_path):
    """The attempt before was ending, its deadline long over: time alone must not end the attempt that now begins."""
    with Journal.open(tmp_path) as journal:
        async with thinking(journal) as mind:
            await mind.believe(STARTED)
            await mind.believe(AgentConnected(hello=HELLO))
            await mind.believe(FrontGone(pid=1))
            past = mind.state
    assert past.phase == "stopping"
    with Journal.open(tmp_path) as journal:
        mind = Mind(journal, replay(journal.replay()), clock=lambda: 1e6)
        running = asyncio.create_task(mind.run())
        try:
            mind.observe(Tick())
            await mind.believe(msgspec.structs.replace(STARTED, attempt=STARTED.attempt + 1))
            assert mind.state.phase == "starting"
            assert not mind.ended.is_set()
        finally:
            running.cancel()


async def test_pictures_are_never_journaled(tmp_path):
    """Pulses move the view alone."""
    with Journal.open(tmp_path) as journal:
        async with thinking(journal) as mind:
            await mind.believe(STARTED)
            before = journal.last_sequence
            for _ in range(10):
                mind.observe(AgentPulsed(node="node-0", pulse=Pulse(at=1.0, members=())))
            await asyncio.sleep(0)
            assert "node-0" in mind.view.nodes
            assert journal.last_sequence == before


async def test_nothing_is_believed_while_nothing_can_be_written_but_a_stop(tmp_path, monkeypatch):
    """On a failing disk an event waits and a stop does not; afterwards a snapshot holds both, so a replay misses nothing."""
    fdatasync = os.fdatasync
    broken = True

    def sync(descriptor: int) -> None:
        if broken:
            raise OSError(errno.ENOSPC, "No space left on device")
        fdatasync(descriptor)

    with Journal.open(tmp_path) as journal:
        async with thinking(journal) as mind:
            await mind.believe(STARTED)
            await mind.believe(AgentConnected(hello=HELLO))
            monkeypatch.setattr(os, "fdatasync", sync)
            waiting = asyncio.create_task(mind.believe(DrillMarked(subject="policy-0", note="later")), name="waiting")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), 0.2)
            assert "No space left" in mind.not_durable
            assert not mind.state.drills
            await asyncio.wait_for(mind.believe(StopRequested(reason="enough")), 10)
            assert mind.state.phase == "stopping"
            broken = False
            await asyncio.wait_for(mind.believe(DrillMarked(subject="policy-1", note="last")), 10)
            await asyncio.wait_for(waiting, 10)
            assert not mind.not_durable
            assert replay(journal.replay()) == mind.state
            assert mind.state.ending.reason == "stopped by operator: enough"
