"""What of the node's memory goes to storage, and how: all that the keeper's one thread of low priority does.

A step that a flush finds damaged is passed over, and an older one takes its place; the scrubber, which rests meanwhile, then finds out which
segment it is. Segments stay mapped from one flush to the next: mapping them costs as much as all else that a flush does.
"""

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

from agents.config import Keeping
from aimaster.wire.checkpoint import SnapshotPlace, Version
from aimaster.wire.ids import MemberId
from easyckpt import flush, shm, storage
from easyckpt.claims import Claims
from easyckpt.errors import AlreadyFlushed, Corrupt, EasyckptError, Torn
from easyckpt.manifest import Manifest, folder_name
from easyckpt.mappings import Mappings
from easyckpt.progress import Progress
from easyckpt.scrub import Scrubber
from easyckpt.shm import Segment
from easyckpt.storage import Storage
from easyckpt.takeover import take_over

PIN_SECONDS = 600.0
LOW_PRIORITY = 10
log = structlog.get_logger()


class Flushed(NamedTuple):
    """What became of one step."""

    member: MemberId
    version: Version
    record: Manifest | None
    """None where somebody else had flushed it."""
    segments: Sequence[Segment] = ()
    """Every byte of these was proven."""


class Flushing:
    """Of one folder. Its methods raise BeingFlushed, StorageError or OSError."""

    def __init__(self, folder: Path, keeping: Keeping, scrubber: Scrubber) -> None:
        self.seconds = 0.0
        """Of the last flush."""
        self.deleted: list[str] = []
        """Checkpoints that went and nobody was told of yet."""
        self._folder = folder
        self._keeping = keeping
        self._scrubber = scrubber
        self._claims = Claims()
        self._mappings = Mappings()
        self._passed = flush.Passed()
        self._opened: Storage | None = None

    @property
    def progress(self) -> Progress:
        """Whether a flush gets on, for the event loop to look at."""
        return self._claims.progress

    def marked(self) -> list[Flushed]:
        """The newest marked step of each role of which a member is here."""
        held = shm.scan(self._folder)
        # Ranks of a member on other nodes are here as copies: with them, a step may be whole.
        members = {segment.header.member for segment in held if segment.tier == "shm"}
        own = [segment for segment in held if segment.header.member in members]
        done = []
        with self._scrubber.resting(), self.progress.under_way():
            for role in sorted({segment.header.role for segment in own}):
                flushed = self._stored(role)
                one = self._first_good(own, role, flushed, marked_only=True)
                if one is not None:
                    done.append(one)
                elif flushed:  # by another node: what is pinned up to there may go
                    newest = Version(*max(flushed))
                    done += [
                        Flushed(MemberId(segment.header.member), newest, None)
                        for segment in own
                        if segment.header.role == role
                    ]
        return done

    def last(self) -> list[Flushed]:
        """The newest whole step of each role, marked or not, and whoever it is of."""
        held = shm.scan(self._folder)
        done = []
        with self._scrubber.resting(), self.progress.under_way():
            for role in sorted({segment.header.role for segment in held}):
                one = self._first_good(held, role, self._stored(role), marked_only=False)
                if one is not None:
                    done.append(one)
        return done

    def take_over(self, members: tuple[MemberId, ...], newest: Version | None) -> list[Flushed]:
        """Of members whose node is lost."""
        limit = None if newest is None else (newest.lineage, newest.step)
        started = time.monotonic()
        with self._scrubber.resting(), self.progress.under_way():
            records = take_over(
                self._folder,
                self._storage,
                members,
                newest=limit,
                claims=self._claims,
                mappings=self._mappings,
            )
        self.seconds = time.monotonic() - started if records else self.seconds
        return [Flushed(MemberId(record.member), Version(*record.version), record) for record in records]

    def tidy(self) -> None:
        """Lets go of what is mapped and has lost its name: until then its memory is taken."""
        self._mappings.tidy()

    @property
    def _storage(self) -> Storage:
        """Opened once: it knows the mount that it was found in."""
        if self._opened is None:
            self._opened = storage.open_storage(self._keeping.storage)
        return self._opened

    def _stored(self, role: str) -> list[tuple[int, int]]:
        return [record.version for record in storage.list_manifests(self._storage, role)]

    def _first_good(
        self, held: list[Segment], role: str, flushed: list[tuple[int, int]], *, marked_only: bool
    ) -> Flushed | None:
        while True:
            chosen = flush.newest_to_flush(self._passed.without(held), role, flushed, marked_only=marked_only)
            if chosen is None:
                return None
            try:
                return self._flush(chosen)
            except Corrupt as error:
                log.warning("step_passed_over", step=chosen[0].header.step, reason=str(error))
                self._passed.add(chosen, self._scrubber)

    def _flush(self, chosen: list[Segment]) -> Flushed:
        started = time.monotonic()
        header = chosen[0].header
        member, version = MemberId(header.member), Version(*header.version)
        try:
            record = flush.flush_segment(
                chosen,
                self._storage,
                pin_seconds=PIN_SECONDS,
                claims=self._claims,
                mappings=self._mappings,
            )
        except (AlreadyFlushed, Torn, FileNotFoundError):
            return Flushed(member, version, None)  # by another node, or overwritten meanwhile: a newer one follows
        self.seconds = time.monotonic() - started
        if self._keeping.keep > 0:
            self._retain(header.role)
        return Flushed(member, version, record, chosen)

    def _retain(self, role: str) -> None:
        try:
            self.deleted += flush.tidy(
                self._storage,
                role=role,
                keep=self._keeping.keep,
                keep_every=self._keeping.keep_every or None,
                now=time.time(),
            )
        except (EasyckptError, OSError) as error:
            log.warning("old_checkpoints_stay", error=str(error))


def stored_places(record: Manifest, verified_at: float | None) -> list[SnapshotPlace]:
    """Where a committed checkpoint lies, one place a shard."""
    folder = folder_name(record)
    return [
        SnapshotPlace(
            member=MemberId(record.member),
            role=record.role,
            rank=shard.rank,
            ranks=record.ranks,
            version=Version(*record.version),
            chain=record.chain,
            state_digest=shard.state_digest,
            tier="storage",
            node=None,
            name=f"{folder}/{shard.file}",
            size_bytes=shard.nbytes,
            verified_at=verified_at,
        )
        for shard in record.shards
    ]


def lower_priority() -> None:
    """Of the calling thread alone: Linux keeps it for each thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
