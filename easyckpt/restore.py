"""From the nearest good copy back into a live state.

Versions are tried newest first, as agreed between the ranks; of one version the shards of the own member come first, each from its nearest
tier. What is torn or damaged is said, counted and left for the next tier, then for another member's snapshot, then for an older version. A
snapshot of other ranks, or of tensors cut another way, is pieced together from all its shards.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from easyckpt import fitting, sources
from easyckpt.agreement import Agreement, Outcome
from easyckpt.errors import BadSegment, Corrupt, Mismatch, StorageError
from easyckpt.events import Event, Events
from easyckpt.layout import SegmentHeader, Version
from easyckpt.shardserver import Peer
from easyckpt.sources import Candidate, Holder, OpenShard, Source
from easyckpt.storage import Storage


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What a state was filled with."""

    lineage: int
    """Of the version."""
    step: int
    """Of the version."""
    chain: str
    """Hash chain of the applied (step, batch digest) pairs."""
    tier: str
    """shm, peer or storage: the farthest that was needed."""
    member: str
    """Whose snapshot it was."""
    epoch: int
    """Membership epoch in which it was saved."""
    state_digest: str
    """Over all tensors of the shard (of rank 0, when it was pieced together)."""
    extra: Any
    """The state without its tensors, as JSON."""
    header: SegmentHeader
    """All the snapshot says of itself."""
    nbytes: int
    """Tensor bytes that were read."""
    seconds: float
    """How long it took."""


