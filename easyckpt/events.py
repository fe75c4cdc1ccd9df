"""What the engine did, as records: core code emits, adapters turn them into logs and counters.

Nothing is configured or registered on import. Without a listener of the user's, events go to the standard logger "easyckpt" and are counted.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal

import msgspec

Kind = Literal[
    "save_sealed",
    "save_skipped",
    "save_failed",
    "save_waited",
    "save_exposed",
    "tensor_moved",
    "protect_refused",
    "begun_anew",
    "flush_committed",
    "flush_found",
    "flush_failed",
    "flush_superseded",
    "flush_stalled",
    "interval_chosen",
    "copy_sent",
    "copy_failed",
    "copy_received",
    "copy_resumed",
    "copy_found",
    "copy_refused",
    "restored",
    "tier_refused",
    "segment_lost",
    "segment_damaged",
    "retained",
    "reclaimed",
    "strangers_found",
    "housekeeping_failed",
]
_LEVELS: dict[str, int] = {
    "save_skipped": logging.WARNING,
    "save_exposed": logging.INFO,
    "save_failed": logging.ERROR,
    "begun_anew": logging.WARNING,
    "tensor_moved": logging.WARNING,
    "protect_refused": logging.WARNING,
    "flush_failed": logging.ERROR,
    "flush_superseded": logging.INFO,
    "flush_stalled": logging.ERROR,
    "interval_chosen": logging.INFO,
    "copy_failed": logging.WARNING,
    "copy_refused": logging.WARNING,
    "restored": logging.INFO,
    "tier_refused": logging.WARNING,
    "segment_lost": logging.WARNING,
    "segment_damaged": logging.ERROR,
    "reclaimed": logging.INFO,
    "strangers_found": logging.WARNING,
    "housekeeping_failed": logging.WARNING,
}


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened."""

    kind: Kind
    """A stable word, for counters."""
    text: str = ""
    """A sentence for people."""
    lineage: int = 0
    """Of the version it is about."""
    step: int = 0
    """Of the version it is about."""
    tier: str = ""
    """shm, peer or storage."""
    nbytes: int = 0
    """Bytes that were moved."""
    seconds: float = 0.0
    """How long it took."""


Listener = Callable[[Event], None]


class Events:
    """Counts events and hands them on. Listeners run on the thread that emits and must not block."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        with self._lock:
            return self._counts.copy()

    def emit(self, event: Event) -> None:
        with self._lock:
            self._counts[event.kind] += 1
        if self._listener is not None:
            self._listener(event)
        else:
            log(event)


def log(event: Event, logger: logging.Logger | None = None) -> None:
    """The default listener."""
    (logger or logging.getLogger("easyckpt")).log(
        _LEVELS.get(event.kind, logging.DEBUG),
        "%s: %s (lineage %d, step %d)",
        event.kind,
        event.text,
        event.lineage,
        event.step,
    )
