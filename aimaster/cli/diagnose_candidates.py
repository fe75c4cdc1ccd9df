"""Which lines are new in this attempt: reads the logs once more when no sign explains how the job ended.

Earlier attempts lie in folders or files numbered by attempt (torchrun's attempt_0, rotated train.log.1), or in the same file before the line of a
restart. Where there is none, the beginning of each log stands for the time in which all was well. What is read is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Final

from aimaster.catalogue.scan import LogScan
from aimaster.catalogue.templates import Piece, new_lines
from aimaster.cli.diagnose_inputs import Source, open_sources
from aimaster.wire.health import Evidence

LEARNT_BYTES: Final = 8 * 1024 * 1024
"""Of each log, from its beginning."""
ALL_LEARNT_BYTES: Final = 64 * 1024 * 1024
END_BYTES: Final = 64 * 1024
"""The end of a log that is searched for new lines."""

_ATTEMPT = re.compile(r"(?:attempt|restart|incarnation|retry|try|run)[_-]?(\d+)(?=[/._-]|$)", re.IGNORECASE)
_ROTATED = re.compile(r"\.(?:log|out|err|txt)\.(\d+)(?:\.\w+)?$")


def candidates(paths: tuple[str, ...], scans: Sequence[LogScan]) -> tuple[Evidence, ...]:
    """New lines of all logs, with low confidence."""
    by_file = {(scan.file, scan.bytes_read): scan for scan in scans}
    newest = max((_attempt(scan.file) for scan in scans), default=0)
    pieces, left = [], ALL_LEARNT_BYTES
    for source in open_sources([path for path in paths if path != "-"], BytesIO(), []):
        head, tail, size = _ends(source, min(left, LEARNT_BYTES))
        scan = by_file.get((source.name or source.root, size)) or by_file.get(
            (f"{source.root.rstrip('/')}/{source.name}", size)
        )
        if scan is not None:
            left -= len(head)
            pieces.append(_piece(scan, head, tail, size, newest))
    if "-" in paths:
        pieces += [_piece(scan, scan.head, scan.tail, scan.bytes_read, newest) for scan in scans if scan.file == "-"]
    return tuple(new_lines(pieces))


def _attempt(name: str) -> int:
    """The number of the attempt a log belongs to; rotated logs are the older, the higher their number."""
    numbers = _ATTEMPT.findall(name)
    rotated = _ROTATED.search(name)
    return int(numbers[-1]) if numbers else -int(rotated[1]) if rotated else 0


def _ends(source: Source, learnt: int) -> tuple[bytes, bytes, int]:
    """The beginning and the end of a log, and its size."""
    head, tail, size = bytearray(), b"", 0
    try:
        if source.size > learnt + END_BYTES:  # a plain file: what lies between is not read again
            with Path(source.root, source.name).open("rb", buffering=0) as file:
                begin = file.read(learnt)
                file.seek(source.size - END_BYTES)
                return begin, file.read(END_BYTES), source.size
        for chunk in source.chunks:
            size += len(chunk)
            head += chunk[: max(0, learnt - len(head))]
            tail = chunk[-END_BYTES:] if len(chunk) >= END_BYTES else (tail + chunk)[-END_BYTES:]
    except (OSError, EOFError):
        pass  # told already, when the log was read the first time
    return bytes(head), tail, size


def _piece(scan: LogScan, head: bytes, tail: bytes, size: int, newest: int) -> Piece:
    """The log cut where its newest attempt begins, else before its end."""
    if _attempt(scan.file) < newest:
        return Piece(scan.node, scan.file, head.splitlines(), ())
    restarts = [hit.offset for hit in scan.hits if hit.sign.id == "python.restart"]
    begin = size - len(tail)
    if restarts:
        cut = restarts[-1]
    elif newest > 0 or _attempt(scan.file) < 0:
        cut = 0  # the earlier attempts lie in other files
    else:
        cut = max(size // 2, size - END_BYTES)
    now = [(at, line) for at, line in _lines(begin, tail) if at >= cut and not scan.catalogue.match(line)]
    return Piece(scan.node, scan.file, head[:cut].splitlines(), now)


def _lines(begin: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    at = begin
    for line in data.splitlines(keepends=True):
        yield at, line
        at += len(line)
