"""The bytes of a segment, pure: a safetensors file whose metadata carries ours.

    length (8 bytes, little endian, written last: the seal) | JSON header, padded with spaces | tensors, without gaps

The JSON begins with a digest over all bytes before the tensors (its own digits counted as zeros), then the version (lineage, step) at a
place that can be peeked at, then our header. All digests have a fixed width, so the header's length is known before the bytes are.
Any safetensors reader opens the file; dtypes it lacks are stored as U8 with ours in the header. Aliases (tied tensors) are stored once.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from easyckpt import digest
from easyckpt.digest import TensorDigest
from easyckpt.errors import Corrupt, Foreign, Unsealed
from easyckpt.interval import Life

FORMAT = 1
PAGE_BYTES = 4096
CACHE_LINE_BYTES = 64
# safetensors readers refuse a longer header; a length above it is not a length.
HEADER_LIMIT_BYTES = 100_000_000
SUFFIX = ".safetensors"

_LENGTH = struct.Struct("<Q")
UNSEALED = _LENGTH.pack(0)
_DIGEST_KEY = f"easyckpt.{digest.KIND}"
RESERVED_NAME = "__metadata__"
_OPENING = f'{{"{RESERVED_NAME}":{{"{_DIGEST_KEY}":"'.encode()
_DIGEST_AT = _LENGTH.size + len(_OPENING)
_VERSION = re.compile(rb'"easyckpt\.version":"(\d+)\.(\d+)"')
PEEK_BYTES = 256

# torch's name: (bytes of an element, safetensors' name). What safetensors lacks has "" and is stored as U8.
DTYPES: dict[str, tuple[int, str]] = {
    "float64": (8, "F64"),
    "float32": (4, "F32"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e8m0fnu": (1, ""),
    "float8_e4m3fnuz": (1, ""),
    "float8_e5m2fnuz": (1, ""),
    "int64": (8, "I64"),
    "int32": (4, "I32"),
    "int16": (2, "I16"),
    "int8": (1, "I8"),
    "uint64": (8, "U64"),
    "uint32": (4, "U32"),
    "uint16": (2, "U16"),
    "uint8": (1, "U8"),
    "bool": (1, "BOOL"),
    "complex64": (8, ""),
    "complex128": (16, ""),
}

Count = Annotated[int, msgspec.Meta(ge=0)]
Version = tuple[int, int]
"""(lineage, step): the order of snapshots."""


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor of a segment."""

    name: str
    """Path in the state, parts joined with "/" (in a part, ~1 stands for "/" and ~0 for "~")."""
    dtype: str
    """torch's name of the element type, without "torch."."""
    shape: tuple[Count, ...]
    """Shape of what this rank holds."""
    offsets: tuple[Count, Count] = (0, 0)
    """First byte and one past the last, counted from the first tensor byte."""
    digest: str = digest.BLANK
    """Of the bytes, or of the part digests where there are some."""
    parts: tuple[str, ...] = ()
    """Of each 16 MiB of a larger tensor, so that a range can be proven alone."""
    alias_of: str = ""
    """Name of the tensor this one shares all its memory with; it is stored once."""
    global_shape: tuple[Count, ...] | None = None
    """Of the whole tensor, where this rank holds a part of it."""
    global_offsets: tuple[Count, ...] | None = None
    """Where this part begins in the whole tensor."""

    @property
    def nbytes(self) -> int:
        return self.offsets[1] - self.offsets[0]


class Rewind(msgspec.Struct, frozen=True, kw_only=True):
    """A lineage began behind steps of older ones: those above `step` are dead."""

    lineage: Count
    """The lineage that began."""
    step: Count
    """The step it went back to."""


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a segment says of itself."""

    member: str
    """The member whose state this is."""
    role: str
    """Members of one role are replicas: any of them can restore from this."""
    rank: Count
    """Rank inside the member."""
    ranks: Annotated[int, msgspec.Meta(ge=1)]
    """Ranks of the member; a step is whole when all have it."""
    lineage: Count
    """Rises by one when a restore goes back behind a committed step."""
    step: Count
    """Optimizer updates so far."""
    epoch: Count = 0
    """Membership epoch in which it was saved."""
    chain: str = ""
    """Hash chain of the applied (step, batch digest) pairs."""
    flush: bool = False
    """Whether this one is to go to storage."""
    state_digest: str = digest.BLANK
    """Over the tensors' digests in name order; equal on members that are replicas."""
    created_at: float = 0.0
    """Seconds since 1970 at the save."""
    rewinds: tuple[Rewind, ...] = ()
    """Every going back in the history of this state."""
    life: Life = Life()
    """How long the run has trained and how often it was interrupted."""
    tensors: tuple[TensorEntry, ...] = ()
    """In file order, aliases after them."""
    extra: Any = None
    """The state without its tensors, as JSON (see `tree`)."""
    format: int = FORMAT
    """Version of this layout."""

    @property
    def version(self) -> Version:
        return (self.lineage, self.step)

    @property
    def data_bytes(self) -> int:
        return max((entry.offsets[1] for entry in self.tensors), default=0)


