"""From memory to storage: one whole member's sealed segments become shard files, then a manifest. No torch, no numpy.

Every byte is checked against its digest on the way. While it runs all ranks' segments are pinned, so saves go to the other slot; a flush that
does not find the whole step any more pins nothing and returns None. Who calls it (an agent, or the engine's own sidecar) is not known here.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from easyckpt import digest, manifest, retain, shm
from easyckpt.claims import Claim, Claims
from easyckpt.digest import StreamCheck
from easyckpt.errors import AlreadyFlushed, BeingFlushed, Corrupt, Disputed, EasyckptError, Torn, Unsealed
from easyckpt.events import Event, Events, Kind
from easyckpt.layout import Rewind, Version
from easyckpt.manifest import Manifest, Shard
from easyckpt.mappings import Mappings
from easyckpt.progress import Progress
from easyckpt.scrub import Scrubber
from easyckpt.shm import Segment
from easyckpt.storage import Storage, list_manifests, open_storage, read_manifests, shard_header

PIECE_BYTES = 64 << 20
"""One direct write: a disk takes large ones a third faster than 16 MiB at a time, for less of the processor."""
PIN_SECONDS = 600.0
STRAY_SECONDS = 3600.0


def flush_segment(
    segments: Segment | Sequence[Segment],
    storage: str | os.PathLike[str] | Storage,
    *,
    pin_seconds: float = PIN_SECONDS,
    claims: Claims | None = None,
    mappings: Mappings | None = None,
) -> Manifest:
    """Commits the segments of all ranks of one member at one step. Raises StorageError, Corrupt, Torn, AlreadyFlushed, Disputed, BeingFlushed.

    Nothing that was committed before is touched; a failed flush leaves no manifest. `claims` remembers what other writers were seen to do,
    `mappings` keeps the segments mapped for the next flush.
    """
    segments = [segments] if isinstance(segments, Segment) else sorted(segments, key=lambda one: one.header.rank)
    _check_whole(segments)
    target = open_storage(storage)
    folder = manifest.folder_name(segments[0].header)
    if target.read_manifest(folder) is not None:
        refuse_dispute(segments, target, folder)
        raise AlreadyFlushed(f"{folder} is on storage already; nothing was written")
    try:
        with contextlib.ExitStack() as stack:
            files = stack.enter_context(opened(segments, pin_seconds))
            claim = stack.enter_context((claims or Claims()).held(target, folder))
            mappings = mappings or Mappings()
            shards = [
                write_shard(fd, segment, target, folder, claim, mappings)
                for fd, segment in zip(files, segments, strict=True)
            ]
            record = manifest.of([segment.header for segment in segments], shards)
            target.commit(folder, manifest.encode(record))
    except AlreadyFlushed:  # between that look and the claim, or the commit
        refuse_dispute(segments, target, folder)
        raise
    return record


def refuse_dispute(segments: Sequence[Segment], storage: Storage, folder: str) -> None:
    """Raises Disputed where a committed checkpoint of this member is not the step that these segments hold."""
    raw = storage.read_manifest(folder)
    record = manifest.decode(raw, where=folder) if raw is not None else None
    header = segments[0].header
    if record is None or record.member != header.member:
        return
    theirs = {shard.rank: shard.state_digest for shard in record.shards}
    if any(theirs.get(one.header.rank) != one.header.state_digest for one in segments):
        raise Disputed(
            f"{folder} on storage is not step {header.step} of this {header.member}: another trainer of that name wrote it."
            " Nothing was overwritten, memory holds this one. End one of the two, or give it another storage"
        )


def newest_to_flush(
    segments: Sequence[Segment], role: str, flushed: Sequence[Version], *, marked_only: bool = True
) -> list[Segment] | None:
    """The newest whole step of one member that is newer than what is on storage, one segment a rank."""
    groups: dict[tuple[Version, str], dict[int, Segment]] = {}
    for segment in segments:
        header = segment.header
        if header.role == role and (header.flush or not marked_only):
            # The own copy before one that is held for another node.
            groups.setdefault((header.version, header.member), {}).setdefault(header.rank, segment)
    newest_flushed = max(flushed, default=None)
    for (version, _member), ranks in sorted(groups.items(), key=lambda group: group[0], reverse=True):
        whole = set(ranks) == set(range(next(iter(ranks.values())).header.ranks))
        if whole and (newest_flushed is None or version > newest_flushed):
            return [ranks[rank] for rank in sorted(ranks)]
    return None


class Passed:
    """Steps of which a flush found a segment damaged: an older one goes to storage in their place."""

    def __init__(self) -> None:
        self._openings: dict[Path, bytes] = {}

    def add(self, segments: Sequence[Segment], scrubber: Scrubber | None) -> None:
        """All ranks of a step, of which at least one is damaged; the scrubber finds out which."""
        self._openings.update({segment.path: segment.opening for segment in segments})
        if scrubber is not None:
            scrubber.suspect(segments)

    def without(self, segments: Sequence[Segment]) -> list[Segment]:
        """Those that may be flushed."""
        return [segment for segment in segments if self._openings.get(segment.path) != segment.opening]


class Flusher:
    """Flushes what is newest in a folder and keeps the storage within its bounds. Used by one thread or process."""

    def __init__(
        self,
        folder: Path,
        storage: str | os.PathLike[str] | Storage,
        *,
        role: str = "trainer",
        keep: int = 3,
        keep_every: int | None = None,
        events: Events | None = None,
        scrubber: Scrubber | None = None,
    ) -> None:
        """`scrubber`: who watches the same folder; it hears what a flush proved, and what it found damaged."""
        self._folder = folder
        self._storage = open_storage(storage)
        self._role = role
        self._keep = keep
        self._keep_every = keep_every
        self._events = events or Events()
        self._flushed: set[Version] | None = None
        self.disputed: set[Version] = set()
        """Those of them that are another trainer's: storage does not have what memory holds."""
        self._claims = Claims()
        self._mappings = Mappings()
        self._scrubber = scrubber
        self._damaged = Passed()

    def flush_newest(self, *, marked_only: bool = True) -> Manifest | None:
        """One step, if there is one to flush (marked for it, or any). Raises what went wrong after saying so as an event.

        After Corrupt that step is passed over: the next call takes the newest one but that.
        """
        self._mappings.tidy()
        try:
            chosen = self._next(marked_only=marked_only)
        except (EasyckptError, OSError) as error:
            self._tell_failure(f"storage cannot be read: {error}. Memory holds what is newest, and it is tried again")
            raise
        if chosen is None:
            return None
        lineage, step = chosen[0].header.version
        started = time.monotonic()
        try:
            record = self._write(chosen)
        except AlreadyFlushed:
            self._flushed = {*(self._flushed or ()), (lineage, step)}
            return None
        except (Torn, BeingFlushed):
            return None  # overwritten or removed meanwhile, or in other hands: the next call sees what became of it
        except (EasyckptError, OSError) as error:
            if isinstance(error, Corrupt):
                self._damaged.add(chosen, self._scrubber)
            if isinstance(error, Disputed):
                self.disputed.add((lineage, step))
                self._flushed = {*(self._flushed or ()), (lineage, step)}
            self._tell_failure(str(error), (lineage, step))
            raise
        if self._scrubber is not None:
            for segment in chosen:
                self._scrubber.note_proven(segment)
        if record is not None:
            self._note(record, "flush_committed", seconds=time.monotonic() - started)
            self.tidy()
        return record

    @property
    def progress(self) -> Progress:
        """Whether a flush gets on, for another thread to look at."""
        return self._claims.progress

    @property
    def is_waiting(self) -> bool:
        """Whether others have to do their part before a step is whole on storage."""
        return False

    def _next(self, *, marked_only: bool) -> list[Segment] | None:
        if self._flushed is None:
            self._flushed = {record.version for record in list_manifests(self._storage, self._role)}
        return self._choose(list(self._flushed), marked_only=marked_only)

    def _choose(self, flushed: Sequence[Version], *, marked_only: bool) -> list[Segment] | None:
        return newest_to_flush(self._held(), self._role, flushed, marked_only=marked_only)

    def _held(self) -> list[Segment]:
        return self._damaged.without(shm.scan(self._folder))

    def _write(self, chosen: list[Segment]) -> Manifest | None:
        """None where it is not committed yet."""
        return flush_segment(chosen, self._storage, claims=self._claims, mappings=self._mappings)

    def _tell_failure(self, text: str, version: Version = (0, 0)) -> None:
        lineage, step = version
        self._events.emit(Event(kind="flush_failed", text=text, lineage=lineage, step=step, tier="storage"))

    def _note(self, record: Manifest, kind: Kind, *, seconds: float = 0.0) -> None:
        """It is on storage: remember and tell."""
        self._flushed = {*(self._flushed or ()), record.version}
        self._events.emit(
            Event(
                kind=kind,
                text=manifest.folder_name(record),
                lineage=record.lineage,
                step=record.step,
                tier="storage",
                nbytes=record.nbytes,
                seconds=seconds,
            )
        )

    @property
    def newest(self) -> Version | None:
        """The newest version that is known to be on storage, whoever flushed it."""
        return max((self._flushed or set()) - self.disputed, default=None)

    def tidy(self) -> list[str]:
        """Deletes what retention lets go. A failure is told as an event and never fatal."""
        try:
            return tidy(self._storage, role=self._role, keep=self._keep, keep_every=self._keep_every, now=time.time())
        except (EasyckptError, OSError) as error:
            self._events.emit(Event(kind="housekeeping_failed", text=f"old checkpoints stay: {error}", tier="storage"))
            return []


