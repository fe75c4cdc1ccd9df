"""What the node's logs say, for the master's diagnosis of all nodes together: a picture of each log, sent again when it has changed.

A picture is small (what the scan has kept, never the log), and the newest of a log replaces the one before; of a log that only goes on,
only how far it has come is sent. Bounded by the size of a pulse: what has no room waits for the next. Nothing is lost by a cut line: on a new
connection all are sent again, those of members that have ended too.
"""

import time
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from aimaster.catalogue.kept import Kept, join, keep, keep_steps
from aimaster.catalogue.scan import LogScan
from aimaster.wire import codec
from aimaster.wire.messages import LogPicture

STEPS_SECONDS = 2.0
"""Between two words on how far a log has come, or on what it says again and again."""
PULSE_BYTES = 256 << 10
BYTES_PER_SECOND = 64 << 10
"""A large picture is sent less often."""
MOST_ENDED = 64


class Followed(Protocol):
    """A log that is being followed."""

    @property
    def scan(self) -> LogScan | None: ...

    @property
    def past(self) -> Kept | None:
        """What an earlier scan of it has kept."""


class _Sent(msgspec.Struct, kw_only=True):
    mark: tuple[int, ...]
    repeats: int
    bytes_read: int
    at: float
    whole_at: float
    pause_seconds: float


class LogPictures:
    """Used by the event loop alone."""

    def __init__(self, followed: Callable[[], Iterable[Followed]], clock: Callable[[], float] = time.monotonic) -> None:
        self._followed = followed
        self._clock = clock
        self._ended: dict[str, Kept] = {}
        self._connection = -1
        self._sent: dict[str, _Sent] = {}
        self._ended_sent: set[str] = set()

    def end(self, kept: Kept) -> None:
        """The last word of a log that is followed no more; a new log of its name replaces it."""
        self._ended.pop(kept.file, None)
        self._ended[kept.file] = kept
        self._ended_sent.discard(kept.file)
        while len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def fresh(self, connection: int) -> tuple[LogPicture, ...]:
        """What the master at the other end of this connection does not know yet."""
        if connection != self._connection:
            self._connection = connection
            self._sent.clear()
            self._ended_sent.clear()
        found: list[LogPicture] = []
        room = PULSE_BYTES
        for name in [name for name in self._ended if name not in self._ended_sent]:
            if room > 0:
                picture = LogPicture(file=name, whole=codec.encode(self._ended[name]))
                self._ended_sent.add(name)
                self._sent.pop(name, None)
                found.append(picture)
                room -= len(picture.whole)
        for one in self._followed():
            if one.scan is None or room <= 0:
                continue
            picture_now = self._picture(one.scan, one.past)
            if picture_now is not None:
                self._ended.pop(picture_now.file, None)
                found.append(picture_now)
                room -= len(picture_now.whole)
        return tuple(found)

    def _picture(self, scan: LogScan, past: Kept | None) -> LogPicture | None:
        now, sent = self._clock(), self._sent.get(scan.file)
        if sent is not None and sent.bytes_read == scan.bytes_read:
            return None
        if not scan.bytes_read and past is None:
            return None
        mark = (id(scan), len(scan.hits), len(scan.blocks), sum(block.lines for block in scan.blocks[-4:]))
        repeats = sum(hit.count for hit in scan.hits)
        pause = 0.0
        if sent is not None and mark == sent.mark:
            pause = STEPS_SECONDS
            if repeats == sent.repeats:
                if now - sent.at < STEPS_SECONDS:
                    return None
                sent.bytes_read, sent.at = scan.bytes_read, now
                return LogPicture(file=scan.file, steps=codec.encode(keep_steps(scan)))
        if sent is not None and now - sent.whole_at < max(pause, sent.pause_seconds):
            return None  # nor how far it has come: that would tell of words that are not told yet
        whole = codec.encode(join(past, keep(scan)))
        self._sent[scan.file] = _Sent(
            mark=mark, repeats=repeats, bytes_read=scan.bytes_read, at=now, whole_at=now,
            pause_seconds=len(whole) / BYTES_PER_SECOND,
        )  # fmt: skip
        return LogPicture(file=scan.file, whole=whole)
