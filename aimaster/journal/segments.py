"""The files of a journal folder: which segment counts, what of it is whole, and how a new one begins.

    FOLDER/lock                          flock of the writer, with its pid
    FOLDER/00000000000000000001.journal  the open segment, named after its first sequence

Only the newest segment counts. Any but the first of a journal's life is born whole (written aside, fsynced, renamed), begins
with a snapshot, and makes those before it needless; they are removed after the rename.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from aimaster.journal.errors import JournalDamagedError
from aimaster.journal.frames import Frame, decode_frames, may_be_cut_short, was_durable

SUFFIX: Final = ".journal"
ASIDE: Final = ".aside"


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """What a segment holds."""

    path: Path
    first: int
    """Sequence of its first frame."""
    last: int
    """Sequence of its last whole frame; `first - 1` when it has none."""
    base: int
    """Offset after its snapshot; 0 when it has none."""
    end: int
    """Offset after the last whole frame."""
    torn_bytes: int
    """Bytes after it, of an append that never ended."""


def segment_path(folder: Path, first: int) -> Path:
    """Path of the segment whose first frame is `first`."""
    return folder / f"{first:020d}{SUFFIX}"


def newest_segment(folder: Path) -> Path | None:
    """The segment that counts; None in an empty folder."""
    return max(folder.glob(f"*{SUFFIX}"), default=None)


def remove_older(folder: Path, keep: Path) -> None:
    """Remove segments before `keep` and anything half made."""
    for path in sorted([*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{ASIDE}")]):
        if path != keep:
            path.unlink(missing_ok=True)


def measure(path: Path, data: bytes) -> Extent:
    """Tell what of a segment's bytes is whole; raises JournalDamagedError when what is broken is no torn tail."""
    first = int(path.name.removesuffix(SUFFIX))
    last, end, base = first - 1, 0, 0
    for frame in decode_frames(data, first):
        last, end = frame.sequence, frame.end
        if frame.snapshot:
            base = frame.end
    if not end and data and first == 1 and not may_be_cut_short(data):
        raise JournalDamagedError(path, 0, 1, nothing_readable=not was_durable(data, 0, 1))
    born_broken = first > 1 and base == 0
    if born_broken or (end < len(data) and was_durable(data, end, last + 1)):
        raise JournalDamagedError(path, end, last + 1)
    return Extent(path=path, first=first, last=last, base=base, end=end, torn_bytes=len(data) - end)


def read_frames(folder: Path) -> Iterator[Frame]:
    """Yield the frames of a journal that may be in use, from its newest snapshot on; changes nothing, takes no lock, ignores a torn tail."""
    for looks_left in (2, 1, 0):
        path = newest_segment(folder)
        if path is None:
            return
        try:
            data = path.read_bytes()
            extent = measure(path, data)
        except (FileNotFoundError, JournalDamagedError):
            # The writer may have compacted, or cut back a failed write, under our eyes.
            if not looks_left:
                raise
            continue
        yield from decode_frames(data[: extent.end], extent.first)
        return


def write_all(descriptor: int, data: bytes, offset: int) -> None:
    """Write every byte at `offset`; a short write is followed by the error that caused it."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Make the names in the folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
