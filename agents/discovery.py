"""When it is worth looking for files that match patterns: a notice that something was made, moved or removed below them rings.

Notices come from the kernel (inotify, through watchdog). Network file systems and FUSE tell nobody what others do there: those are
compared at intervals, by a thread of its own. A folder that is not there yet, or cannot be watched, is looked at each second.
"""

import os
import re
import threading
from collections.abc import Sequence
from typing import Final

import structlog
from watchdog.events import (
    DirCreatedEvent,
    DirDeletedEvent,
    DirMovedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver
from watchdog.observers.polling import PollingObserver

from agents.sensors.mounts import mount_of, read_mounts

LOOK_SECONDS: Final = 1.0
COMPARE_SECONDS: Final = 2.0
SAFETY_SECONDS: Final = 30.0
"""Looked at all the same: a queue of notices may overflow, a watched folder may be replaced."""
MOUNTINFO: Final = "/proc/self/mountinfo"
_EVENTS: Final[list[type[FileSystemEvent]]] = [
    DirCreatedEvent, DirDeletedEvent, DirMovedEvent, FileCreatedEvent, FileDeletedEvent, FileMovedEvent,
]  # fmt: skip
"""Writes are no news: the tail sees them."""
_GLOB: Final = re.compile(r"[*?\[]")
log = structlog.get_logger()


class Bell(FileSystemEventHandler):
    """Rung by the observers' threads."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self._rung.set()

    def on_any_event(self, event: FileSystemEvent) -> None:  # noqa: ARG002 - whatever it is, it is looked at
        self._rung.set()

    def heard(self) -> bool:
        """Whether it rang since this was asked last."""
        rung = self._rung.is_set()
        self._rung.clear()
        return rung


class Discovery:
    """One bell for all patterns; used by one thread."""

    def __init__(self, patterns: Sequence[str], *, mountinfo: str = MOUNTINFO) -> None:
        self.watched: dict[str, str] = {}
        """Folders and how they are watched: `notices` or `compared`."""
        self._bases = dict(split(pattern) for pattern in patterns)
        self._mountinfo = mountinfo
        self._bell = Bell()
        self._observers: dict[str, BaseObserver] = {}
        self._refused: set[str] = set()
        self._look_at = 0.0
        self._next_watch = 0.0

    def due(self, now: float) -> bool:
        """Whether to look now (monotonic seconds)."""
        if now >= self._next_watch:
            self._next_watch = now + LOOK_SECONDS
            self._watch()
        blind = len(self.watched) < len(self._bases)
        if not self._bell.heard() and now < self._look_at:
            return False
        self._look_at = now + (LOOK_SECONDS if blind else SAFETY_SECONDS)
        return True

    def close(self) -> None:
        for observer in self._observers.values():
            observer.stop()

    def _watch(self) -> None:
        """Watch folders that have appeared; forget those that are gone."""
        for folder in [folder for folder in self.watched if not os.path.isdir(folder)]:
            del self.watched[folder]  # the observer has let go of it by itself
            self._look_at = 0.0
        for folder, deep in self._bases.items():
            if folder in self.watched or folder in self._refused or not os.path.isdir(folder):
                continue
            mount = mount_of(os.path.realpath(folder), read_mounts(self._mountinfo))
            way = "compared" if mount is not None and mount.remote else "notices"
            try:
                self._observer(way).schedule(self._bell, folder, recursive=deep, event_filter=_EVENTS)
            except OSError as error:  # no watches left, or not ours to read
                log.warning("folder_not_watched", folder=folder, error=str(error))
                self._refused.add(folder)
                continue
            self.watched[folder] = way
            self._look_at = 0.0  # what was made before the watch began

    def _observer(self, way: str) -> BaseObserver:
        if way not in self._observers:
            self._observers[way] = PollingObserver(timeout=COMPARE_SECONDS) if way == "compared" else Observer()
            self._observers[way].start()
        return self._observers[way]


def split(pattern: str) -> tuple[str, bool]:
    """The folder that all matches of a pattern lie in, and whether they may lie deeper."""
    parts = pattern.split("/")
    plain = next((number for number, part in enumerate(parts) if _GLOB.search(part)), len(parts) - 1)
    return "/".join(parts[:plain]) or ("/" if pattern.startswith("/") else "."), plain < len(parts) - 1