def tidy(
    storage: str | os.PathLike[str] | Storage,
    *,
    role: str,
    keep: int,
    keep_every: int | None = None,
    keep_abandoned: bool = True,
    now: float,
) -> list[str]:
    """Deletes checkpoints beyond `keep` and folders of flushes that died long ago; returns the folders' names. As `retain.to_delete` says."""
    target = open_storage(storage)
    committed: dict[Version, list[str]] = {}
    strays = []
    rewinds: set[Rewind] = set()
    for folder, read in read_manifests(target):
        if not folder.startswith(f"{role}/"):
            continue
        if isinstance(read, Manifest):
            committed.setdefault(read.version, []).append(folder)
            rewinds.update(read.rewinds)
        elif read is None and target.age_seconds(folder, now) > STRAY_SECONDS:
            strays.append(folder)
    going = retain.to_delete(
        committed, keep=keep, keep_every=keep_every, rewinds=rewinds, keep_abandoned=keep_abandoned
    )
    removed = [folder for version in going for folder in committed[version]] + strays
    for folder in removed:
        target.delete(folder)
    return removed


def verify_stored(storage: str | os.PathLike[str] | Storage, record: Manifest) -> None:
    """Reads every byte of a checkpoint against its digests. Raises Corrupt, StorageError or OSError."""
    target = open_storage(storage)
    for shard in record.shards:
        verify_shard(target, record, shard)


