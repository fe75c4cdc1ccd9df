"""How a tensor was at its save, kept to see whether it is still so when it is copied and at the optimizer's gate.

In host memory by its digest, on a device by a sum over its bits, made where it lies: that tells a tensor that moved, and proves no more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from easyckpt.cuda import Lane, word_sum
from easyckpt.digest import TensorDigest
from easyckpt.snapshot import Leaf, source_digest


class Proof(NamedTuple):
    """Of one tensor that is copied later."""

    leaf: Leaf
    """The tensor."""
    digest: TensorDigest | None
    """In host memory: of its bytes."""
    bits: torch.Tensor | None
    """On a device: the sum, as the training stream computes it."""

    @property
    def name(self) -> str:
        return self.leaf.entry.name

    def holds_in(self, lane: Lane) -> bool:
        """Whether a tensor on a device is as it was, by the time its copy is done."""
        return self.bits is None or lane.sum_of(self.leaf.tensor) == lane.number(self.bits)

    def holds(self) -> bool:
        """Whether the tensor is as it was, now on the calling thread."""
        if self.bits is not None:
            return bool(word_sum(self.leaf.tensor) == self.bits)
        return source_digest(self.leaf.tensor) == self.digest


def prove(leaf: Leaf) -> Proof:
    """On the training thread, at the save."""
    if leaf.tensor.is_cuda:
        return Proof(leaf, None, word_sum(leaf.tensor))
    return Proof(leaf, source_digest(leaf.tensor), None)
