"""Where the digests of a segment cut its bytes: what can be proven alone. Pure."""

from __future__ import annotations

import msgspec

from easyckpt.digest import PART_BYTES
from easyckpt.layout import SegmentHeader


class Piece(msgspec.Struct, frozen=True):
    """Bytes that have a digest of their own: a tensor, or a part of a large one."""

    begin: int
    end: int
    digest: str
    tensor: str


def pieces(header: SegmentHeader) -> list[Piece]:
    """All bytes of a segment in file order, cut as its digests are."""
    found = []
    for entry in header.tensors:
        begin, end = entry.offsets
        if entry.alias_of or begin == end:
            continue
        cuts = range(begin, end, PART_BYTES) if entry.parts else (begin,)
        for index, at in enumerate(cuts):
            stop = min(at + PART_BYTES, end) if entry.parts else end
            found.append(Piece(at, stop, entry.parts[index] if entry.parts else entry.digest, entry.name))
    return sorted(found, key=lambda piece: piece.begin)
