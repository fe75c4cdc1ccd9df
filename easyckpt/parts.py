"""A checkpoint whose ranks lie in the memories of several nodes: each node writes its own ranks' files, and who finishes last commits. No torch.

Beside each file a small record says that it is durable (`.done.MEMBER.rRANK`). Nobody waits for anybody's file while it writes: after its own
records a node looks once who else is done, and if all are, writes the manifest, exclusively as ever. A node that is not the last looks again later.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from easyckpt import manifest
from easyckpt.claims import Claims
from easyckpt.errors import AlreadyFlushed, EasyckptError
from easyckpt.events import Events
from easyckpt.flush import PIN_SECONDS, Flusher, opened, write_shard
from easyckpt.layout import SegmentHeader, Version
from easyckpt.manifest import Manifest, Shard
from easyckpt.mappings import Mappings
from easyckpt.scrub import Scrubber
from easyckpt.shm import Segment
from easyckpt.storage import Storage


class PartFlusher(Flusher):
    """Flushes what is newest in a folder that holds only some ranks of its member."""

    def __init__(
        self,
        folder: Path,
        storage: str | os.PathLike[str] | Storage,
        *,
        here: int,
        role: str = "trainer",
        keep: int = 3,
        keep_every: int | None = None,
        events: Events | None = None,
        scrubber: Scrubber | None = None,
    ) -> None:
        """`here`: ranks of the member on this node."""
        super().__init__(folder, storage, role=role, keep=keep, keep_every=keep_every, events=events, scrubber=scrubber)
        self._here = here
        self._waiting: dict[Version, SegmentHeader] = {}
        """Steps of which this node's part is durable, and others' are not yet."""

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def _choose(self, flushed: Sequence[Version], *, marked_only: bool) -> list[Segment] | None:
        self._look_again()
        done = [*flushed, *(self._flushed or ()), *self._waiting]
        return newest_part(self._held(), self._role, done, here=self._here, marked_only=marked_only)

    def _write(self, chosen: list[Segment]) -> Manifest | None:
        record = flush_part(chosen, self._storage, self._claims, self._mappings)
        if record is None:
            self._waiting[chosen[0].header.version] = chosen[0].header
        return record

    def _look_again(self) -> None:
        """What became of the steps that waited for others; one that a newer step has overtaken is let go."""
        for _, header in sorted(self._waiting.items(), key=lambda item: item[0], reverse=True):
            record = commit_when_complete(header, self._storage)
            if record is not None:
                self._note(record, "flush_found")
        newest = self.newest
        self._waiting = {
            version: header for version, header in self._waiting.items() if newest is None or version > newest
        }


def newest_part(
    segments: Sequence[Segment], role: str, flushed: Sequence[Version], *, here: int, marked_only: bool
) -> list[Segment] | None:
    """The newest step of one member of which this node has all its `here` ranks, newer than what is on storage."""
    groups: dict[tuple[Version, str], dict[int, Segment]] = {}
    for segment in segments:
        header = segment.header
        if header.role == role and segment.tier == "shm" and (header.flush or not marked_only):
            groups.setdefault((header.version, header.member), {}).setdefault(header.rank, segment)
    newest = max(flushed, default=None)
    for (version, _), ranks in sorted(groups.items(), key=lambda group: group[0], reverse=True):
        if len(ranks) == here and (newest is None or version > newest):
            return [ranks[rank] for rank in sorted(ranks)]
    return None


def flush_part(segments: Sequence[Segment], storage: Storage, claims: Claims, mappings: Mappings) -> Manifest | None:
    """Makes this node's ranks durable; the manifest, where they were the last. Raises as `flush.flush_segment` does."""
    header = segments[0].header
    folder = manifest.folder_name(header)
    with contextlib.ExitStack() as stack:
        files = stack.enter_context(opened(segments, PIN_SECONDS))
        claim = stack.enter_context(claims.held(storage, folder, part=f"r{header.rank}"))
        for fd, segment in zip(files, segments, strict=True):
            shard = write_shard(fd, segment, storage, folder, claim, mappings)
            storage.remove(folder, [_record_name(header, segment.header.rank)])  # of a writer who was killed
            storage.create(folder, _record_name(header, segment.header.rank), msgspec.json.encode(shard))
    return commit_when_complete(header, storage)


def commit_when_complete(header: SegmentHeader, storage: Storage) -> Manifest | None:
    """The manifest, if every rank's file is durable; also where another node has just written it. None while some are missing."""
    folder = manifest.folder_name(header)
    raw = storage.read_manifest(folder)
    if raw is not None:
        return manifest.decode(raw, where=folder)
    names = [_record_name(header, rank) for rank in range(header.ranks)]
    if not set(names) <= set(storage.stamps(folder)):
        return None
    try:
        shards = [msgspec.json.decode(storage.read_small(folder, name), type=Shard) for name in names]
    except (msgspec.MsgspecError, FileNotFoundError):
        return None  # it is being written, or the manifest has just taken its place: the next look tells
    record = manifest.of([header], shards)
    with contextlib.suppress(AlreadyFlushed):
        storage.commit(folder, manifest.encode(record))
    with contextlib.suppress(EasyckptError, OSError):  # left-overs harm nobody
        storage.remove(folder, names)
    return record


def forget(storage: Storage, role: str, member: str, ranks: Iterable[int]) -> None:
    """Before a run begins: what an earlier one wrote of these ranks and nobody committed is no part of a step any more."""
    names = [f".done.{member}.r{rank}" for rank in ranks]
    for folder in storage.folders():
        if folder.startswith(f"{role}/") and storage.read_manifest(folder) is None:
            storage.remove(folder, [name for name in storage.stamps(folder) if name in names])


def _record_name(header: SegmentHeader, rank: int) -> str:
    return f".done.{header.member}.r{rank}"
