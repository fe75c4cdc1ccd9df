"""What a path on the command line means: a storage (folder or URL), one checkpoint in it, a segment folder, or one segment file. No torch."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from easyckpt import shm, sources
from easyckpt.errors import EasyckptError
from easyckpt.layout import SegmentHeader
from easyckpt.manifest import FILE_NAME, parse_folder
from easyckpt.sources import Candidate, Source
from easyckpt.storage import Storage, open_storage


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshots that a path leads to."""

    path: Path | str
    """As given."""
    kind: str
    """storage, checkpoint, memory or segment."""
    storage: Storage | None
    """Where shards are opened; None for memory."""
    candidates: tuple[Candidate, ...]
    """Whole snapshots, newest first."""

    def one(self, step: int | None = None) -> Candidate:
        """The newest, or the newest of a step."""
        for candidate in sorted(self.candidates, key=lambda one: one.is_left_behind):
            if step is None or candidate.step == step:
                return candidate
        what = f"no snapshot of step {step}" if step is not None else "no whole snapshot"
        raise EasyckptError(f"{self.path} has {what}; `easyckpt ls {self.path}` shows what is there")


def look(where: str | os.PathLike[str], role: str | None = None) -> Target:
    """Raises EasyckptError where nothing is."""
    text = os.fspath(where)
    if "://" in text and not text.startswith("file://"):
        storage = open_storage(text)
        found = sources.find(None, storage, role=role, left_behind=True)
        return Target(path=text, kind="storage", storage=storage, candidates=tuple(found))
    path = Path(text.removeprefix("file://"))
    if path.is_file():
        return _segment(path)
    if not path.is_dir():
        raise EasyckptError(f"{path} is not there; name a checkpoint folder, a segment folder or a segment file")
    if shm.segment_names(path):
        found = sources.find(path, None, role=role, left_behind=True)
        return Target(path=path, kind="memory", storage=None, candidates=tuple(found))
    resolved = path.resolve()
    if (resolved / FILE_NAME).exists() and parse_folder(resolved.name) is not None:
        storage = open_storage(resolved.parent.parent)
        version = parse_folder(resolved.name)
        every = sources.find(None, storage, role=resolved.parent.name, left_behind=True)
        found = [one for one in every if one.version == version]
        return Target(path=path, kind="checkpoint", storage=storage, candidates=tuple(found))
    storage = open_storage(path)
    return Target(
        path=path,
        kind="storage",
        storage=storage,
        candidates=tuple(sources.find(None, storage, role=role, left_behind=True)),
    )


def _segment(path: Path) -> Target:
    segment = shm.read_segment(path)
    header = segment.header
    candidate = Candidate(
        lineage=header.lineage,
        step=header.step,
        chain=header.chain,
        tier=segment.tier,
        member=header.member,
        role=header.role,
        state_digest=header.state_digest,
        ranks=header.ranks,
        created_at=header.created_at,
        nbytes=segment.nbytes,
        sources=(Source(tier=segment.tier, rank=header.rank, segment=segment),),
    )
    return Target(path=path, kind="segment", storage=None, candidates=(candidate,))


def headers(target: Target, candidate: Candidate) -> list[SegmentHeader]:
    """The proven headers of a snapshot's shards, nearest tier of each rank, in rank order."""
    found = []
    for rank in sorted({source.rank for source in candidate.sources}):
        with sources.open_source(candidate.of_rank(rank)[0], target.storage) as shard:
            found.append(shard.header)
    return found
