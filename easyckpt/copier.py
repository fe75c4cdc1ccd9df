"""Copies of what one rank seals, to peers, where no agent makes them: by a thread beside training, the newest step only. No torch.

Peers are tried in the order given (`placement.choose_peers` orders them by failure domains) until so many hold a copy; one that does not answer or
refuses is passed over this time. What was overtaken while the wire was busy is not sent. A clean end takes the copies back.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from easyckpt.errors import EasyckptError
from easyckpt.events import Event, Events
from easyckpt.layout import SegmentHeader
from easyckpt.shardserver import Peer
from easyckpt.shardwire import Bandwidth

PATIENCE_SECONDS = 10.0


class Copier:
    """Of one rank."""

    def __init__(
        self, peers: Sequence[Peer], *, copies: int, events: Events, bandwidth: Bandwidth | None = None
    ) -> None:
        if not 1 <= copies <= len(peers):
            raise ValueError(f"{copies} copies need as many peers, and there are {len(peers)}")
        self._peers = tuple(peers)
        self._copies = copies
        self._events = events
        self._bandwidth = bandwidth
        self._changed = threading.Condition()
        self._next: tuple[Path, SegmentHeader] | None = None
        self._busy = False
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="easyckpt-copies", daemon=True)
        self._thread.start()

    def sealed(self, path: Path, header: SegmentHeader) -> None:
        """A newer step is there; takes the place of one that waits."""
        with self._changed:
            self._next = (path, header)
            self._changed.notify_all()

    def settle(self, timeout_seconds: float) -> bool:
        """Until nothing waits or moves; False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: self._next is None and not self._busy, timeout_seconds)

    def close(self, timeout_seconds: float, *, take_back: Sequence[str] = ()) -> None:
        """Ends the thread. `take_back`: file names of segments, one a rank, whose copies nobody needs any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_seconds)
        for peer in self._peers if take_back else ():
            with contextlib.suppress(EasyckptError, OSError, msgspec.MsgspecError):  # one that is gone has nothing
                for name in take_back:
                    peer.drop(name)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._closing)
                if self._next is None:
                    return
                (path, header), self._next, self._busy = self._next, None, True
            try:
                self._spread(path, header)
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _spread(self, path: Path, header: SegmentHeader) -> None:
        done = 0
        for peer in self._peers:
            if done == self._copies:
                return
            started = time.monotonic()
            try:
                nbytes = peer.push(path, expected=header, bandwidth=self._bandwidth, patience_seconds=PATIENCE_SECONDS)
            except FileNotFoundError:
                return  # overwritten or removed: a newer one follows
            except (EasyckptError, OSError, msgspec.MsgspecError) as error:
                text = f"{peer.address[0]}:{peer.address[1]} took no copy of step {header.step}: {error}"
                self._tell(header, Event(kind="copy_failed", text=text))
                continue
            done += 1
            self._tell(header, Event(kind="copy_sent", nbytes=nbytes, seconds=time.monotonic() - started))

    def _tell(self, header: SegmentHeader, event: Event) -> None:
        self._events.emit(msgspec.structs.replace(event, lineage=header.lineage, step=header.step, tier="peer"))
