"""A durable, append-only record of bytes: what `append` returned from survives a kill and a power cut.

One folder, one writer (a lock held for life names its holder), one open segment of checksummed frames. A torn tail is cut at
opening; damage before it is an error. `compact` starts a new segment with a snapshot and drops what came before it.
The callers give the bytes their meaning.
"""

from aimaster.journal.errors import (
    JournalClosedError,
    JournalDamagedError,
    JournalError,
    JournalFailedError,
    JournalFullError,
    JournalHeldError,
    NotDurableError,
)
from aimaster.journal.frames import Frame
from aimaster.journal.journal import Journal
from aimaster.journal.segments import read_frames

__all__ = [
    "Frame",
    "Journal",
    "JournalClosedError",
    "JournalDamagedError",
    "JournalError",
    "JournalFailedError",
    "JournalFullError",
    "JournalHeldError",
    "NotDurableError",
    "read_frames",
]
