"""Segments on their way in over connections that may be cut: the next connection goes on at the very byte where the last one stopped.

A segment is known by the digest of its header. One connection at a time receives it; one that has stalled gives way to the next. What is here
already is not taken again, nor what a receiver that was killed had taken, as far as it proves itself; what nobody comes back for, or a newer segment of the same rank replaces, is dropped. No torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import msgspec

from easyckpt import layout, shm
from easyckpt.digest import digest_bytes
from easyckpt.errors import BadSegment, Foreign, Pinned
from easyckpt.events import Event, Events
from easyckpt.layout import SegmentHeader, SegmentName
from easyckpt.replica import PEER_SLOTS, Incoming
from easyckpt.shardwire import Answer, Lines, Request, say

PIECE_BYTES = 4 << 20
STALLED_SECONDS = 2.0
SUSPENDED_SECONDS = 120.0
HANDOVER_SECONDS = 5.0
PROVING_SECONDS = 5.0
"""How long the sender may be kept waiting while what an earlier process left here is proven: some ten GiB."""


class _Arrival:
    """One segment that is not whole yet."""

    def __init__(self, stem: str, incoming: Incoming, connection: socket.socket) -> None:
        self.stem = stem
        self.incoming = incoming
        self.connection: socket.socket | None = connection
        """Who brings it now; None after a cut."""
        self.moved_at = time.monotonic()
        """When a byte came last."""


class Arrivals:
    """Of one folder."""

    def __init__(self, folder: Path, events: Events) -> None:
        self._folder = folder
        self._events = events
        self._changed = threading.Condition()
        self._arriving: dict[str, _Arrival] = {}

    def take(self, connection: socket.socket, lines: Lines, request: Request) -> None:
        """Receives one segment and proves it. Raises BadSegment, NoRoom or Pinned (nothing is kept), or OSError: the next try goes on there."""
        name = layout.parse_name(request.name)
        if name is None or not request.prefix_digest:
            raise Foreign(f"{request.name!r} is not the name of a segment; the copy is refused")
        if (header := self._held(name, request)) is not None:
            self._tell("copy_found", header, request.nbytes)
            say(connection, Answer(at=request.nbytes))
            say(connection, Answer(nbytes=request.nbytes))
            return
        arrival = self._claim(name, connection, request)
        try:
            self._receive(arrival, connection, lines, request)
        except OSError:
            with self._changed:
                arrival.connection = None
                self._changed.notify_all()
            raise
        except BaseException as error:
            self._drop(request.prefix_digest)
            self._events.emit(Event(kind="copy_refused", tier="peer", text=str(error)))
            raise
        say(connection, Answer(nbytes=request.nbytes))

    def drop(self, file_name: str) -> list[str]:
        """Removes the sealed copies of one rank that are held here, those that somebody reads excepted; returns their names."""
        name = layout.parse_name(file_name)
        if name is None:
            raise Foreign(f"{file_name!r} is not the name of a segment; nothing is dropped")
        held = shm.pinned_names(self._folder)
        dropped = []
        for slot in range(PEER_SLOTS):
            copy = str(msgspec.structs.replace(name, slot=slot, peer=True))
            # One that is arriving is not sealed, and belongs to who sends it.
            if copy not in held and shm.peek(self._folder / copy) is not None:
                with contextlib.suppress(FileNotFoundError):
                    (self._folder / copy).unlink()
                    dropped.append(copy)
        return dropped

    def close(self) -> None:
        """Drops what is not whole. Call it when no connection is open any more."""
        with self._changed:
            for digest in list(self._arriving):
                self._arriving.pop(digest).incoming.abort()

    def _receive(self, arrival: _Arrival, connection: socket.socket, lines: Lines, request: Request) -> None:
        incoming = arrival.incoming
        if incoming.received_bytes == 0:
            give_up_at = time.monotonic() + PROVING_SECONDS
            incoming.resume(request.prefix_digest, request.prefix_bytes, request.nbytes, give_up_at)
        resumed_at = incoming.received_bytes
        say(connection, Answer(at=resumed_at))
        block = memoryview(bytearray(min(PIECE_BYTES, max(1, request.nbytes - resumed_at))))
        while (left := request.nbytes - incoming.received_bytes) > 0:
            count = lines.receive_some_into(block[: min(left, len(block))])
            incoming.feed(block[:count])
            arrival.moved_at = time.monotonic()
        segment = incoming.commit()
        with self._changed:
            self._arriving.pop(request.prefix_digest, None)
        if resumed_at:
            self._tell("copy_resumed", segment.header, resumed_at)
        self._tell("copy_received", segment.header, segment.nbytes)

    def _claim(self, name: SegmentName, connection: socket.socket, request: Request) -> _Arrival:
        """What a cut left of this segment, or a new start. Raises Pinned while another connection brings it and has not stalled."""
        give_up_at = time.monotonic() + HANDOVER_SECONDS
        with self._changed:
            while True:
                self._forget(name, request.prefix_digest)
                arrival = self._arriving.get(request.prefix_digest)
                if arrival is None:
                    arrival = _Arrival(name.stem, Incoming(self._folder, request.name), connection)
                    self._arriving[request.prefix_digest] = arrival
                    return arrival
                if arrival.connection is None:
                    arrival.connection, arrival.moved_at = connection, time.monotonic()
                    return arrival
                now = time.monotonic()
                if now - arrival.moved_at < STALLED_SECONDS or now > give_up_at:
                    raise Pinned(f"{name.stem} arrives over another connection; try again")
                _cut(arrival.connection)  # its thread finds out and lets go
                self._changed.wait(0.1)

    def _forget(self, name: SegmentName, digest: str) -> None:
        """Drops what was left behind too long ago, and older segments of the same rank that nobody brings any more."""
        now = time.monotonic()
        for other, arrival in list(self._arriving.items()):
            replaced = arrival.stem == name.stem and other != digest
            if arrival.connection is None:
                if replaced or now - arrival.moved_at > SUSPENDED_SECONDS:
                    self._arriving.pop(other).incoming.abort()
            elif replaced and now - arrival.moved_at > STALLED_SECONDS:
                _cut(arrival.connection)

    def _drop(self, digest: str) -> None:
        with self._changed:
            arrival = self._arriving.pop(digest, None)
            if arrival is not None:
                arrival.incoming.abort()
            self._changed.notify_all()

    def _held(self, name: SegmentName, request: Request) -> SegmentHeader | None:
        """The header, where that very segment lies here sealed."""
        for slot in range(PEER_SLOTS):
            path = self._folder / str(msgspec.structs.replace(name, slot=slot, peer=True))
            with contextlib.suppress(BadSegment, OSError):
                segment = shm.read_segment(path)
                with open(path, "rb", buffering=0) as file:
                    prefix = os.pread(file.fileno(), segment.prefix_bytes, 0)
                if segment.nbytes == request.nbytes and digest_bytes(prefix) == request.prefix_digest:
                    return segment.header
        return None

    def _tell(self, kind: str, header: SegmentHeader, nbytes: int) -> None:
        event = {"kind": kind, "tier": "peer", "lineage": header.lineage, "step": header.step, "nbytes": nbytes}
        self._events.emit(msgspec.convert(event, Event))


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
