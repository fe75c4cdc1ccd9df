"""Tensor bytes out of open shards into live tensors, each byte proven by a digest after it was copied. A few threads at a time.

`Whole` is a tensor that a shard holds as the target wants it: copied and hashed piece by piece, no memory in between. `Parts` is one that is
pieced together from shards cut another way: only the parts (16 MiB) that hold needed elements are read, proven, and copied out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import torch
from torch.autograd.graph import increment_version

from easyckpt import digest, memory, reshard
from easyckpt.digest import TensorDigest, TensorHash
from easyckpt.errors import Corrupt
from easyckpt.layout import DTYPES, TensorEntry
from easyckpt.reshard import Box
from easyckpt.snapshot import SMALL_BYTES, is_plain_memory
from easyckpt.sources import OpenShard

THREADS = 4
MAPPED_PIECE_BYTES = 512 << 10
"""From memory to memory: what was copied is hashed while it is in the core's own cache (usually 1 or 2 MiB)."""
READ_PIECE_BYTES = 4 << 20
"""From storage or a peer: each piece is a call, or a question and its answer."""
BLOCK_BYTES = 64 << 20


class Whole(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor, held by one shard just so."""

    shard: OpenShard
    """Where it is read from."""
    entry: TensorEntry
    """Which of its tensors."""
    target: torch.Tensor
    """What is filled."""

    @property
    def nbytes(self) -> int:
        return self.entry.nbytes


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor out of several shards' pieces."""

    pieces: tuple[tuple[OpenShard, TensorEntry, Box], ...]
    """Shard, tensor in it, and which part of the whole tensor comes from there."""
    target: torch.Tensor
    """What is filled."""
    box: Box
    """Which part of the whole tensor that is."""

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.target.element_size()


Fill = Whole | Parts


def box_of(entry: TensorEntry) -> Box:
    """Which part of the whole tensor a shard holds."""
    return Box(offsets=entry.global_offsets or (0,) * len(entry.shape), shape=entry.shape)


Advance = Callable[[int], None]
"""Hears of bytes as they are done, from any thread."""


def read_all(fills: Sequence[Fill], advance: Advance | None = None, *, sharing: int = 1) -> int:
    """The bytes that were read. Raises Corrupt, Torn or StorageError; the targets may be half filled then. A tensor asked for twice is read once.

    `sharing`: processes that do the same now on these cores, this one among them.
    """
    unique = list({(_key(fill), fill.target.data_ptr(), fill.target.stride()): fill for fill in fills}.values())
    unique.sort(key=lambda fill: -fill.nbytes)
    # They are written by address, which autograd and whoever goes by the counter would not see.
    increment_version([fill.target for fill in unique])
    threads = min(THREADS, len(os.sched_getaffinity(0)) // sharing, len(unique))
    if threads <= 1:
        return _read_lot(unique, advance)
    with ThreadPoolExecutor(threads, thread_name_prefix="easyckpt-restore") as pool:
        lots = [pool.submit(_read_lot, unique[start::threads], advance) for start in range(threads)]
        return sum(lot.result() for lot in lots)


def _key(fill: Fill) -> object:
    return fill.entry.offsets if isinstance(fill, Whole) else tuple(box for _, _, box in fill.pieces)


def _read_lot(lot: Sequence[Fill], advance: Advance | None) -> int:
    read_bytes = 0
    mapped: dict[int, int] = {}
    """Where the tensor bytes of each shard lie in memory; 0 for one that is read."""
    with torch.no_grad():
        for fill in lot:
            if isinstance(fill, Whole):
                if id(fill.shard) not in mapped:
                    view = fill.shard.view()
                    mapped[id(fill.shard)] = memory.address_of(view) if view is not None else 0
                _read_whole(fill, mapped[id(fill.shard)])
                read_bytes += fill.nbytes
            else:
                for shard, entry, box in fill.pieces:
                    for block in reshard.blocks(box, box_of(entry), DTYPES[entry.dtype][0], BLOCK_BYTES):
                        found, nbytes = _read_block(shard, entry, block)
                        fill.target[block.slices(fill.box)].copy_(found)
                        read_bytes += nbytes
            if advance is not None:
                advance(fill.nbytes)
    return read_bytes


def _read_whole(fill: Whole, mapped: int) -> None:
    shard, entry, target = fill.shard, fill.entry, fill.target
    plain = is_plain_memory(target)
    held = target if plain else torch.empty(entry.shape, dtype=target.dtype)
    begin, nbytes = entry.offsets[0], entry.nbytes
    address = held.data_ptr()
    block = memory.block_at(address, nbytes)
    if mapped and nbytes <= MAPPED_PIECE_BYTES:
        copy = memory.copy if nbytes > SMALL_BYTES else memory.copy_small
        copy(address, mapped + begin, nbytes)
        found = TensorDigest(digest.digest_bytes(block))
    else:
        found = _read_pieces(shard, block, begin, mapped, address)
    if found != (entry.digest, entry.parts):
        raise _bad(shard, entry)
    if not plain:
        target.copy_(held)


def _read_pieces(shard: OpenShard, block: memoryview, begin: int, mapped: int, address: int) -> TensorDigest:
    running = TensorHash()
    piece_bytes = MAPPED_PIECE_BYTES if mapped else READ_PIECE_BYTES
    for at in range(0, len(block), piece_bytes):
        piece = block[at : at + piece_bytes]
        if mapped:
            memory.copy(address + at, mapped + begin + at, len(piece))
        else:
            shard.read_into(piece, begin + at)
        running.update(piece)
    return running.finish()


def _read_block(shard: OpenShard, entry: TensorEntry, box: Box) -> tuple[torch.Tensor, int]:
    """A part of a stored tensor as a strided view of the fewest proven bytes that hold it, and how many those are."""
    width = DTYPES[entry.dtype][0]
    inside = box_of(entry)
    first, last = reshard.element_span(box, inside)
    begin, end = first * width, last * width
    if entry.parts:
        begin = begin // digest.PART_BYTES * digest.PART_BYTES
        end = min(-(-end // digest.PART_BYTES) * digest.PART_BYTES, entry.nbytes)
    else:
        begin, end = 0, entry.nbytes
    held = torch.empty(end - begin, dtype=torch.uint8)
    block = memory.block_at(held.data_ptr(), end - begin)
    shard.read_into(block, entry.offsets[0] + begin)
    for at in range(0, end - begin, digest.PART_BYTES):
        want = entry.parts[(begin + at) // digest.PART_BYTES] if entry.parts else entry.digest
        if digest.digest_bytes(block[at : at + digest.PART_BYTES]) != want:
            raise _bad(shard, entry)
    elements = held.view(getattr(torch, entry.dtype))
    return elements.as_strided(box.shape, reshard.strides(inside.shape), first - begin // width), end - begin


def _bad(shard: OpenShard, entry: TensorEntry) -> Exception:
    where = f"{shard.where}: tensor {entry.name!r}"
    return shard.explain(Corrupt(f"{where} does not match its digest; this copy is not used, another is tried"))
