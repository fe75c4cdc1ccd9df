"""What the head of a log line tells: when it was written, and by which node, rank, process or GPU.

Times are read from a dozen formats. One that lacks its year or date is kept incomplete (`Stamp`) and completed later by `complete`, from any
complete time of the same collection. Nothing here knows any failure.
"""

from __future__ import annotations

import calendar
import json
import re
from typing import Final, NamedTuple

from aimaster.wire.health import Subject

HEAD_BYTES: Final = 320
"""Times and prefixes stand in the first bytes of a line."""

TAIL_TIME_BYTES: Final = 64
DAY: Final = 86400.0

_MONTHS: Final = {
    name: number for number, name in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)
}
_MONTH = rb"(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_CLOCK = rb"(\d\d):(\d\d):(\d\d)"

_ISO = re.compile(rb"(\d{4})[-/](\d\d)[-/](\d\d)[ T_-]" + _CLOCK + rb"(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?")
_DMESG = re.compile(rb"\w{3} " + _MONTH + rb" +(\d+) " + _CLOCK + rb" (\d{4})")
_MAIL = re.compile(rb"(\d{1,2}) " + _MONTH + rb" (\d{4}) " + _CLOCK + rb"(?: ([+-]\d{4}))?")
_SYSLOG = re.compile(_MONTH + rb" +(\d{1,2}) " + _CLOCK + rb"(?:\.(\d+))?")
_GLOG = re.compile(rb"(?<![\w-])[IWEFC](\d{1,2}?)(\d\d) " + _CLOCK + rb"(?:\.(\d+))?")
_SHORT = re.compile(rb"(?<![\d-])(\d\d)-(\d\d) " + _CLOCK + rb"(?:[.,](\d+))?")
_TIME = re.compile(rb"(?:^|[\s\[(])" + _CLOCK + rb"(?:[.,](\d+))?(?=[\s\]),]|$)")


class Stamp(NamedTuple):
    """A time as far as the line told it."""

    seconds: float
    """Complete: since the epoch. Without year: since the start of 1972 (a leap year). Without date: of the day."""
    missing: str = ""
    """Empty, `year` or `date`."""


def read_stamp(line: bytes) -> Stamp | None:
    """The time a line begins with, or None."""
    head = line[-TAIL_TIME_BYTES:] if line.startswith(b'{"log":"') else line[:HEAD_BYTES]  # there it stands at the end
    found = _ISO.search(head)
    if found:
        year, month, day, hour, minute, second, fraction, zone = found.groups()
        return _stamp(int(year), int(month), int(day), hour, minute, second, fraction, zone)
    found = _DMESG.search(head)
    if found:
        name, day, hour, minute, second, year = found.groups()
        return _stamp(int(year), _MONTHS[name], int(day), hour, minute, second)
    found = _MAIL.search(head)
    if found:
        day, name, year, hour, minute, second, zone = found.groups()
        return _stamp(int(year), _MONTHS[name], int(day), hour, minute, second, None, zone)
    found = _SYSLOG.search(head)
    if found:
        name, day, hour, minute, second, fraction = found.groups()
        return _stamp(None, _MONTHS[name], int(day), hour, minute, second, fraction)
    found = _GLOG.search(head) or _SHORT.search(head)
    if found:
        month, day, hour, minute, second, fraction = found.groups()
        return _stamp(None, int(month), int(day), hour, minute, second, fraction)
    found = _TIME.search(head)
    if found:
        hour, minute, second, fraction = found.groups()
        if int(hour) < 24 and int(minute) < 60:
            return Stamp(_clock(hour, minute, second, fraction), "date")
    return None


def _clock(hour: bytes, minute: bytes, second: bytes, fraction: bytes | None) -> float:
    return int(hour) * 3600.0 + int(minute) * 60.0 + int(second) + (float(b"0." + fraction) if fraction else 0.0)


