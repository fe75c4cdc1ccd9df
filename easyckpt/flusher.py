"""What one rank has marked for storage, and how far its own helper has brought it. Only where no agent flushes.

mark -> the helper is started or woken -> flush_committed | flush_found (perhaps of a newer step) -> no longer awaited
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from easyckpt import parts, shm
from easyckpt.errors import NotReady, StorageError
from easyckpt.events import Event, Events, Kind
from easyckpt.interval import Pace
from easyckpt.layout import Version
from easyckpt.sidecar import Settings, Sidecar
from easyckpt.storage import open_storage

LOOK_SECONDS = 0.5


class Flusher:
    """The helper and what it is asked for. `changed` also guards the owner's failure, which ends a wait."""

    def __init__(
        self,
        settings: Settings,
        *,
        ranks: range,
        changed: threading.Condition,
        events: Events,
        pace: Pace,
        on_failed: Callable[[BaseException], None],
    ) -> None:
        """`ranks`: those whose files this node writes, where it has not all of them."""
        if settings.here is not None:
            parts.forget(open_storage(settings.storage), settings.role, settings.member, ranks)
        self.sidecar = Sidecar(settings, self._hear)
        self._settings = settings
        self._changed = changed
        self._events = events
        self._pace = pace
        self._on_failed = on_failed
        self._marked: list[Version] = []
        self._flushed: Version | None = None
        self._wanted: Version | None = None

    def awaits(self, version: Version | None) -> bool:
        """Whether this version was marked, and neither it nor a newer one is on storage."""
        return version in self._marked

    def mark(self, version: Version) -> None:
        """A sealed snapshot is to go to storage."""
        with self._changed:
            self._wanted = version
            self._marked.append(version)
        self._wake()

    def wait(self, give_up_at: float, failed: Callable[[], bool]) -> None:
        """Until the newest marked one is on storage, or something failed. Raises NotReady at the deadline (monotonic)."""
        with self._changed:
            while not self._is_done() and not failed():
                left = give_up_at - time.monotonic()
                if left <= 0:
                    raise NotReady(f"step {self._wanted} is sealed in memory, but not on storage yet")
                self._changed.wait(min(left, LOOK_SECONDS))
                if not self.sidecar.is_alive():
                    self._wake()

    def close(self, seconds: float) -> bool:
        """Let the helper bring the last one, free what is on storage, and end; False when it goes on by itself after that time, or died."""
        give_up_at = time.monotonic() + seconds
        done = False
        for _ in range(2):  # the second time where the helper had died, which only the first tells
            if self._is_in_memory():
                self.sidecar.start()  # also where nothing was marked as yet
            done = self.sidecar.close(max(0.0, give_up_at - time.monotonic()))
            if done or self.sidecar.pid is not None:
                break
        if not done:
            pid = self.sidecar.pid
            text = f"the flush goes on in process {pid}" if pid is not None else "the flushing helper died"
            self._say("housekeeping_failed", self._wanted, text=f"{text}; memory holds the newest step")
        return done

    def _is_in_memory(self) -> bool:
        names = shm.segment_names(Path(self._settings.folder))
        return any(name.member == self._settings.member and not name.peer for name in names)

    def _is_done(self) -> bool:
        return self._wanted is None or (self._flushed is not None and self._flushed >= self._wanted)

    def _wake(self) -> None:
        if self.sidecar.start() and self._flushed is not None:
            self._say("housekeeping_failed", self._flushed, text="the flushing helper had died; a new one took over")
        self.sidecar.tell("sealed")

    def _hear(self, event: Event) -> None:
        """Runs on the thread that reads the helper's words."""
        if event.kind in ("flush_committed", "flush_found"):
            done = (event.lineage, event.step)
            with self._changed:
                passed = [version for version in self._marked if version < done]
                self._marked = [version for version in self._marked if version > done]
                if event.kind == "flush_committed":
                    self._pace.saw_flush(event.seconds)
                self._flushed = max(self._flushed or (0, 0), done)
                self._changed.notify_all()
            for lineage, step in passed:
                text = f"step {event.step} went to storage in its place"
                self._events.emit(Event(kind="flush_superseded", lineage=lineage, step=step, tier="storage", text=text))
        elif event.kind == "flush_failed":
            self._on_failed(StorageError(event.text))
        self._events.emit(event)

    def _say(self, kind: Kind, version: Version | None, *, text: str) -> None:
        lineage, step = version or (0, 0)
        self._events.emit(Event(kind=kind, lineage=lineage, step=step, text=text))
