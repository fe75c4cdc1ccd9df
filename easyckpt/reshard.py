"""Which bytes of which shards make up a tensor that is cut another way, pure: boxes in the index space of the whole tensor.

The cuts before and after may be of any kind that gives each rank a box (FSDP, tensor parallel, both, uneven, empty); replicas of a box are read
once. Nothing is guessed: shards that do not cover the target exactly are None, and the caller says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

Extents = tuple[int, ...]


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a tensor."""

    offsets: Extents
    """Where it begins in the whole tensor."""
    shape: Extents
    """How far it reaches."""

    @property
    def volume(self) -> int:
        return math.prod(self.shape)

    def slices(self, inside: Box) -> tuple[slice, ...]:
        """This box as an index into a tensor that holds `inside`."""
        pairs = zip(self.offsets, self.shape, inside.offsets, strict=True)
        return tuple(slice(begin - base, begin - base + extent) for begin, extent, base in pairs)


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one shard contributes."""

    source: int
    """Which of the sources."""
    box: Box
    """Of the whole tensor."""


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share; None if that is nothing."""
    begins = tuple(map(max, a.offsets, b.offsets))
    ends = tuple(min(x + m, y + n) for x, m, y, n in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True))
    shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return Box(offsets=begins, shape=shape) if all(extent > 0 for extent in shape) else None


def cover(target: Box, sources: Sequence[Box]) -> list[Piece] | None:
    """The pieces that fill the target exactly once; None if the sources do not."""
    pieces: list[Piece] = []
    taken: set[tuple[Extents, Extents]] = set()
    for index, source in enumerate(sources):
        shared = overlap(target, source)
        key = (source.offsets, source.shape)
        if shared is not None and key not in taken:
            taken.add(key)
            pieces.append(Piece(source=index, box=shared))
    exact = sum(piece.box.volume for piece in pieces) == target.volume
    disjoint = all(overlap(a.box, b.box) is None for number, a in enumerate(pieces) for b in pieces[:number])
    return pieces if exact and disjoint else None


def blocks(box: Box, inside: Box, width: int, limit_bytes: int) -> list[Box]:
    """The box in slices along its first dimension, each within `limit_bytes` of a shard that holds `inside` (at least one row)."""
    if not box.shape or box.volume == 0:
        return [box]
    row_bytes = strides(inside.shape)[0] * width
    rows = max(1, limit_bytes // row_bytes)
    return [
        Box(offsets=(box.offsets[0] + at, *box.offsets[1:]), shape=(min(rows, box.shape[0] - at), *box.shape[1:]))
        for at in range(0, box.shape[0], rows)
    ]


def strides(shape: Extents) -> Extents:
    """Of a tensor stored row by row, in elements."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def element_span(box: Box, inside: Box) -> tuple[int, int]:
    """First element and one past the last of `box` in a shard that holds `inside`, stored row by row."""
    steps = strides(inside.shape)
    begins = [begin - base for begin, base in zip(box.offsets, inside.offsets, strict=True)]
    first = sum(begin * step for begin, step in zip(begins, steps, strict=True))
    last = sum((begin + extent - 1) * step for begin, extent, step in zip(begins, box.shape, steps, strict=True))
    return first, last + 1
