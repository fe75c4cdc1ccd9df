"""How the ranks of a member come to restore the same version: by what each of them has, never by what one of them hopes.

Alone, a rank takes its newest. With torch.distributed each rank offers the versions it could read, and all take the newest that all offer; an
attempt counts only if it worked on all. Small integer tensors are exchanged, nothing is pickled; the group's own timeout is the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

from easyckpt.layout import Version

OFFERED = 32


class Outcome(IntEnum):
    """How an attempt went; the worst of all ranks counts."""

    MISFIT = 0
    REFUSED = 1
    GOOD = 2


class Agreement(Protocol):
    """How ranks agree."""

    spans_nodes: bool
    """Whether each rank speaks for its own shard, so that the folder need not hold all of them."""

    def newest(self, versions: Sequence[Version]) -> Version | None:
        """The newest version that every rank offers."""

    def worst(self, outcome: Outcome) -> Outcome:
        """The worst outcome of all ranks."""


class Alone:
    """One rank, or ranks whose caller names the version."""

    spans_nodes = False

    def newest(self, versions: Sequence[Version]) -> Version | None:
        return max(versions, default=None)

    def worst(self, outcome: Outcome) -> Outcome:
        return outcome


class Together:
    """The ranks of an initialised process group."""

    spans_nodes = True

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def newest(self, versions: Sequence[Version]) -> Version | None:
        import torch
        import torch.distributed as dist

        offer = torch.full((OFFERED, 2), -1, dtype=torch.int64)
        for index, version in enumerate(sorted(set(versions), reverse=True)[:OFFERED]):
            offer[index] = torch.tensor(version)
        offer = offer.to(self._device())
        offers = [torch.empty_like(offer) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(offers, offer, group=self._group)
        common = set.intersection(*({(int(a), int(b)) for a, b in one.tolist() if b >= 0} for one in offers))
        return max(common, default=None)

    def worst(self, outcome: Outcome) -> Outcome:
        import torch
        import torch.distributed as dist

        value = torch.tensor([int(outcome)], device=self._device())
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group)
        return Outcome(int(value.item()))

    def _device(self) -> str:
        """Where the group's backend takes tensors."""
        import torch.distributed as dist

        backend = str(dist.get_backend(self._group))
        return "cuda" if backend == "nccl" else "cpu"


def default(ranks: int) -> Agreement:
    """By the default process group, when it has exactly the member's ranks."""
    if ranks > 1:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() == ranks:
            return Together()
    return Alone()
