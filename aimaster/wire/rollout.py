"""Rollout worker and controller: prompt leases out, completions in. All by HTTP POST with msgpack bodies.

/v1/rollout/lease     LeaseRequest    -> LeaseReply
/v1/rollout/stream    StreamRequest   -> StreamReply      tokens so far of long generations; renews the leases
/v1/rollout/complete  CompleteRequest -> CompleteReply    answered after the fsync of what it admits
"""

from typing import Literal

import msgspec

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Generated tokens, with what is known of each."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[Version, ...] = ()


class PromptLease(msgspec.Struct, frozen=True, kw_only=True):
    """A promise: one completion of this prompt, by this deadline, or another worker gets it."""

    lease_id: str
    prompt_id: int
    index: int
    """Sample index within the group."""
    row: dict[str, str]
    """The data row: `prompt` and `answer`, as the data set module made them."""
    prefix: Piece
    """Already streamed by a worker that died: continue from here. Its prompt tokens are not re-tokenised."""
    prefix_prompt_tokens: tuple[int, ...] = ()
    seed: int
    deadline_seconds: float
    """From receipt; renewed by every stream and lease request of the holder."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The newest committed version that has a sealed snapshot, and who has it in memory."""

    version: Version
    state_digest: str
    holders: dict[MemberId, str]
    """Member to node."""


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    member: MemberId
    incarnation: Incarnation
    node: str
    version: Version | None
    """Weights loaded now."""
    capacity: int
    """Free slots of the engine."""
    holding: tuple[str, ...] = ()
    """Leases in work, which this renews; those the controller no longer knows come back in `dropped`."""
    figures: dict[str, float] = {}


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    leases: tuple[PromptLease, ...] = ()
    dropped: tuple[str, ...] = ()
    offer: Offer | None = None
    """None before the first snapshot."""
    wait_reason: str = ""
    """Why there are fewer leases than asked for: `staleness bound`, `no weights yet`, `hold`."""
    stop: bool = False


class Partial(msgspec.Struct, frozen=True, kw_only=True):
    lease_id: str
    start: int
    """Index of the first token of `piece` within the completion; the controller ignores what it already has."""
    prompt_tokens: tuple[int, ...] = ()
    piece: Piece


class StreamRequest(msgspec.Struct, frozen=True, kw_only=True):
    member: MemberId
    incarnation: Incarnation
    partials: tuple[Partial, ...]


class StreamReply(msgspec.Struct, frozen=True, kw_only=True):
    dropped: tuple[str, ...] = ()
    """Leases that are no longer the worker's: stop generating them."""
    offer: Offer | None = None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished, rewarded sample."""

    lease_id: str
    prompt_id: int
    index: int
    prompt_tokens: tuple[int, ...]
    piece: Piece
    """All tokens of the completion, the prefix included."""
    text: str
    reward: float
    rewards: dict[str, float] = {}
    """By reward function, before weighting."""
    finish: Literal["stop", "length"]


class CompleteRequest(msgspec.Struct, frozen=True, kw_only=True):
    member: MemberId
    incarnation: Incarnation
    completions: tuple[Completion, ...]


class CompleteReply(msgspec.Struct, frozen=True, kw_only=True):
    results: tuple[Literal["admitted", "duplicate", "stale", "unknown"], ...]
    """One per completion, in order. `duplicate` is no error: somebody's, or this one's earlier try, was admitted. `stale`: too old to train, the prompt is leased again."""