class Restorer:
    """Restores one rank."""

    def __init__(
        self,
        folder: Path | None,
        storage: Storage | None,
        *,
        role: str,
        member: str,
        rank: int,
        ranks: int,
        agreement: Agreement,
        events: Events,
        peers: Sequence[Peer] = (),
        held: Holder | None = None,
    ) -> None:
        self._folder = folder
        self._storage = storage
        self._role = role
        self._member = member
        self._rank = rank
        self._ranks = ranks
        self._agreement = agreement
        self._events = events
        self._peers = peers
        self._held = held
        self._refused: list[str] = []

    def restore(
        self,
        state: Any,
        *,
        at: Version | None = None,
        member: str | None = None,
        strict: bool = True,
        only: str | Collection[str] | None = None,
    ) -> tuple[Restored, Any] | None:
        """With the state that was filled: a new one where `fitting.NOTHING` was given. None when there is nothing to restore from."""
        found = self._find(member=member, peers=self._peers, left_behind=at is not None)
        candidates = [one for one in found if at is None or one.version == tuple(at)]
        tried: set[Version] = set()
        while True:
            version = self._agreement.newest([one.version for one in candidates if one.version not in tried])
            if version is None:
                break
            tried.add(version)
            filled, misfit = self._try([one for one in candidates if one.version == version], state, strict, only)
            outcome = Outcome.MISFIT if misfit else Outcome.GOOD if filled else Outcome.REFUSED
            worst = self._agreement.worst(outcome)
            if worst is Outcome.MISFIT:
                raise misfit or Mismatch(
                    "the snapshot does not fit the state of another rank, which names what differs"
                )
            if worst is Outcome.GOOD:
                return filled
        if self._refused:
            raise Corrupt(
                f"no copy could be read, and the state may be half filled; do not use it. Tried: {'; '.join(self._refused)}."
                " Verify the storage (easyckpt verify), or start anew"
            )
        return None

    def newest_known(self) -> Version | None:
        """Of this member, in memory here or on storage, by any of its ranks: one that lost its memory must not begin another lineage than the others."""
        found = self._find(member=self._member)
        return self._agreement.newest_of_any(max((one.version for one in found), default=None))

    def _find(self, *, member: str | None, peers: Sequence[Peer] = (), left_behind: bool = False) -> list[Candidate]:
        # Ranks that agree may lie on several nodes, where none sees the others' shards: its own stands for the step.
        rank = self._rank if self._agreement.spans_nodes else None
        return sources.find(
            self._folder,
            self._storage,
            role=self._role,
            member=member,
            own=self._member,
            rank=rank,
            ranks=self._ranks,
            peers=peers,
            left_behind=left_behind,
            refused=lambda tier, text: self._events.emit(Event(kind="tier_refused", tier=tier, text=text)),
        )

    def _try(
        self, candidates: Sequence[Candidate], state: Any, strict: bool, only: str | Collection[str] | None
    ) -> tuple[tuple[Restored, Any] | None, Mismatch | None]:
        misfit: Mismatch | None = None
        for candidate in candidates:
            for tiers in self._ways(candidate):
                try:
                    restored = self._from_nearest(candidate, tiers, state, strict, only)
                except Mismatch as error:
                    misfit = error
                    continue
                if restored is not None:
                    return restored, None
                break  # it fits and every copy was damaged: all shards together would be no better
            else:
                if misfit is not None and candidate.member == self._member:
                    break  # whole and another state than this one: another member's would fill it with values that are not its own
        return None, misfit

    def _ways(self, candidate: Candidate) -> list[list[list[Source]]]:
        """The own shard as it is, then all shards, for a state that is cut another way: of each shard its tiers, the nearest first."""
        mine = candidate.of_rank(self._rank) if candidate.ranks == self._ranks else []
        ways = [[mine]] if mine else []
        if candidate.is_whole and (candidate.ranks > 1 or not mine):
            ways.append([candidate.of_rank(rank) for rank in range(candidate.ranks)])
        return ways

    def _from_nearest(
        self,
        candidate: Candidate,
        tiers: Sequence[Sequence[Source]],
        state: Any,
        strict: bool,
        only: str | Collection[str] | None,
    ) -> tuple[Restored, Any] | None:
        """Each shard from its nearest tier; one that was bad there, and only that one, from its next. None when one has no other left."""
        at = [0] * len(tiers)
        while True:
            chosen = [places[index] for places, index in zip(tiers, at, strict=True)]
            watched: list[_Watched] = []
            try:
                return self._read(candidate, chosen, state, strict, only, watched)
            except (BadSegment, StorageError, OSError) as error:
                # One that could not even be opened is the last that was begun with.
                bad = [index for index, shard in enumerate(watched) if shard.is_bad] or [min(len(watched), len(at) - 1)]
                for index in bad:
                    self._refuse(candidate, chosen[index], error)
                    at[index] += 1
                if any(index >= len(places) for places, index in zip(tiers, at, strict=True)):
                    return None

    def _read(
        self,
        candidate: Candidate,
        chosen: Sequence[Source],
        state: Any,
        strict: bool,
        only: str | Collection[str] | None,
        watched: list[_Watched],
    ) -> tuple[Restored, Any]:
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            for source in chosen:
                opened = stack.enter_context(sources.open_source(source, self._storage, self._held))
                watched.append(_Watched(opened))
            nbytes, filled = fitting.fill(watched, state, strict=strict, only=only, sharing=self._agreement.sharing)
            where = watched[0].where
            header = watched[0].header
        tier = max((source.tier for source in chosen), key=sources.TIERS.index)
        seconds = time.monotonic() - started
        self._tell("restored", candidate, tier=tier, nbytes=nbytes, seconds=seconds, text=where)
        restored = Restored(
            lineage=header.lineage,
            step=header.step,
            chain=header.chain,
            tier=tier,
            member=candidate.member,
            epoch=header.epoch,
            state_digest=header.state_digest,
            extra=header.extra,
            header=header,
            nbytes=nbytes,
            seconds=seconds,
        )
        return restored, filled

    def _refuse(self, candidate: Candidate, source: Source, error: Exception) -> None:
        self._refused.append(str(error))
        self._tell("tier_refused", candidate, tier=source.tier, text=str(error))

    def _tell(self, kind: str, candidate: Candidate, **fields: str | float) -> None:
        about = {"kind": kind, "lineage": candidate.lineage, "step": candidate.step}
        self._events.emit(msgspec.convert({**about, **fields}, Event))


class _Watched:
    """A shard that remembers whether its own bytes were bad, so that only it is looked for elsewhere."""

    def __init__(self, shard: OpenShard) -> None:
        self._shard = shard
        self.header = shard.header
        self.where = shard.where
        self.is_bad = False

    def view(self) -> memoryview | None:
        return self._shard.view()

    def read_into(self, target: memoryview, at: int) -> None:
        try:
            self._shard.read_into(target, at)
        except BaseException:
            self.is_bad = True
            raise

    def explain(self, error: Exception) -> Exception:
        self.is_bad = True
        return self._shard.explain(error)
