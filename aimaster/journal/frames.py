"""The bytes of a journal: frames, encoded and decoded without I/O.

    magic 4 | length u32 | sequence u64 | durable u64 | checksum u64 | payload        little-endian

The checksum is XXH3-64 over the header before it and the payload. `durable` is the highest sequence that was fsynced when the
frame was written: a broken frame followed by a whole one that says "you were durable" is damage; otherwise it is the torn
tail of an append nobody was told of. Damage to the very last durable group cannot be told from a torn tail.
"""

import struct
from collections.abc import Iterator
from typing import Final

import msgspec
import xxhash

HEADER: Final = struct.Struct("<4sIQQQ")
UNSIGNED: Final = struct.Struct("<Q")
RECORD: Final = b"\xa7JR1"
SNAPSHOT: Final = b"\xa7JS1"
MARK: Final = b"\xa7J"
MAX_PAYLOAD_BYTES: Final = 1 << 30


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One record as it lies in the file."""

    sequence: int
    """Counts from 1 over the life of the journal."""
    durable: int
    """Highest sequence known durable when this was written."""
    snapshot: bool
    """True: replay starts here, everything before is summed up in it."""
    payload: bytes
    end: int
    """Offset of the first byte after the frame."""


def encode_frame(payload: bytes, *, sequence: int, durable: int, snapshot: bool = False) -> bytes:
    """Return the frame's bytes."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        msg = f"a journal record of {len(payload)} bytes is over the limit of {MAX_PAYLOAD_BYTES}"
        raise ValueError(msg)
    magic = SNAPSHOT if snapshot else RECORD
    head = HEADER.pack(magic, len(payload), sequence, durable, 0)[:-8]
    return b"".join((head, UNSIGNED.pack(_checksum(head, payload)), payload))


def decode_frame(data: bytes | memoryview, offset: int) -> Frame | None:
    """Return the whole and intact frame at `offset`, None when there is none."""
    if offset + HEADER.size > len(data):
        return None
    magic, length, sequence, durable, checksum = HEADER.unpack_from(data, offset)
    start = offset + HEADER.size
    if magic not in (RECORD, SNAPSHOT) or length > MAX_PAYLOAD_BYTES or start + length > len(data):
        return None
    payload = bytes(data[start : start + length])
    if checksum != _checksum(bytes(data[offset : start - 8]), payload):
        return None
    return Frame(sequence=sequence, durable=durable, snapshot=magic == SNAPSHOT, payload=payload, end=start + length)


def decode_frames(data: bytes | memoryview, first: int) -> Iterator[Frame]:
    """Yield the frames `first`, `first + 1`, … up to the first byte that is no whole next frame."""
    offset, sequence = 0, first
    while (frame := decode_frame(data, offset)) is not None and frame.sequence == sequence:
        yield frame
        offset, sequence = frame.end, sequence + 1


def may_be_cut_short(data: bytes) -> bool:
    """Whether these bytes can be the beginning of a first frame whose append never ended; anything else at the start is damage."""
    if data.count(0) == len(data):
        return True  # a file that grew, and whose pages a power cut took
    if not data.startswith((RECORD[: len(data)], SNAPSHOT[: len(data)])):
        return False
    if len(data) < HEADER.size:
        return True
    _, length, sequence, durable, _ = HEADER.unpack_from(data)
    return bool(sequence == 1 and durable == 0 and HEADER.size + length > len(data))


def was_durable(data: bytes, offset: int, sequence: int) -> bool:
    """Tell whether a whole frame at or after `offset` says that record `sequence`, unreadable at `offset`, had been durable."""
    at = data.find(MARK, offset)
    while at >= 0:
        frame = decode_frame(data, at)
        if frame is not None and frame.durable >= sequence:
            return True
        at = data.find(MARK, at + 1 if frame is None else frame.end)
    return False


def _checksum(head: bytes, payload: bytes) -> int:
    digest = xxhash.xxh3_64(head)
    digest.update(payload)
    return digest.intdigest()
