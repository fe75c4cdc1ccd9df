"""What the exit codes mean, in one place, and the errors that carry them."""

from typing import Final

FINE: Final = 0
FAILED: Final = 1
USAGE: Final = 2
UNKNOWN: Final = 3
DEGRADED: Final = 4
INTERRUPTED: Final = 130

EXIT_CODES: Final[dict[int, str]] = {
    FINE: "fine",
    FAILED: "the job failed, or a check found something bad",
    USAGE: "usage: the command, the file or the folder is wrong; nothing was started",
    UNKNOWN: "unknown: the master cannot be reached",
    DEGRADED: "running but degraded (only with --exit-code)",
    INTERRUPTED: "interrupted; the same command resumes",
}


class CommandError(Exception):
    """Ends the command with a sentence on stderr and an exit code. The sentence says what happened and what to do."""

    exit_code = FAILED


class UsageError(CommandError):
    """The command, the file or the folder is wrong; nothing was started."""

    exit_code = USAGE


class MasterUnreachableError(CommandError):
    """Nobody answers where the master should be."""

    exit_code = UNKNOWN
