"""The durable account on a real disk."""

import asyncio
import contextlib
import os
import resource
import signal

import pytest

from aimaster.journal import JournalHeldError, read_frames
from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.topology import Epoch
from rl_runtime.controller.account import Account, next_chain
from rl_runtime.controller.errors import LedgerMismatchError
from rl_runtime.controller.ledger import Ledger, read_ledger
from rl_runtime.records import Admitted, Began, Committed, Dealt, EpochOpened, Flushed, Leased

P0 = MemberId("policy-0")
BEGAN = Began(rows=9, rows_digest="d", rules="r", seed=0, shuffle=True, n_generation=2, batch_samples=2)


@contextlib.asynccontextmanager
async def opened(folder, **how):
    """A ledger with its writer at work."""
    ledger = Ledger.open(folder, **how)
    writer = asyncio.create_task(ledger.run())
    try:
        yield ledger
    finally:
        writer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writer
        ledger.close()


def fill(ledger, prompt, payload=b"x" * 100):
    ledger.write(Leased(first=prompt, last=prompt))
    for index in range(2):
        ledger.write(
            Admitted(
                prompt_id=prompt, index=index, reward=1.0, tokens=3, prompt_length=2, oldest_step=0, member=P0, payload=payload
            )
        )  # fmt: skip


def train(ledger, prompt):
    account = ledger.account
    step, digest = account.head.step + 1, f"b{prompt}"
    ledger.write(
        Dealt(
            step=step,
            lineage=0,
            batch_digest=digest,
            prompts=(prompt,),
            shares=((0,), (1,)),
            share_tokens=(5, 5),
            at=0.0,
        )
    )
    ledger.write(
        Committed(
            lineage=0, step=step, epoch=1, gradient_digest="g", batch_digest=digest,
            chain=next_chain(account.chain, step, digest), flusher=P0, at=0.0,
        )
    )  # fmt: skip


def begin(ledger):
    ledger.begin(BEGAN)
    ledger.write(EpochOpened(epoch=Epoch(number=1, members=(P0,), incarnations={P0: Incarnation(0)}), at=0.0))


async def test_what_was_durable_is_there_after_opening_again(tmp_path):
    """The account after a replay is the account before."""
    async with opened(tmp_path) as ledger:
        begin(ledger)
        for prompt in range(3):
            fill(ledger, prompt)
            train(ledger, prompt)
        assert await ledger.durable(5.0)
        before = ledger.account
    async with opened(tmp_path) as ledger:
        assert ledger.account == before


async def test_records_that_wait_together_share_one_write(tmp_path):
    """A hundred records of one moment are one frame: they stand or fall together, with one fsync."""
    async with opened(tmp_path) as ledger:
        begin(ledger)
        for prompt in range(50):
            fill(ledger, prompt)
        assert await ledger.durable(5.0)
    assert len(list(read_frames(tmp_path))) == 1


async def test_nothing_is_durable_before_it_is_written(tmp_path):
    """`durable` waits for everything written by the time it is asked."""
    ledger = Ledger.open(tmp_path)
    try:
        assert await ledger.durable(0.0)
        begin(ledger)
        assert not await ledger.durable(0.05)
        writer = asyncio.create_task(ledger.run())
        assert await ledger.durable(5.0)
        writer.cancel()
    finally:
        ledger.close()


async def test_compaction_keeps_the_account_and_drops_the_payloads(tmp_path):
    """After it the ledger is small, and replays to the same account; what comes later follows it."""
    async with opened(tmp_path, compact_bytes=20_000) as ledger:
        begin(ledger)
        for prompt in range(40):
            fill(ledger, prompt, b"p" * 1000)
            train(ledger, prompt)
            ledger.write(Flushed(version=Version(0, prompt + 1)))
            assert await ledger.durable(5.0)
        before, size = ledger.account, ledger.size_bytes
    assert size < 60_000
    entries = list(read_ledger(tmp_path))
    assert isinstance(entries[0], Account)
    async with opened(tmp_path) as ledger:
        assert ledger.account == before
        assert len(ledger.account.past) >= 38
        fill(ledger, 40)
        train(ledger, 40)
        assert await ledger.durable(5.0)


async def test_compaction_loses_nothing_that_is_written_meanwhile(tmp_path):
    """Records written while the snapshot goes to disk come after it, once."""
    async with opened(tmp_path, compact_bytes=1_000) as ledger:
        begin(ledger)
        for prompt in range(30):
            fill(ledger, prompt)
            train(ledger, prompt)
            ledger.write(Flushed(version=Version(0, prompt + 1)))
            await asyncio.sleep(0)
        assert await ledger.durable(5.0)
        before = ledger.account
    async with opened(tmp_path) as ledger:
        assert ledger.account == before


async def test_a_full_disk_pauses_and_loses_nothing(tmp_path):
    """While nothing can be written nothing is durable and `trouble` says why; once there is space it goes on by itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    async with opened(tmp_path) as ledger:
        begin(ledger)
        assert await ledger.durable(5.0)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (ledger.size_bytes + 10, hard))
            fill(ledger, 0)
            assert not await ledger.durable(0.6)
            assert ledger.full
            fill(ledger, 1)
            assert ledger.queued == 6
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert await ledger.durable(5.0)
        assert ledger.trouble is None
        before = ledger.account
    async with opened(tmp_path) as ledger:
        assert ledger.account == before


async def test_another_configuration_is_refused_by_name(tmp_path):
    """Rows, seed, group and batch fix what the prompts and batches of a ledger mean."""
    async with opened(tmp_path) as ledger:
        begin(ledger)
        assert await ledger.durable(5.0)
    async with opened(tmp_path) as ledger:
        other = Began(rows=9, rows_digest="d", rules="r", seed=0, shuffle=True, n_generation=4, batch_samples=2)
        with pytest.raises(LedgerMismatchError, match="n_generation: 2 then, 4 now"):
            ledger.begin(other)
        ledger.begin(BEGAN)


async def test_a_ledger_has_one_writer(tmp_path):
    """A second controller is told who has it."""
    async with opened(tmp_path):
        with pytest.raises(JournalHeldError, match=str(os.getpid())):
            Ledger.open(tmp_path)
