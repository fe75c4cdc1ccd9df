"""What can go wrong with a journal.

JournalError
├── JournalHeldError       another process has it
├── JournalDamagedError    a record that was durable is no longer readable
├── JournalClosedError     used after close
└── NotDurableError        this append was not kept, those before it were; try again later
    ├── JournalFullError       no space (ENOSPC, EDQUOT, EFBIG)
    └── JournalFailedError     the device failed (EIO and the like)
"""

import errno
from pathlib import Path
from typing import Final

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class JournalError(Exception):
    """Base of all."""


class JournalHeldError(JournalError):
    """Another process holds the journal."""

    def __init__(self, folder: Path, holder_pid: int | None) -> None:
        who = f"process {holder_pid}" if holder_pid else "another process"
        super().__init__(
            f"the journal {folder} is in use by {who}; nothing was changed; stop that process or use another run folder"
        )
        self.folder = folder
        self.holder_pid = holder_pid


class JournalDamagedError(JournalError):
    """A record is unreadable although it had been durable, or nothing at all of a file can be read."""

    def __init__(self, segment: Path, offset: int, sequence: int, *, nothing_readable: bool = False) -> None:
        what = (
            f"nothing of {segment} can be read: it does not begin as a journal does"
            if nothing_readable
            else f"record {sequence} at byte {offset} of {segment} is damaged, and whole records follow it"
        )
        super().__init__(
            f"{what}; nothing was changed; "
            f"restore the file from a copy, or move the folder away to start without its history"
        )
        self.segment = segment
        self.offset = offset
        self.sequence = sequence


class JournalClosedError(JournalError):
    """The journal was closed."""


class NotDurableError(JournalError):
    """The append was not kept; the file was cut back to its last durable record, so later appends work once the storage does."""

    def __init__(self, segment: Path, error: OSError) -> None:
        super().__init__(f"could not write {segment}: {error.strerror}; the record was not kept; {self.advice}")
        self.segment = segment
        self.errno = error.errno

    advice = "try again"


class JournalFullError(NotDurableError):
    """No space for the record."""

    advice = "free space on that file system (or raise its quota) and it goes on by itself"


class JournalFailedError(NotDurableError):
    """The device refused the record."""

    advice = "look at the device's kernel messages; it goes on by itself if the device does"


def not_durable(segment: Path, error: OSError) -> NotDurableError:
    """Name the failure of a write or fsync."""
    return JournalFullError(segment, error) if error.errno in FULL else JournalFailedError(segment, error)