def _stamp(
    year: int | None,
    month: int,
    day: int,
    hour: bytes,
    minute: bytes,
    second: bytes,
    fraction: bytes | None = None,
    zone: bytes | None = None,
) -> Stamp | None:
    if not (1 <= month <= 12 and 1 <= day <= 31 and int(hour) < 24 and int(minute) < 60 and int(second) < 62):
        return None
    moment = calendar.timegm((year or 1972, month, day, 0, 0, 0)) + _clock(hour, minute, second, fraction)
    if zone and zone != b"Z":
        digits = zone.replace(b":", b"")
        offset = int(digits[1:3]) * 3600 + int(digits[3:5]) * 60
        moment -= offset if digits[:1] == b"+" else -offset
    return Stamp(moment, "" if year else "year")


def complete(stamp: Stamp, near: float) -> float:
    """The stamp's full time, chosen nearest to a time known to lie in the same collection."""
    if not stamp.missing:
        return stamp.seconds
    if stamp.missing == "date":
        day = (near // DAY) * DAY
        return min((day + shift + stamp.seconds for shift in (-DAY, 0.0, DAY)), key=lambda at: abs(at - near))
    _, month, day_of_month, *_ = _utc(stamp.seconds)
    rest = stamp.seconds % DAY
    year = _utc(near)[0]
    choices = []
    for candidate in (year - 1, year, year + 1):
        if month == 2 and day_of_month == 29 and not calendar.isleap(candidate):
            continue
        choices.append(calendar.timegm((candidate, month, day_of_month, 0, 0, 0)) + rest)
    return min(choices, key=lambda at: abs(at - near))


def _utc(seconds: float) -> tuple[int, ...]:
    import time

    return tuple(time.gmtime(seconds))


# ------------------------------------------------------------------------------------------------------------ wrappers

_COLLECTED = re.compile(rb"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) (?:std(?:out|err) [FP] )?")
_COLOUR = re.compile(rb"\x1b\[[\d;]*m")


WRAPPED: Final = frozenset(b"{0123456789\x1b")
"""What a line begins with that may have been wrapped."""


def unwrap(line: bytes) -> bytes:
    """What the program itself printed: without a container runtime's JSON or time and stream before it, and without colours."""
    if line.startswith((b'{"log":"', b'{"stream":"')):
        try:
            text = json.loads(line)["log"]
        except (ValueError, KeyError, TypeError):
            return line
        line = str(text).encode(errors="replace").rstrip(b"\n")
    elif line[:1].isdigit():
        line = _COLLECTED.sub(b"", line, count=1)
    return _COLOUR.sub(b"", line) if b"\x1b[" in line else line


# --------------------------------------------------------------------------------------------------------- who speaks

_RAY = re.compile(
    rb"^\s*(?:\x1b\[\d+m)*\((?:[\w.:<>$-]+,? ?)??(?:rank=(\d+),? ?)?(?:pid=(\d+))?(?:,? ?ip=([\w.:-]+?))?(?:, [^)]*)?\)"
)
_RANK = re.compile(rb"\[[Rr]ank:? ?(\d+)\]|^\[\d+,(\d+)\]<std|\bRank (\d+)\]|\[task (\d+)\]|^ {0,3}(\d{1,5}): ")
_NCCL = re.compile(rb"(?:^|\s)([A-Za-z][\w.-]*|\d+\.\d+\.\d+\.\d+):(\d+):\d+ \[(\d+)\] ")
_OMPI = re.compile(rb"^\[([A-Za-z][\w.-]*):(\d+)\] ")
_HOST = re.compile(
    rb"^(?:<\d+>)?(?:"
    + _MONTH
    + rb" +\d+ [\d:.]+|\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)) (?!INFO|WARN|ERR|DEBUG|CRIT|FATAL|TRACE|NOTICE)"
    rb"([\w.-]+) [\w./-]+(?:\[\d+\])?: "
)
_LABEL = re.compile(
    rb"^(?:\[pod/([\w.-]+)/[\w.-]+\] |([A-Za-z][\w.-]*\d) +\| |"
    rb"([A-Za-z][\w.-]*\d[\w.-]*|\d+\.\d+\.\d+\.\d+): (?=\[|Traceback \(|  |[EWIF]\d{4} |\d{4}-\d\d-\d\d|[\w.]+(?:Error|Exception)\b))"
)
"""Put before each line by who joined the logs of many nodes: kubectl logs --prefix, compose, pdsh."""


class Speaker(NamedTuple):
    """Who wrote a line, as far as its prefix says."""

    subject: Subject
    host: str
    """A host name or address that the line claims as its own; empty when it claims none."""


_NOBODY = Speaker(Subject(), "")


def read_speaker(line: bytes) -> Speaker:
    """Rank, process, GPU and host from the usual prefixes."""
    head = line[:HEAD_BYTES]
    rank = pid = gpu = None
    host = b""
    found = _RAY.search(head)
    if found and (found[1] or found[2] or found[3]):
        rank, pid, host = found[1], found[2], found[3] or b""
    named = _RANK.search(head)
    if named:
        rank = next(group for group in named.groups() if group is not None)
    if not host and (found := _LABEL.match(head)):
        host = found[1] or found[2] or found[3]
    if not host:
        found = _NCCL.search(head) or _OMPI.search(head)
        if found:
            host, pid = found[1], found[2]
            gpu = found[3] if found.re is _NCCL else None
        else:
            found = _HOST.search(head)
            if found:
                host = found[2]
    if rank is None and pid is None and gpu is None and not host:
        return _NOBODY
    return Speaker(
        Subject(
            rank=int(rank) if rank else None,
            pid=int(pid) if pid else None,
            gpu=gpu.decode() if gpu else None,
        ),
        host.decode(errors="replace"),
    )


# ---------------------------------------------------------------------------------------------------------- progress

_PROGRESS = re.compile(
    rb"(?<!at )(?<!no )(?<!Skipping )\b(?:global_?step|train_?step|step|iteration|iter)s?\b['\"]?[ ]{0,2}[=:#]?\s{0,12}\[?(\d+)"
    rb"|['\"]epoch['\"]: ([\d.]+)"
    rb"|\bEpoch \[?(\d+)\]?\s?\[\s{0,6}\d+/"
    rb"|\s(\d+)/\d+ \[[\d:]+<[\d:]+"
    rb"|throughput[^\d\n]{0,20}([\d.]+)",
    re.IGNORECASE,
)
_NO_PROGRESS = re.compile(
    rb"(?i)\b(?:error|warn\w*|failed|failure|exception|traceback|timed? ?out|abort\w*|watchdog|overflow|iteration #|exiting)\b|[:=]\s*nan\b"
)


class Progress(NamedTuple):
    """A line that reports a finished step."""

    at: int
    """Where the line begins in its piece of log."""
    number: float
    line: bytes


def may_hold_progress(piece: bytes) -> bool:
    """A cheap look whether reading progress from it is worth while."""
    return any(word in piece for word in (b"step", b"Step", b"iter", b"Iter", b"it/s", b"poch", b"throughput"))


def read_progress(piece: bytes) -> list[Progress]:
    """The progress lines of a piece of log."""
    found = []
    at = 0
    for line in piece.splitlines(keepends=True):
        head = line[:400]
        hit = _PROGRESS.search(head)
        if hit is not None and not _NO_PROGRESS.search(head):
            number = next(group for group in hit.groups() if group is not None).strip(b".")
            found.append(Progress(at, float(number or 0), line.rstrip()))
        at += len(line)
    return found


_RANK_FILE = re.compile(r"(?:^|[/_.-])rank[_-]?(\d+)(?:[./_-]|$)")
_PID_FILE = re.compile(r"(?:worker|python-core-worker)-[0-9a-f]+(?:-[0-9a-f]+)?[-_](\d+)\.")


def speaker_of_file(name: str) -> Subject:
    """What a file's name says of its writer: rank24.log, worker-…-PID.err."""
    rank, pid = _RANK_FILE.search(name), _PID_FILE.search(name)
    return Subject(rank=int(rank[1]) if rank else None, pid=int(pid[1]) if pid else None)
