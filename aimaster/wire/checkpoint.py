"""Snapshots as agents, master and trainers speak of them: where each lies and what it is."""

from typing import Literal

import msgspec

from aimaster.wire.ids import MemberId, NodeId

Tier = Literal["shm", "peer", "storage"]


class Version(msgspec.Struct, frozen=True, order=True):
    """A policy version: the weights after `step` on `lineage`."""

    lineage: int
    step: int


class SnapshotPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One sealed shard of one member's snapshot, at one place."""

    member: MemberId
    role: str
    rank: int
    ranks: int
    version: Version
    chain: str
    """Hash chain of the applied (step, batch digest) pairs, hex."""
    state_digest: str
    tier: Tier
    node: NodeId | None
    """None for storage."""
    name: str
    """File name within the node's segment folder, or path within the storage folder."""
    size_bytes: int
    verified_at: float | None = None
    """When all its bytes were last proven by their digests, at this place or on the way from it (Unix seconds); None: not since the seal."""
    damaged: bool = False
    """Its bytes are not what its digests say: nobody may take it for good."""


class SealedNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer to its agent (`POST /v1/snapshots/sealed` on the node's socket) after the seal of a segment."""

    member: MemberId
    rank: int
    name: str
    version: Version
    flush: bool


class SealedReply(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's answer to it."""

    flush_trouble: str = ""
    """Why nothing of this node reaches storage at present; empty while it does."""


class SaveTrouble(msgspec.Struct, frozen=True, kw_only=True):
    """Trainer to its agent (`POST /v1/snapshots/trouble`): a snapshot was lost in the background."""

    member: MemberId
    version: Version
    text: str


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Member to its agent (`POST /v1/snapshots/fetch`): bring the newest whole snapshot of `role` to this node's memory."""

    role: str
    at: Version | None = None
    """Exactly this version; None for the newest."""
    newer_than: Version | None = None
    deadline_seconds: float = 30.0


class FetchReply(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent has now. `places` are segments in the node's own folder (own or peer copies), or storage paths; empty: none found."""

    places: tuple[SnapshotPlace, ...]
    seconds: float
