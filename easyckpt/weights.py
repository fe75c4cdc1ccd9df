"""Weights for readers that must never hold up their writer: no pin, no lock, a proof instead.

The header is read once, the bytes are copied, and each tensor is checked against the digests of that header. If the writer came meanwhile the
digests say so (Torn), and the caller takes the newer snapshot.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import torch

from easyckpt import reader, shm, sources
from easyckpt.errors import Mismatch
from easyckpt.layout import SegmentHeader, TensorEntry
from easyckpt.reader import Whole
from easyckpt.shm import Segment


def read_weights(
    path_or_segment: str | os.PathLike[str] | Segment,
    names: Collection[str] | None = None,
    *,
    prefix: str = "",
    into: dict[str, torch.Tensor] | None = None,
) -> tuple[SegmentHeader, dict[str, torch.Tensor]]:
    """The header and the tensors asked for: those of `names`, or all below `prefix`, whose part of the name is cut off ("model/").

    Tensors found in `into` (by the cut name) are filled in place, others are new. Tied tensors come back as one object.
    Raises Torn when the writer came, Corrupt when the bytes are damaged, Unsealed, Foreign, FileNotFoundError.
    """
    segment = path_or_segment if isinstance(path_or_segment, Segment) else shm.read_segment(Path(path_or_segment))
    chosen = [
        entry
        for entry in segment.header.tensors
        if entry.name.startswith(prefix)
        and (names is None or entry.name in names or entry.name[len(prefix) :] in names)
    ]
    if names is not None and len(chosen) < len(set(names)):
        have = {entry.name[len(prefix) :] for entry in chosen} | {entry.name for entry in chosen}
        raise Mismatch(f"{segment.path} has no tensor {sorted(set(names) - have)} below {prefix!r}")
    given = into or {}
    made: dict[str, torch.Tensor] = {}
    wanted: list[tuple[TensorEntry, torch.Tensor]] = []
    result: dict[str, torch.Tensor] = {}
    for entry in chosen:
        name = entry.name[len(prefix) :]
        root = entry.alias_of or entry.name
        target = given.get(name)
        if target is None:
            target = made.setdefault(root, torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)))
        elif tuple(target.shape) != entry.shape or str(target.dtype) != f"torch.{entry.dtype}":
            raise Mismatch(
                f"{name!r} is {entry.dtype}{list(entry.shape)} in the snapshot, {target.dtype}{list(target.shape)} here"
            )
        wanted.append((entry, target.detach()))
        result[name] = target
    with sources.open_source(
        sources.Source(tier=segment.tier, rank=segment.header.rank, segment=segment), None
    ) as shard:
        reader.read_all([Whole(shard=shard, entry=entry, target=target) for entry, target in wanted])
    return segment.header, result