def verify_shard(storage: Storage, record: Manifest, shard: Shard) -> None:
    """One file of a checkpoint. Raises Corrupt, StorageError or OSError."""
    folder = manifest.folder_name(record)
    where = f"{folder}/{shard.file}"
    reader = storage.open_shard(folder, shard.file)
    try:
        check = StreamCheck(shard_header(reader, shard, where), where=where)
        block = memoryview(bytearray(shm.VERIFY_PIECE_BYTES))
        for at in range(shard.prefix_bytes, shard.nbytes, len(block)):
            piece = block[: min(len(block), shard.nbytes - at)]
            reader.read_into(piece, at)
            check.feed(piece)
        check.finish()
    finally:
        reader.close()


def _check_whole(segments: Sequence[Segment]) -> None:
    if not segments:
        raise EasyckptError("there is no segment to flush")
    first = segments[0].header
    same = {(one.header.member, one.header.version, one.header.ranks) for one in segments}
    if len(same) != 1 or [one.header.rank for one in segments] != list(range(first.ranks)):
        raise EasyckptError(
            f"step {first.step} of {first.member} is not whole: it has {len(segments)} segments for {first.ranks} ranks;"
            " only a whole step is flushed"
        )


@contextlib.contextmanager
def opened(segments: Sequence[Segment], pin_seconds: float) -> Iterator[list[int]]:
    """The files of segments, pinned and proven to hold still what was chosen. Raises Torn."""
    with contextlib.ExitStack() as stack:
        # First all pins, then a look at all: a step of which one part went meanwhile must not hold up the other ranks.
        for segment in segments:
            stack.enter_context(_pinned(segment, pin_seconds))
        yield [stack.enter_context(_reopen(segment)) for segment in segments]


@contextlib.contextmanager
def _pinned(segment: Segment, seconds: float) -> Iterator[None]:
    try:
        mark = shm.pin(segment.path, deadline=seconds)
    except (FileNotFoundError, Unsealed) as error:
        raise Torn(f"{segment.path} was overwritten or removed before it was pinned") from error
    try:
        yield
    finally:
        shm.unpin(mark)


@contextlib.contextmanager
def _reopen(segment: Segment) -> Iterator[int]:
    """The pinned file, proven to hold still what was chosen."""
    fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not shm.is_same(fd, segment):
            raise Torn(f"{segment.path} was overwritten before it was pinned")
        yield fd
    finally:
        os.close(fd)


def write_shard(fd: int, segment: Segment, target: Storage, folder: str, claim: Claim, mappings: Mappings) -> Shard:
    """Makes one rank's file durable, every byte proven on the way."""
    name = manifest.shard_name(segment.header, claim.suffix)
    check = StreamCheck(segment.header, where=str(segment.path))
    prefix = segment.prefix_bytes

    with mappings.mapped(fd, segment) as view:

        def pieces() -> Iterator[memoryview]:
            for at in range(0, segment.nbytes, PIECE_BYTES):
                piece = view[at : at + PIECE_BYTES]
                check.feed(piece[max(0, prefix - at) :])
                claim.beat()
                yield piece

        target.write_shard(folder, name, pieces())
        check.finish()
        prefix_digest = digest.digest_bytes(view[:prefix])
    return Shard(
        rank=segment.header.rank,
        file=name,
        nbytes=segment.nbytes,
        prefix_bytes=prefix,
        prefix_digest=prefix_digest,
        state_digest=segment.header.state_digest,
    )
