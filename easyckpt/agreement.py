"""How the ranks of a member come to restore the same version and to begin the same lineage: by what each of them has, never by what one hopes.

Alone, a rank takes its newest. With torch.distributed each rank offers the versions it could read, and all take the newest that all offer; an
attempt counts only if it worked on all. Where a run begins beside older versions, what any rank knows counts. Small integer tensors are
exchanged, nothing is pickled; the group's own timeout is the deadline.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from xxhash import xxh3_64_intdigest

from easyckpt.layout import Version

if TYPE_CHECKING:
    from torch import Tensor

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
    sharing: int
    """Ranks that are at it on these very cores, as the last offer told."""

    def newest(self, versions: Sequence[Version]) -> Version | None:
        """The newest version that every rank offers."""

    def newest_of_any(self, version: Version | None) -> Version | None:
        """The newest version that any rank knows."""

    def worst(self, outcome: Outcome) -> Outcome:
        """The worst outcome of all ranks."""


class Alone:
    """One rank, or ranks whose caller names the version."""

    spans_nodes = False
    sharing = 1

    def newest(self, versions: Sequence[Version]) -> Version | None:
        return max(versions, default=None)

    def newest_of_any(self, version: Version | None) -> Version | None:
        return version

    def worst(self, outcome: Outcome) -> Outcome:
        return outcome


class Together:
    """The ranks of an initialised process group."""

    spans_nodes = True
    sharing = 1

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def newest(self, versions: Sequence[Version]) -> Version | None:
        import torch

        offer = torch.full((1 + OFFERED, 2), -1, dtype=torch.int64)
        offer[0, 0] = _cores_mark()
        for index, version in enumerate(sorted(set(versions), reverse=True)[:OFFERED]):
            offer[1 + index] = torch.tensor(version)
        offers = self._of_all(offer)
        self.sharing = sum(one[0, 0].item() == _cores_mark() for one in offers)
        common = set.intersection(*({(int(a), int(b)) for a, b in one[1:].tolist() if b >= 0} for one in offers))
        return max(common, default=None)

    def newest_of_any(self, version: Version | None) -> Version | None:
        import torch

        known = [tuple(one.tolist()) for one in self._of_all(torch.tensor(version or (-1, -1)))]
        return max((one for one in known if one >= (0, 0)), default=None)

    def worst(self, outcome: Outcome) -> Outcome:
        import torch
        import torch.distributed as dist

        value = torch.tensor([int(outcome)], device=self._device())
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._group)
        return Outcome(int(value.item()))

    def _of_all(self, mine: Tensor) -> list[Tensor]:
        import torch
        import torch.distributed as dist

        mine = mine.to(self._device())
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(every, mine, group=self._group)
        return [one.cpu() for one in every]

    def _device(self) -> str:
        """Where the group's backend takes tensors."""
        import torch.distributed as dist

        backend = str(dist.get_backend(self._group))
        return "cuda" if backend == "nccl" else "cpu"


@functools.cache
def _cores_mark() -> int:
    """Equal for processes that run on the same cores of one machine; 62 bits."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return xxh3_64_intdigest(f"{file.read()}{sorted(os.sched_getaffinity(0))}".encode()) >> 2


def default(ranks: int) -> Agreement:
    """By the default process group, when it has exactly the member's ranks."""
    if ranks > 1:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() == ranks:
            return Together()
    return Alone()
