"""The durable account: records are true at once, and told to nobody before an fsync covers them.

`write` applies a record to the account and queues it; `durable` waits until everything written so far is on disk. One writer task
puts whatever is queued into one journal frame, so records of one decision stand or fall together. A full disk loses nothing: the
queue is tried again until there is space, nobody is answered meanwhile, and `trouble` says why. Compaction writes the account
itself (payloads of settled steps dropped) as the journal's snapshot.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from aimaster.journal import Frame, Journal, JournalFullError, NotDurableError, read_frames
from rl_runtime.controller.account import Account, apply
from rl_runtime.controller.errors import LedgerMismatchError
from rl_runtime.records import Began, Record

RETRY_SECONDS = 0.3
COMPACT_BYTES = 64 << 20


class Ledger:
    """An open ledger. Make it with `Ledger.open`."""

    def __init__(self, journal: Journal, account: Account) -> None:
        self.account = account
        self.trouble: NotDurableError | None = None
        """Why the disk keeps nothing at the moment."""
        self.fsync_seconds = 0.0
        """Of the newest write."""
        self._journal = journal
        self._queue: list[bytes] = []
        self._written = 0
        self._durable = 0
        self._work = asyncio.Event()
        self._moved = asyncio.Event()
        self._floor = account.floor

    @classmethod
    def open(cls, folder: Path, *, compact_bytes: int = COMPACT_BYTES) -> Self:
        """Take the folder and replay it. Raises JournalHeldError, JournalDamagedError, LedgerBrokenError."""
        journal = Journal.open(folder, compact_bytes=compact_bytes)
        try:
            account = Account()
            for entry in decode_frames(journal.frames()):
                if isinstance(entry, Account):
                    account = entry
                else:
                    apply(account, entry)
        except BaseException:
            journal.close()
            raise
        return cls(journal, account)

    def close(self) -> None:
        """Release the folder; what is queued and not durable was told to nobody."""
        self._journal.close()

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return self._journal.size_bytes

    @property
    def queued(self) -> int:
        """Records that are not durable yet."""
        return self._written - self._durable

    @property
    def full(self) -> bool:
        """Tell whether there is no space."""
        return isinstance(self.trouble, JournalFullError)

    def begin(self, began: Began) -> None:
        """Write the first record, or make sure that the ledger was begun by the same configuration; raises LedgerMismatchError."""
        have = self.account.began
        if have is None:
            self.write(began)
            return
        differing = [name for name in began.__struct_fields__ if getattr(have, name) != getattr(began, name)]
        if differing:
            what = "; ".join(f"{name}: {getattr(have, name)} then, {getattr(began, name)} now" for name in differing)
            raise LedgerMismatchError(
                f"the run was begun with another configuration ({what}); nothing was changed; use the old values, or a new run folder"
            )

    def write(self, record: Record) -> None:
        """Let the record become true, and queue it."""
        apply(self.account, record)
        self._queue.append(msgspec.msgpack.encode(record))
        self._written += 1
        self._work.set()

    async def durable(self, timeout_seconds: float) -> bool:
        """Wait until all that is written by now is durable; False when that did not come about in time."""
        target = self._written
        deadline = time.monotonic() + timeout_seconds
        while self._durable < target:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            moved = self._moved
            try:
                async with asyncio.timeout(left):
                    await moved.wait()
            except TimeoutError:
                return False
        return True

    async def run(self) -> None:
        """Write what is queued, for ever."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._queue:
                try:
                    await self._write_queue()
                except NotDurableError as error:
                    self._stands(error)
                    await asyncio.sleep(RETRY_SECONDS)

    async def _write_queue(self) -> None:
        count = len(self._queue)
        began = time.monotonic()
        if self._journal.compaction_due and self.account.floor > self._floor:
            # The account holds what is queued as well.
            floor = self.account.floor
            await self._journal.compact(msgspec.msgpack.encode(self.account))
            self._floor = floor
        else:
            await self._journal.append(msgspec.msgpack.encode([msgspec.Raw(record) for record in self._queue[:count]]))
        self.fsync_seconds = time.monotonic() - began
        del self._queue[:count]
        self._durable += count
        self._stands(None)

    def _stands(self, trouble: NotDurableError | None) -> None:
        self.trouble = trouble
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


def read_ledger(folder: Path) -> Iterator[Record | Account]:
    """Yield what a ledger holds, also of a run that goes on: an account where it was compacted, then records."""
    yield from decode_frames(read_frames(folder))


def decode_frames(frames: Iterator[Frame]) -> Iterator[Record | Account]:
    """Yield the entries of journal frames: the account of a snapshot, the records of any other."""
    for frame in frames:
        if frame.snapshot:
            yield msgspec.msgpack.decode(frame.payload, type=Account)
        else:
            yield from msgspec.msgpack.decode(frame.payload, type=list[Record])
