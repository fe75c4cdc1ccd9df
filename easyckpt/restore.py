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
    """Tensor bytes of the shards that were read."""
    seconds: float
    """How long it took."""


class Restorer:
    """One restore of one rank."""

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
        only: Collection[str] | None = None,
    ) -> Restored | None:
        rank = self._rank if self._agreement.spans_nodes else None
        found = sources.find(
            self._folder,
            self._storage,
            role=self._role,
            member=member,
            own=self._member,
            rank=rank,
            ranks=self._ranks,
            peers=self._peers,
            refused=lambda text: self._events.emit(Event(kind="tier_refused", tier="peer", text=text)),
        )
        candidates = [one for one in found if at is None or one.version == tuple(at)]
        tried: set[Version] = set()
        while True:
            version = self._agreement.newest([one.version for one in candidates if one.version not in tried])
            if version is None:
                break
            tried.add(version)
            restored, misfit = self._try([one for one in candidates if one.version == version], state, strict, only)
            outcome = Outcome.MISFIT if misfit else Outcome.GOOD if restored else Outcome.REFUSED
            worst = self._agreement.worst(outcome)
            if worst is Outcome.MISFIT:
                raise misfit or Mismatch(
                    "the snapshot does not fit the state of another rank, which names what differs"
                )
            if worst is Outcome.GOOD:
                return restored
        if self._refused:
            raise Corrupt(
                f"no copy could be read, and the state may be half filled; do not use it. Tried: {'; '.join(self._refused)}."
                " Verify the storage (easyckpt verify), or start anew"
            )
        return None

    def _try(
        self, candidates: Sequence[Candidate], state: Any, strict: bool, only: Collection[str] | None
    ) -> tuple[Restored | None, Mismatch | None]:
        misfit: Mismatch | None = None
        for candidate in candidates:
            mine = [[source] for source in candidate.of_rank(self._rank)] if candidate.ranks == self._ranks else []
            for chosen in mine + self._together(candidate, needed=not mine):
                if len(chosen) > 1 and mine and misfit is None:
                    break  # the own shard fits as it is; it was damaged, and all shards together would be no better
                try:
                    return self._read(candidate, chosen, state, strict, only), None
                except Mismatch as error:
                    misfit = error
                except (BadSegment, StorageError, OSError) as error:
                    self._refuse(candidate, chosen, error)
        return None, misfit

    def _together(self, candidate: Candidate, *, needed: bool) -> list[list[Source]]:
        """All shards, for a state that is cut another way: each from its nearest tier, then from the next ones."""
        if not candidate.is_whole or (candidate.ranks == 1 and not needed):
            return []
        every = [candidate.of_rank(rank) for rank in range(candidate.ranks)]
        return [
            [tiers[min(attempt, len(tiers) - 1)] for tiers in every]
            for attempt in range(max(len(tiers) for tiers in every))
        ]

    def _read(
        self, candidate: Candidate, chosen: Sequence[Source], state: Any, strict: bool, only: Collection[str] | None
    ) -> Restored:
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            shards: list[OpenShard] = [
                stack.enter_context(sources.open_source(source, self._storage, self._held)) for source in chosen
            ]
            fitting.fill(shards, state, strict=strict, only=only)
            where = shards[0].where
            header = shards[0].header
            nbytes = sum(shard.header.data_bytes for shard in shards)
        tier = max((source.tier for source in chosen), key=sources.TIERS.index)
        seconds = time.monotonic() - started
        self._tell("restored", candidate, tier=tier, nbytes=nbytes, seconds=seconds, text=where)
        return Restored(
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

    def _refuse(self, candidate: Candidate, chosen: Sequence[Source], error: Exception) -> None:
        self._refused.append(str(error))
        self._tell("tier_refused", candidate, tier=chosen[0].tier, text=str(error))

    def _tell(self, kind: str, candidate: Candidate, **fields: str | float) -> None:
        about = {"kind": kind, "lineage": candidate.lineage, "step": candidate.step}
        self._events.emit(msgspec.convert({**about, **fields}, Event))
