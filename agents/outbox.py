"""Reports that must reach the master: ordered, numbered, on disk in the node's folder, kept until acknowledged.

One file of framed records (length, crc32, payload). The first is the header: the outbox's own id and the number up to which
reports were dropped; a restarted agent goes on counting there. A record cut short by a kill ends the file. The file is
rewritten when most of it is acknowledged. Bound: beyond `limit` waiting reports, news that comes again or that nobody must act on
(findings, suspicions, moved snapshots) is refused and counted; what happened to members is always kept, there cannot be much without a master's orders.
"""

import contextlib
import os
import struct
import uuid
import zlib
from collections import deque
from pathlib import Path

import msgspec

from aimaster.wire import codec
from aimaster.wire.messages import AgentEvent, Found, HangSuspected, Report, SnapshotMoved

_FRAME = struct.Struct("<II")
_REWRITE_BYTES = 1 << 20
_NEWS = (Found, HangSuspected, SnapshotMoved)


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    outbox_id: str
    dropped: int


class Outbox:
    """The queue; used by the event loop alone."""

    def __init__(self, folder: Path, *, limit: int = 10_000) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.limit = limit
        self.refused = 0
        self._path = folder / "reports"
        self._waiting: deque[Report] = deque()
        self.acknowledged = 0
        self.outbox_id = uuid.uuid4().hex
        self._file_bytes = 0
        if not self._load():
            self._rewrite()
        self._next = (self._waiting[-1].sequence if self._waiting else self.acknowledged) + 1
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, event: AgentEvent, at: float) -> bool:
        """Add an event; False when it was refused because the outbox is full."""
        if len(self._waiting) >= self.limit and isinstance(event, _NEWS):
            self.refused += 1
            return False
        report = Report(sequence=self._next, at=at, event=event)
        self._next += 1
        self._waiting.append(report)
        self._append(codec.encode(report))
        return True

    def after(self, sequence: int) -> list[Report]:
        """Waiting reports with a higher number, in order."""
        return [report for report in self._waiting if report.sequence > sequence]

    def acknowledge(self, sequence: int) -> None:
        """Drop all up to this number: the master has journaled them."""
        while self._waiting and self._waiting[0].sequence <= sequence:
            self.acknowledged = self._waiting.popleft().sequence
        if self._file_bytes > _REWRITE_BYTES and len(self._waiting) < self.limit // 10:
            with contextlib.suppress(OSError):  # a full disk: the longer file is as good
                self._rewrite()
                os.close(self._descriptor)
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._descriptor)

    def _append(self, payload: bytes) -> None:
        frame = _FRAME.pack(len(payload), zlib.crc32(payload)) + payload
        try:
            written = os.write(self._descriptor, frame)
        except OSError:  # a full disk: the report still goes out from memory, only a restart of the agent would lose it
            return
        if written == len(frame):
            self._file_bytes += written
        else:
            os.truncate(self._path, self._file_bytes)

    def _load(self) -> bool:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return False
        frames, good_bytes = _frames(data)
        if not frames:
            return False
        try:
            header = codec.decode(frames[0], _Header)
            self._waiting.extend(codec.decode(frame, Report) for frame in frames[1:])
        except msgspec.MsgspecError:  # written by another version: start over under a new id
            self._waiting.clear()
            return False
        self.outbox_id, self.acknowledged = header.outbox_id, header.dropped
        if good_bytes < len(data):
            os.truncate(self._path, good_bytes)
        self._file_bytes = good_bytes
        return True

    def _rewrite(self) -> None:
        records = [codec.encode(_Header(outbox_id=self.outbox_id, dropped=self.acknowledged))]
        records += [codec.encode(report) for report in self._waiting]
        data = b"".join(_FRAME.pack(len(record), zlib.crc32(record)) + record for record in records)
        fresh = self._path.with_suffix(".new")
        fresh.write_bytes(data)
        fresh.replace(self._path)
        self._file_bytes = len(data)


def _frames(data: bytes) -> tuple[list[bytes], int]:
    """The whole records at the start of `data`, and how many bytes they take."""
    frames: list[bytes] = []
    at = 0
    while at + _FRAME.size <= len(data):
        length, check = _FRAME.unpack_from(data, at)
        payload = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(payload) < length or zlib.crc32(payload) != check:
            break
        frames.append(payload)
        at += _FRAME.size + length
    return frames, at