class _File(msgspec.Struct):
    """The part of a safetensors header that we read: the index beside it is derived from ours."""

    metadata: dict[str, str] = msgspec.field(name=RESERVED_NAME)


_FILE = msgspec.json.Decoder(_File)
_HEADER = msgspec.json.Decoder(SegmentHeader)


class SegmentName(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a segment's file: MEMBER.rRANK[.peer].sSLOT.safetensors."""

    member: str
    """Of letters, digits, "_" and "-"."""
    rank: int
    """Rank inside the member."""
    slot: int
    """Which of the rank's slots."""
    peer: bool = False
    """A copy held for a member of another node."""

    @property
    def stem(self) -> str:
        """What the slots of one rank have in common: the name of their writer."""
        return f"{self.member}.r{self.rank}{'.peer' if self.peer else ''}"

    def __str__(self) -> str:
        return f"{self.stem}.s{self.slot}{SUFFIX}"


_NAME = re.compile(r"([A-Za-z0-9_-]+)\.r(\d+)(\.peer)?\.s(\d+)\.safetensors")


def parse_name(file_name: str) -> SegmentName | None:
    """None for a file that is no segment."""
    found = _NAME.fullmatch(file_name)
    if found is None:
        return None
    return SegmentName(member=found[1], rank=int(found[2]), slot=int(found[4]), peer=found[3] is not None)


def place(entries: Iterable[TensorEntry]) -> tuple[TensorEntry, ...]:
    """Gives each tensor its bytes, without gaps; aliases follow what they share.

    Those of whole cache lines come first: all of them begin at one, which copies them a tenth faster than from anywhere. Of the others, which are
    small, the widest elements come first, so that each is aligned to its own.
    """
    entries = list(entries)
    stored = [entry for entry in entries if not entry.alias_of]
    sizes = {entry.name: _count(entry.shape) * DTYPES[entry.dtype][0] for entry in stored}
    stored.sort(key=lambda entry: (sizes[entry.name] % CACHE_LINE_BYTES != 0, -DTYPES[entry.dtype][0]))
    placed: dict[str, TensorEntry] = {}
    at = 0
    for entry in stored:
        end = at + sizes[entry.name]
        placed[entry.name] = msgspec.structs.replace(entry, offsets=(at, end))
        at = end
    for entry in entries:
        if entry.alias_of:
            placed[entry.name] = msgspec.structs.replace(entry, offsets=placed[entry.alias_of].offsets)
    return tuple(placed.values())


def with_digests(header: SegmentHeader, digests: Mapping[str, TensorDigest]) -> SegmentHeader:
    """The header with every tensor's digests (by name of what is stored) and the digest of the whole state."""
    tensors = tuple(
        msgspec.structs.replace(entry, digest=found.digest, parts=found.parts)
        for entry in header.tensors
        for found in (digests[entry.alias_of or entry.name],)
    )
    whole = digest.digest_of_digests((entry.name, entry.digest) for entry in tensors)
    return msgspec.structs.replace(header, tensors=tensors, state_digest=whole)


def encode(header: SegmentHeader, prefix_bytes: int | None = None) -> bytes:
    """All bytes before the tensors, the seal included, padded to `prefix_bytes` or to the next page."""
    document = {
        RESERVED_NAME: {
            _DIGEST_KEY: digest.BLANK,
            "easyckpt.version": f"{header.lineage}.{header.step}",
            "format": "pt",
            "easyckpt": msgspec.json.encode(header).decode(),
        },
        **{entry.name: _index_entry(entry) for entry in header.tensors if not entry.alias_of},
    }
    text = msgspec.json.encode(document)
    needed = _LENGTH.size + len(text)
    total = prefix_bytes if prefix_bytes is not None else _pages(needed)
    if needed > total or total - _LENGTH.size > HEADER_LIMIT_BYTES:
        raise ValueError(f"a header of {needed} bytes does not fit into {total} (limit {HEADER_LIMIT_BYTES})")
    prefix = bytearray(_LENGTH.pack(total - _LENGTH.size) + text + b" " * (total - needed))
    prefix[_DIGEST_AT : _DIGEST_AT + digest.HEX_LENGTH] = digest.digest_bytes(prefix).encode()
    return bytes(prefix)


def room_for(header: SegmentHeader) -> int:
    """Bytes to keep before the tensors, so that counters and small state in the header may grow between saves."""
    # Blank digests are left out of the JSON, so the room is measured with full ones.
    full = "f" * digest.HEX_LENGTH
    measured = {entry.name: TensorDigest(full, (full,) * digest.part_count(entry.nbytes)) for entry in header.tensors}
    needed = len(encode(with_digests(header, measured)))
    return _pages(needed + max(PAGE_BYTES // 2, needed // 8))


def prefix_length(first_bytes: bytes | bytearray | memoryview, *, file_bytes: int, where: str) -> int:
    """Bytes before the tensors, from the first eight of the file. Raises Unsealed or Foreign."""
    if file_bytes < _LENGTH.size or len(first_bytes) < _LENGTH.size:
        raise Foreign(f"{where} is too short to be a segment; it is ignored")
    (length,) = _LENGTH.unpack(first_bytes[: _LENGTH.size])
    if length == 0:
        raise Unsealed(f"{where} is not sealed: it is being written, or its writer was killed; it is ignored")
    if length > min(HEADER_LIMIT_BYTES, file_bytes - _LENGTH.size):
        raise Foreign(f"{where} has no valid header length ({length}); it is ignored")
    return _LENGTH.size + int(length)


def decode(raw: bytes | bytearray | memoryview, *, where: str) -> SegmentHeader:
    """The header out of all bytes before the tensors, proven by its digest."""
    prefix = bytearray(raw)
    stated = bytes(prefix[_DIGEST_AT : _DIGEST_AT + digest.HEX_LENGTH])
    if bytes(prefix[_LENGTH.size : _DIGEST_AT]) != _OPENING:
        raise Foreign(f"{where} is not a segment of this engine; it is ignored")
    prefix[_DIGEST_AT : _DIGEST_AT + digest.HEX_LENGTH] = digest.BLANK.encode()
    if digest.digest_bytes(prefix).encode() != stated:
        raise Corrupt(f"{where}: the header does not match its digest; it is ignored, another tier is tried")
    try:
        header = _HEADER.decode(_FILE.decode(memoryview(prefix)[_LENGTH.size :]).metadata["easyckpt"])
    except (msgspec.MsgspecError, KeyError) as error:
        raise Foreign(f"{where} has a header this version cannot read ({error}); it is ignored") from error
    if header.format > FORMAT:
        raise Foreign(f"{where} has format {header.format}, this version reads {FORMAT}: update easyckpt to use it")
    _check_bounds(header.tensors, where)
    return header


def peek(first_bytes: bytes) -> Version | None:
    """(lineage, step) of a sealed segment from its first 256 bytes, unproven; None if unsealed or foreign."""
    if first_bytes[: _LENGTH.size] == UNSEALED or first_bytes[_LENGTH.size : _DIGEST_AT] != _OPENING:
        return None
    found = _VERSION.search(first_bytes)
    return (int(found[1]), int(found[2])) if found else None


def newest_first(versions: Iterable[Version]) -> list[Version]:
    return sorted(set(versions), reverse=True)


def is_dead(version: Version, rewinds: Iterable[Rewind]) -> bool:
    """Whether a later lineage began behind this version."""
    lineage, step = version
    return any(lineage < rewind.lineage and step > rewind.step for rewind in rewinds)


def _index_entry(entry: TensorEntry) -> dict[str, Any]:
    width, code = DTYPES[entry.dtype]
    shape: Sequence[int] = entry.shape if code else (*entry.shape, width)
    return {"dtype": code or "U8", "shape": shape, "data_offsets": entry.offsets}


def _check_bounds(tensors: Sequence[TensorEntry], where: str) -> None:
    """Every tensor has exactly the bytes of its shape, stored ones follow each other without gaps."""
    at = 0
    for entry in sorted((entry for entry in tensors if not entry.alias_of), key=lambda entry: entry.offsets):
        width = DTYPES.get(entry.dtype, (0, ""))[0]
        begin, end = entry.offsets
        if (
            width == 0
            or begin != at
            or end - begin != _count(entry.shape) * width
            or len(entry.parts) not in (0, digest.part_count(end - begin))
        ):
            raise Foreign(f"{where}: tensor {entry.name!r} has impossible bounds or type; the file is ignored")
        at = end
    stored = {entry.name: entry for entry in tensors if not entry.alias_of}
    for entry in tensors:
        if entry.alias_of and (entry.alias_of not in stored or entry.offsets != stored[entry.alias_of].offsets):
            raise Foreign(
                f"{where}: tensor {entry.name!r} shares memory with one that is not there; the file is ignored"
            )


def _count(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
