"""Where a snapshot can be read from: every shard of every version over memory, peer copies and storage, as candidates. No torch.

A candidate is one member's snapshot of one version that is whole: each rank's shard lies in some tier. Shards of different members are not
mixed. Candidates come newest first; what a later lineage went back behind is none. Opening a shard gives its proven header and a reader.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from easyckpt import manifest, shm
from easyckpt.errors import EasyckptError, Torn
from easyckpt.layout import Rewind, SegmentHeader, Version, is_dead
from easyckpt.manifest import Manifest, Shard
from easyckpt.shardserver import Peer
from easyckpt.shm import Segment
from easyckpt.storage import Reader, Storage, read_manifests, shard_header

Tier = Literal["shm", "peer", "storage"]
TIERS: tuple[Tier, ...] = ("shm", "peer", "storage")
Refused = Callable[[Tier, str], None]
"""Hears of what is there and cannot be used: in which tier, and why."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """One shard in one tier."""

    tier: Tier
    """Where it lies."""
    rank: int
    """Whose shard it is."""
    segment: Segment | None = None
    """In memory."""
    peer: Peer | None = None
    """Whose memory it lies in, when that is on another node."""
    remote_header: SegmentHeader | None = None
    """What the segment there says of itself."""
    name: str = ""
    """Of the file there."""
    record: Manifest | None = None
    """On storage."""
    shard: Shard | None = None
    """On storage."""

    @property
    def nbytes(self) -> int:
        if self.remote_header is not None:
            return self.remote_header.data_bytes
        return self.segment.nbytes if self.segment is not None else self.shard.nbytes if self.shard is not None else 0


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One member's whole snapshot of one version."""

    lineage: int
    """Of the version."""
    step: int
    """Of the version."""
    chain: str
    """Hash chain of the applied (step, batch digest) pairs."""
    tier: Tier
    """The farthest tier that a shard has to come from."""
    member: str
    """Whose snapshot it is."""
    role: str
    """Of the member."""
    state_digest: str
    """Of rank 0's tensors: equal on members that hold the same state."""
    ranks: int = 1
    """Ranks of the member."""
    created_at: float = 0.0
    """Seconds since 1970 at the save."""
    nbytes: int = 0
    """Of all ranks' files."""
    sources: tuple[Source, ...] = ()
    """All shards, nearest tier first within a rank."""
    is_left_behind: bool = False
    """Whether a later lineage began behind it: it is never taken for the newest, and can be named."""

    @property
    def is_whole(self) -> bool:
        return {source.rank for source in self.sources} == set(range(self.ranks))

    @property
    def version(self) -> Version:
        return (self.lineage, self.step)

    def of_rank(self, rank: int) -> list[Source]:
        return [source for source in self.sources if source.rank == rank]


class OpenShard(Protocol):
    """A shard ready to be read."""

    header: SegmentHeader
    where: str

    def view(self) -> memoryview | None:
        """All tensor bytes as mapped memory, or None where they have to be read."""

    def read_into(self, target: memoryview, at: int) -> None:
        """Fills `target` from the tensor bytes at `at`."""

    def explain(self, error: Exception) -> Exception:
        """What bytes that did not match mean here: damage, or a writer that came meanwhile."""


def find(
    folder: Path | None,
    storage: Storage | None,
    *,
    role: str | None,
    member: str | None = None,
    own: str = "",
    rank: int | None = None,
    ranks: int = 1,
    peers: Sequence[Peer] = (),
    refused: Refused | None = None,
    left_behind: bool = False,
) -> list[Candidate]:
    """Whole candidates, newest first; of one version the own member first, then the nearest tier.

    Peers that do not answer and manifests that are damaged are left out and told to `refused`. With `rank`, one of `ranks` that agree among
    themselves, a candidate that has this rank's shard will do as well. `left_behind`: also those that a later lineage began behind.
    """
    held: dict[tuple[Version, str, str], list[tuple[SegmentHeader | Manifest, Source]]] = {}
    rewinds: dict[str, set[Rewind]] = {}
    for header, source in (*_every(folder, storage, role, refused), *_from_peers(peers, role, refused)):
        rewinds.setdefault(header.role, set()).update(header.rewinds)
        if member is None or header.member == member:
            held.setdefault((header.version, header.role, header.member), []).append((header, source))
    found = []
    for (version, held_role, _), shards in held.items():
        candidate = _candidate(shards)
        is_mine = candidate.ranks == ranks and rank is not None and bool(candidate.of_rank(rank))
        is_left = is_dead(version, rewinds[held_role])
        if (left_behind or not is_left) and (candidate.is_whole or is_mine):
            found.append(msgspec.structs.replace(candidate, is_left_behind=is_left))
    found.sort(key=lambda one: (one.member != own, TIERS.index(one.tier), one.member))
    found.sort(key=lambda one: one.version, reverse=True)
    return found


Holder = Callable[[Segment, int], memoryview | None]
"""All bytes of a segment open as a descriptor, from who has it mapped anyway."""


