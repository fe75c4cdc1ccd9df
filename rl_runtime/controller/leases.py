"""Prompt leases: who generates which sample, until when, and from which tokens on. Pure: told the time, kept in memory only.

    open sample --grant--> leased --complete--> admitted (the ledger's business)
         ^-- released: holder died, deadline passed, or what it sent was too old --'

A lease is a promise with a deadline, not a right: the ledger admits the first completion of a key, whoever brings it. Lease ids
carry the key, so a restarted controller adopts the leases that workers still hold, and nothing generated is thrown away.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.rollout import Piece, PromptLease
from rl_runtime.controller.errors import MessageError

Key = tuple[int, int]
NOTHING: Final = Piece()


class _Open(msgspec.Struct, kw_only=True):
    """A sample that is wanted."""

    lease_id: str = ""
    """Empty while nobody has it."""
    holder: MemberId | None = None
    incarnation: Incarnation = Incarnation(0)
    deadline: float = 0.0
    prefix: Piece = NOTHING
    """Streamed so far, by whoever held it."""
    prompt_tokens: tuple[int, ...] = ()


class Leases:
    """All samples that are wanted and not admitted. Every open prompt has one entry for each sample that is missing."""

    def __init__(self, lease_seconds: float, boot: str) -> None:
        self._seconds = lease_seconds
        self._boot = boot
        """Makes lease ids of this start of the controller its own."""
        self._issued = 0
        self._open: dict[Key, _Open] = {}
        self.releases = 0
        """Leases taken from a worker that died or was late."""

    def __len__(self) -> int:
        return len(self._open)

    # -- what is wanted ------------------------------------------------------------------------------------------------

    def want(self, prompt_id: int, indices: Iterable[int]) -> None:
        """Add the samples of a prompt that are missing."""
        for index in indices:
            self._open.setdefault((prompt_id, index), _Open())

    def settle(self, key: Key) -> None:
        """The sample is admitted: nobody needs it any more."""
        self._open.pop(key, None)

    # -- workers -------------------------------------------------------------------------------------------------------

    def free(self) -> list[Key]:
        """Samples that nobody makes, oldest prompt first."""
        return sorted(key for key, sample in self._open.items() if sample.holder is None)

    def grant(
        self, key: Key, member: MemberId, incarnation: Incarnation, now: float, *, row: Mapping[str, str], seed: int
    ) -> PromptLease:
        """Lease a free sample to a worker, with what was streamed of it."""
        sample = self._open[key]
        self._issued += 1
        sample.lease_id = f"{key[0]}.{key[1]}.{self._boot}.{self._issued}"
        sample.holder, sample.incarnation, sample.deadline = member, incarnation, now + self._seconds
        return PromptLease(
            lease_id=sample.lease_id,
            prompt_id=key[0],
            index=key[1],
            row=dict(row),
            prefix=sample.prefix,
            prefix_prompt_tokens=sample.prompt_tokens,
            seed=seed,
            deadline_seconds=self._seconds,
        )

    def renew(
        self, lease_ids: Iterable[str], member: MemberId, incarnation: Incarnation, now: float
    ) -> tuple[str, ...]:
        """Renew what the worker holds, adopt what it held under an earlier controller, return the ids that are no longer its own."""
        return tuple(lease_id for lease_id in lease_ids if not self._renew_one(lease_id, member, incarnation, now))

    def _renew_one(self, lease_id: str, member: MemberId, incarnation: Incarnation, now: float) -> bool:
        sample = self._open.get(key_of(lease_id))
        if sample is None:
            return False
        if sample.holder is None:
            # Its deadline passed, or an earlier controller leased it, and nobody took it over: it goes on.
            sample.lease_id, sample.holder, sample.incarnation = lease_id, member, incarnation
        if sample.lease_id != lease_id or (sample.holder, sample.incarnation) != (member, incarnation):
            return False
        sample.deadline = now + self._seconds
        return True

    def stream(self, lease_id: str, start: int, piece: Piece, prompt_tokens: tuple[int, ...]) -> None:
        """Keep new tokens of a lease that was just renewed; what is here already is ignored, a gap is too."""
        sample = self._open[key_of(lease_id)]
        have = len(sample.prefix.tokens)
        if start > have or start + len(piece.tokens) <= have:
            return
        skip = have - start
        sample.prefix = Piece(
            tokens=sample.prefix.tokens + piece.tokens[skip:],
            logprobs=sample.prefix.logprobs + piece.logprobs[skip:],
            versions=sample.prefix.versions + piece.versions[skip:],
        )
        sample.prompt_tokens = prompt_tokens or sample.prompt_tokens

    # -- taking back ---------------------------------------------------------------------------------------------------

    def give_up(self, key: Key, lease_id: str) -> None:
        """What came of this lease is too old: begin the sample anew, unless another worker has it by now."""
        sample = self._open.get(key)
        if sample is not None and sample.lease_id in ("", lease_id):
            self._open[key] = _Open()

    def forget_old_prefixes(self, oldest_step: int) -> None:
        """Drop what was streamed of free samples with weights older than `oldest_step`: it could not be admitted."""
        for sample in self._open.values():
            if sample.holder is None and _oldest(sample.prefix.versions, oldest_step) < oldest_step:
                sample.prefix, sample.prompt_tokens = NOTHING, ()

    def expire(self, now: float) -> int:
        """Free what passed its deadline; returns how many."""
        return self._release(sample for sample in self._open.values() if sample.deadline <= now)

    def died(self, member: MemberId, incarnation: Incarnation) -> int:
        """Free what this start of the worker, or an earlier one, held; returns how many."""
        return self._release(
            sample for sample in self._open.values() if sample.holder == member and sample.incarnation <= incarnation
        )

    def _release(self, samples: Iterable[_Open]) -> int:
        count = 0
        for sample in samples:
            if sample.holder is not None:
                sample.holder, sample.lease_id = None, ""
                count += 1
        self.releases += count
        return count

    def held_by(self) -> dict[MemberId, int]:
        """How many samples each worker makes now."""
        held: dict[MemberId, int] = {}
        for sample in self._open.values():
            if sample.holder is not None:
                held[sample.holder] = held.get(sample.holder, 0) + 1
        return held


def key_of(lease_id: str) -> Key:
    """Return the key that a lease id carries; raises MessageError when it is none of ours."""
    parts = lease_id.split(".")
    if len(parts) != 4 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        raise MessageError(f"{lease_id!r} is no lease id of this runtime; nothing was changed")
    return int(parts[0]), int(parts[1])


def _oldest(versions: tuple[Version, ...], default: int) -> int:
    return min((version.step for version in versions), default=default)
