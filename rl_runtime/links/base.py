"""What the loops ask of their links. A test's in-memory link answers the same calls."""

from typing import Protocol

from aimaster.wire.checkpoint import FetchReply, FetchRequest
from aimaster.wire.rollout import (
    CompleteReply,
    CompleteRequest,
    LeaseReply,
    LeaseRequest,
    StreamReply,
    StreamRequest,
)
from aimaster.wire.training import Turn, Word


class LinkError(Exception):
    """Base of what a link raises; connection troubles are not among them, they are waited out."""


class RefusedError(LinkError):
    """The other side answered that the request itself is wrong (4xx). Asking again would not help."""


class PolicyLink(Protocol):
    """Policy member to controller."""

    def turn(self, turn: Turn) -> Word:
        """Ask until answered, however long it takes."""
        ...


class RolloutLink(Protocol):
    """Rollout member to controller."""

    def lease(self, request: LeaseRequest) -> LeaseReply: ...

    def stream(self, request: StreamRequest) -> StreamReply: ...

    def complete(self, request: CompleteRequest) -> CompleteReply: ...


class SnapshotLink(Protocol):
    """Member to the agent of its node."""

    def fetch(self, request: FetchRequest) -> FetchReply:
        """Ask for a snapshot; an absent agent is an empty reply."""
        ...