@contextlib.contextmanager
def open_source(source: Source, storage: Storage | None, held: Holder | None = None) -> Iterator[OpenShard]:
    """Raises BadSegment, StorageError or OSError when the shard cannot be used."""
    if source.segment is not None:
        with _open_memory(source.segment, held) as memory:
            yield memory
    elif source.peer is not None:
        with source.peer.open(source.name) as remote:
            if remote.header != source.remote_header:
                raise Torn(f"{remote.where} was overwritten since it was found; a newer one is there")
            yield remote
    elif source.record is not None and source.shard is not None and storage is not None:
        folder = manifest.folder_name(source.record)
        reader = storage.open_shard(folder, source.shard.file)
        try:
            yield _StoredShard(reader, source.shard, f"{folder}/{source.shard.file}")
        finally:
            reader.close()


def _every(
    folder: Path | None, storage: Storage | None, role: str | None, refused: Refused | None
) -> Iterator[tuple[SegmentHeader | Manifest, Source]]:
    for segment in shm.scan(folder) if folder is not None else []:
        if role is None or segment.header.role == role:
            yield segment.header, Source(tier=segment.tier, rank=segment.header.rank, segment=segment)
    records = []
    for name, read in read_manifests(storage) if storage is not None else ():
        if isinstance(read, Manifest) and role in (None, read.role):
            records.append(read)
        elif isinstance(read, EasyckptError) and refused is not None and role in (None, name.partition("/")[0]):
            refused("storage", str(read))
    for record in sorted(records, key=lambda one: (one.version, one.epoch), reverse=True):
        for shard in record.shards:
            yield record, Source(tier="storage", rank=shard.rank, record=record, shard=shard)


def _from_peers(
    peers: Sequence[Peer], role: str | None, refused: Refused | None
) -> Iterator[tuple[SegmentHeader, Source]]:
    for peer in peers:
        try:
            for name in peer.names():
                with contextlib.suppress(EasyckptError), peer.open(name) as remote:
                    header = remote.header
                    if role is None or header.role == role:
                        yield header, Source(tier="peer", rank=header.rank, peer=peer, remote_header=header, name=name)
        except (OSError, EasyckptError) as error:
            if refused is not None:
                refused("peer", f"the peer at {peer.address[0]}:{peer.address[1]} does not answer: {error}")


def _candidate(shards: list[tuple[SegmentHeader | Manifest, Source]]) -> Candidate:
    shards.sort(key=lambda one: (one[1].rank, TIERS.index(one[1].tier)))
    sources = tuple(source for _, source in shards)
    first = shards[0][0]
    nearest: dict[int, Tier] = {}
    for source in sources:
        nearest.setdefault(source.rank, source.tier)
    return Candidate(
        lineage=first.lineage,
        step=first.step,
        chain=first.chain,
        tier=max(nearest.values(), key=TIERS.index),
        member=first.member,
        role=first.role,
        state_digest=_state_digest(first, sources[0]),
        ranks=first.ranks,
        created_at=first.created_at,
        nbytes=sum(source.nbytes for source in {source.rank: source for source in sources}.values()),
        sources=sources,
    )


def _state_digest(header: SegmentHeader | Manifest, source: Source) -> str:
    if isinstance(header, SegmentHeader):
        return header.state_digest
    return source.shard.state_digest if source.shard else ""


@contextlib.contextmanager
def _open_memory(segment: Segment, held: Holder | None) -> Iterator[OpenShard]:
    fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not shm.is_same(fd, segment):
            raise Torn(f"{segment.path} was overwritten since it was found; a newer one is there")
        view = held(segment, fd) if held is not None else None
        with contextlib.nullcontext(view) if view is not None else shm.mapped(fd, segment.nbytes) as view:
            yield _MappedShard(fd, segment, view)
    finally:
        os.close(fd)


class _MappedShard:
    def __init__(self, fd: int, segment: Segment, view: memoryview) -> None:
        self.header = segment.header
        self.where = str(segment.path)
        self._fd = fd
        self._segment = segment
        self._view = view[segment.prefix_bytes :]

    def view(self) -> memoryview | None:
        return self._view

    def read_into(self, target: memoryview, at: int) -> None:
        target[:] = self._view[at : at + len(target)]

    def explain(self, error: Exception) -> Exception:
        if shm.is_same(self._fd, self._segment):
            return error
        return Torn(f"{self.where} was written to while it was read; a newer one will follow")


class _StoredShard:
    def __init__(self, reader: Reader, shard: Shard, where: str) -> None:
        self.header = shard_header(reader, shard, where)
        self.where = where
        self._reader = reader
        self._prefix_bytes = shard.prefix_bytes

    def view(self) -> memoryview | None:
        return None

    def read_into(self, target: memoryview, at: int) -> None:
        self._reader.read_into(target, self._prefix_bytes + at)

    def explain(self, error: Exception) -> Exception:
        return error
