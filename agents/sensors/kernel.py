"""The kernel's log: /dev/kmsg where it can be read, else a file, else the journal. Which of them is read is a reading itself.

kernel.source   the source in use, lines read and lines the ring buffer lost          kernel.lines   new lines, as text

Only what is written from now on is read: lines of an earlier boot or an earlier trouble raise nothing. Records of /dev/kmsg get the
time and the word `kernel:` that a log file has, so that one catalogue serves both. Programs may write to /dev/kmsg; only the
kernel and system daemons are listened to there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Protocol

from agents.tail import Tail
from aimaster.wire.health import Reading, Subject

DEVICE: Final = "/dev/kmsg"
FILES: Final = ("/host/dev/kmsg", "/var/log/kern.log", "/var/log/messages", "/var/log/syslog")
"""A host mount first; a file that nobody has written for a day is no source."""
FRESH_SECONDS: Final = 86400.0
NONE: Final = "none"
MOST_RECORDS: Final = 2000
"""Of one reading; the rest is still there at the next."""
MOST_BYTES: Final = 1 << 20
FACILITIES: Final = (0, 3)
"""kern, daemon."""
_RECORD: Final = re.compile(rb"^(\d+),(\d+),(\d+),[^;]*;(.*)")


class Source(Protocol):
    """Where lines come from."""

    name: str
    lost: int

    def fileno(self) -> int: ...
    def lines(self) -> list[bytes]: ...
    def close(self) -> None: ...


class Kmsg:
    """/dev/kmsg: one record a read, never waits."""

    name = "kmsg"

    def __init__(self, path: str, node: str, *, from_start: bool = False) -> None:
        self.lost = 0
        self._node = node
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not from_start:
            os.lseek(self._descriptor, 0, os.SEEK_END)

    def fileno(self) -> int:
        return self._descriptor

    def lines(self) -> list[bytes]:
        found: list[bytes] = []
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(self._descriptor, 8192)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EPIPE:
                    raise
                self.lost += 1  # the ring buffer went round; the next read is the oldest that is left
                continue
            line = read_record(record.partition(b"\n")[0], self._node)
            if line is not None:
                found.append(line)
        return found

    def close(self) -> None:
        os.close(self._descriptor)


class File:
    """A log file, or a file of records as /dev/kmsg gives them."""

    name = "file"

    def __init__(self, path: str, node: str) -> None:
        self.lost = 0
        self._node = node
        self._rest = b""
        size = Path(path).stat().st_size if Path(path).exists() else 0
        self._tail = Tail(Path(path), size)

    def fileno(self) -> int:
        return -1

    def lines(self) -> list[bytes]:
        *lines, self._rest = (self._rest + b"".join(self._tail.read(MOST_BYTES)))[-2 * MOST_BYTES :].split(b"\n")
        return [line for raw in lines if (line := read_record(raw, self._node))]

    def close(self) -> None:
        self._tail.close()


class Journal:
    """`journalctl --dmesg --follow`, where there is one and it may be read."""

    name = "journal"

    def __init__(self) -> None:
        self.lost = 0
        self._rest = b""
        self._process = subprocess.Popen(
            ["journalctl", "--dmesg", "--follow", "--lines=0", "--output=short-iso", "--no-hostname", "--quiet"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        os.set_blocking(self.fileno(), False)

    def fileno(self) -> int:
        return -1 if self._process.stdout is None or self._process.stdout.closed else self._process.stdout.fileno()

    def lines(self) -> list[bytes]:
        with contextlib.suppress(BlockingIOError):
            piece = os.read(self.fileno(), MOST_BYTES) if self.fileno() >= 0 else b""
            if not piece:  # it ended: nothing is read any more, and the reading says so
                self.close()
            *lines, self._rest = (self._rest + piece)[-2 * MOST_BYTES :].split(b"\n")
            return lines
        return []

    def close(self) -> None:
        self._process.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self.name = NONE


class KernelSensor:
    """New kernel lines, whatever the source."""

    name = "kernel"

    def __init__(self, node: str, *, source: str = "", interval_seconds: float = 1.0) -> None:
        """`source`: a path, `journal`, `none`, or empty for the first that can be read."""
        self.interval_seconds = interval_seconds
        self._node = node
        self._wanted = source
        self._source: Source | None = None
        self._lines = 0
        self._why = ""

    def supported(self) -> str:
        self._source = self._open()
        return "" if self._source is not None else self._why

    def fileno(self) -> int:
        return -1 if self._source is None else self._source.fileno()

    def read(self, now: float) -> list[Reading]:
        if self._source is None:
            return []
        lines = self._source.lines()
        self._lines += len(lines)
        values: dict[str, str | int] = {"source": self._source.name, "lines": self._lines, "lost": self._source.lost}
        readings = [self._reading(now, "kernel.source", values=values)]
        if lines:
            readings.append(self._reading(now, "kernel.lines", text=b"\n".join(lines).decode(errors="replace") + "\n"))
        return readings

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def _reading(self, now: float, kind: str, *, values: dict[str, str | int] | None = None, text: str = "") -> Reading:
        return Reading(
            sensor=self.name,
            kind=kind,
            node=self._node,
            time_seconds=now,
            subject=Subject(node=self._node),
            values=dict(values or {}),
            text=text,
        )

    def _open(self) -> Source | None:
        if self._wanted == NONE:
            self._why = "switched off"
            return None
        reasons = []
        for path in self._paths():
            try:
                return _open_path(path, self._node)
            except OSError as error:
                reasons.append(f"{path}: {error.strerror}")
        if self._wanted in ("", "journal") and shutil.which("journalctl") and _journal_answers():
            return Journal()
        self._why = "; ".join(reasons) or "no kernel log can be read"
        return None

    def _paths(self) -> Iterable[str]:
        if self._wanted == "journal":
            return ()
        if self._wanted:
            return (self._wanted,)
        fresh = [path for path in FILES if _written_after(path, time.time() - FRESH_SECONDS)]
        return (DEVICE, *fresh)


def read_record(raw: bytes, node: str) -> bytes | None:
    """One line of a log from a line or a kmsg record; None for one that is of no interest."""
    if not raw or raw.startswith(b" "):  # a record's key=value lines
        return None
    found = _RECORD.match(raw)
    if found is None:
        return raw
    if int(found[1]) >> 3 not in FACILITIES:
        return None
    at = time.time() - max(0.0, time.monotonic() - int(found[3]) / 1e6)
    stamp = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return f"{stamp} {node} kernel: ".encode() + found[4]


def _open_path(path: str, node: str) -> Source:
    if stat.S_ISCHR(os.stat(path).st_mode):
        return Kmsg(path, node)
    os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    return File(path, node)


def _written_after(path: str, at: float) -> bool:
    try:
        return os.stat(path).st_mtime > at
    except OSError:
        return False


def _journal_answers() -> bool:
    """Whether the journal holds kernel lines and we may read them."""
    try:
        done = subprocess.run(
            ["journalctl", "--dmesg", "--lines=1", "--quiet"], capture_output=True, check=False, timeout=5.0
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and bool(done.stdout.strip())
