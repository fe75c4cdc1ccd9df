"""Checksums of a segment, pure: XXH3 of 128 bits as 32 hexadecimal digits.

A tensor of more than one part (16 MiB) has a digest for each part, and its own is the digest of those: any range of a large tensor can be
proven by reading little more than the range. `TensorHash` is fed a tensor's bytes. `StreamCheck` is fed the tensor bytes of a whole segment in
file order, in pieces of any size, and says as soon as a tensor is complete whether it is what its header promised. Peer copy, flush and verify
share it, so that no byte moves unproven.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from xxhash import xxh3_128

from easyckpt.errors import Corrupt

if TYPE_CHECKING:
    from easyckpt.layout import SegmentHeader, TensorEntry

KIND = "xxh3_128"
HEX_LENGTH = 32
BLANK = "0" * HEX_LENGTH
PART_BYTES = 16 << 20


def digest_bytes(block: bytes | bytearray | memoryview) -> str:
    return xxh3_128(block).hexdigest()


def digest_of_digests(pairs: Iterable[tuple[str, str]]) -> str:
    """One digest over (name, digest) pairs in name order: equal on members that hold the same state."""
    whole = xxh3_128()
    for name, digest in sorted(pairs):
        whole.update(f"{name}\0{digest}\n".encode())
    return whole.hexdigest()


class TensorDigest(NamedTuple):
    """What proves one tensor."""

    digest: str
    """Of the whole."""
    parts: tuple[str, ...] = ()
    """Of each 16 MiB; none where one part is all."""


class TensorHash:
    """Hashes one tensor's bytes as they come."""

    def __init__(self) -> None:
        self._part = xxh3_128()
        self._filled_bytes = 0
        self._parts: list[str] = []

    def update(self, block: memoryview) -> None:
        while len(block) > PART_BYTES - self._filled_bytes:
            room = PART_BYTES - self._filled_bytes
            self._part.update(block[:room])
            self._parts.append(self._part.hexdigest())
            self._part.reset()
            self._filled_bytes = 0
            block = block[room:]
        self._part.update(block)
        self._filled_bytes += len(block)

    def finish(self) -> TensorDigest:
        """The result; the hash is as new afterwards."""
        last = self._part.hexdigest()
        parts = (*self._parts, last) if self._parts else ()
        self._part.reset()
        self._filled_bytes = 0
        self._parts = []
        return TensorDigest(digest_bytes("".join(parts).encode()), parts) if parts else TensorDigest(last)


def digest_tensor(block: memoryview) -> TensorDigest:
    if len(block) <= PART_BYTES:
        return TensorDigest(digest_bytes(block))
    whole = TensorHash()
    whole.update(block)
    return whole.finish()


def part_count(nbytes: int) -> int:
    """How many part digests a tensor has: none where one part is all."""
    return 0 if nbytes <= PART_BYTES else -(-nbytes // PART_BYTES)


class StreamCheck:
    """Proves the tensor bytes of one segment while they pass by."""

    def __init__(self, header: SegmentHeader, *, where: str) -> None:
        stored = (entry for entry in header.tensors if not entry.alias_of)
        self._entries: list[TensorEntry] = sorted(stored, key=lambda entry: entry.offsets)
        self._where = where
        self._index = 0
        self._hash = TensorHash()
        self._total_bytes = header.data_bytes
        self.fed_bytes = 0
        self._close_empty()

    def feed(self, block: bytes | bytearray | memoryview) -> None:
        """Takes the next bytes; raises Corrupt at the first tensor that is not what the header says."""
        view = memoryview(block).cast("B")
        if self.fed_bytes + len(view) > self._total_bytes:
            raise Corrupt(f"{self._where} holds more bytes than its header says ({self._total_bytes}); it is not used")
        taken = 0
        while taken < len(view):
            end = self._entries[self._index].offsets[1]
            piece = view[taken : taken + end - self.fed_bytes]
            self._hash.update(piece)
            taken += len(piece)
            self.fed_bytes += len(piece)
            if self.fed_bytes == end:
                self._close_tensor()
                self._close_empty()

    def finish(self) -> None:
        if self.fed_bytes != self._total_bytes:
            raise Corrupt(
                f"{self._where} is cut short: {self.fed_bytes} of {self._total_bytes} tensor bytes; it is not used"
            )

    def _close_tensor(self) -> None:
        entry = self._entries[self._index]
        found = self._hash.finish()
        if found != (entry.digest, entry.parts):
            raise Corrupt(
                f"{self._where}: tensor {entry.name!r} has digest {found.digest}, its header says {entry.digest};"
                " the copy is not used, another tier is tried"
            )
        self._index += 1

    def _close_empty(self) -> None:
        """Tensors of no bytes have nothing to feed: they are complete when their turn comes."""
        while self._index < len(self._entries):
            begin, end = self._entries[self._index].offsets
            if begin != end:
                return
            self._close_tensor()
