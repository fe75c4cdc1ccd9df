"""What can go wrong, as one tree. Each message says what happened, what was done, and what the user can do.

EasyckptError
├── Unsupported      a value in the state that a snapshot cannot hold, with its path
├── Mismatch         a snapshot that does not fit the state it should fill
├── NoRoom           memory for the segments is not there (needed, free, how to mend)
├── SaveFailed       a save or flush in the background failed; told on the next call
├── NotReady         a wait ran past its deadline
├── Refused          this machine does not allow an optional way of saving; the reason in words
├── BadSegment       bytes that cannot be used
│   ├── Foreign      not a segment of this engine (or of a newer format)
│   ├── Unsealed     being written, or its writer was killed
│   ├── Corrupt      bytes and digest disagree
│   └── Torn         the writer came while it was read
├── Pinned           a slot that is being copied away
└── StorageError     the flush could not be committed; what was there before is intact
    ├── StorageFull      disk or quota
    ├── StorageDenied    read-only or not permitted
    ├── BeingFlushed     another writer is at the same step
    ├── Disputed         another trainer committed another state as the same step
    └── AlreadyFlushed   another writer committed the same step
"""

# ruff: noqa: N818 - they name what happened; "Error" would be said twenty times

from __future__ import annotations


class EasyckptError(Exception):
    """Any failure of the checkpoint engine."""


class Unsupported(EasyckptError, TypeError):
    """A value that cannot be in a snapshot."""


class Mismatch(EasyckptError):
    """The snapshot and the state to fill differ in names, shapes or types."""


class NoRoom(EasyckptError, MemoryError):
    """The memory for the segments is not there."""

    def __init__(self, message: str, *, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class SaveFailed(EasyckptError):
    """A save or flush failed in the background; raised by the next call of the trainer."""


class NotReady(EasyckptError, TimeoutError):
    """A wait ran past its deadline."""


class Refused(EasyckptError):
    """This machine does not allow an optional way of saving."""


class BadSegment(EasyckptError):
    """Bytes that cannot be used as a snapshot."""


class Foreign(BadSegment):
    """Not a segment of this engine, or of a format it does not know."""


class Unsealed(BadSegment):
    """A segment that is being written, or whose writer was killed."""


class Corrupt(BadSegment):
    """Bytes and digest disagree, or the file is cut short."""


class Torn(BadSegment):
    """The writer came while the segment was read; a newer one will follow."""


class Pinned(EasyckptError):
    """The slot is being copied away, or its writer holds it."""


class StorageError(EasyckptError):
    """The flush could not be committed. The previous checkpoint is intact."""


class StorageFull(StorageError):
    """No space or no quota left."""


class StorageDenied(StorageError):
    """Read-only or not permitted."""


class BeingFlushed(StorageError):
    """Another writer is at the same step; it is looked at again later."""


class Disputed(StorageError):
    """Another trainer of this name committed another state as the same step."""


class AlreadyFlushed(StorageError):
    """Another writer committed the same step; nothing to do."""
