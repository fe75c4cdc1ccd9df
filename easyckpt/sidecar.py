"""The engine's own helper process where no agent is: it flushes what the trainer seals, at low priority, and outlives the trainer's death.

The trainer writes a word a line to its standard input ("sealed", "close"); it answers with events as JSON lines. When the trainer is gone,
however it went, the newest whole step is flushed, then it ends. While nothing is to be flushed it reads the memory again (see `scrub`). It holds no torch, so a flush takes no memory and no lock of the trainer's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

import msgspec

from easyckpt import progress, shm
from easyckpt.errors import Corrupt, EasyckptError
from easyckpt.events import Event, Events, Listener
from easyckpt.flush import Flusher
from easyckpt.layout import Version
from easyckpt.parts import PartFlusher
from easyckpt.progress import Progress
from easyckpt.scrub import Damage, Scrubber
from easyckpt.storage import list_manifests

NICENESS = 10
IDLE_SECONDS = 30.0
AGAIN_SECONDS = 0.1
OTHERS_SECONDS = 60.0
"""How long the last step may wait for the other ranks."""
READ_SECONDS = 5.0
WATCH_SECONDS = 5.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the helper works on."""

    folder: str
    """Of the segments."""
    storage: str
    """Where to flush to."""
    member: str
    """Whose segments are removed at a clean end."""
    role: str
    """Which role's steps are flushed."""
    ranks: int
    """Of the member, on whatever node."""
    keep: int
    """Checkpoints to keep."""
    keep_every: int | None
    """Steps whose multiples are kept for ever."""
    parent: int
    """The trainer."""
    here: int | None = None
    """Ranks of the member on this node, where others are elsewhere."""


def ranks_here(rank: int, ranks: int) -> tuple[bool, int | None]:
    """Whether this rank flushes for its node, and how many ranks are there where not all are, as torchrun's variables tell."""
    told = os.environ
    if told.get("WORLD_SIZE") != str(ranks) or not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= set(told):
        return rank == 0, None
    here = int(told["LOCAL_WORLD_SIZE"])
    return told["LOCAL_RANK"] == "0", here if here < ranks else None


class Sidecar:
    """The trainer's end: starts the helper, tells it words, hands its events on. Restarts it when it died."""

    def __init__(self, settings: Settings, listener: Listener) -> None:
        self._settings = settings
        self._listener = listener
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> bool:
        """True if it had to be started. One that cannot be started is told as a flush that failed, and tried again at the next word."""
        if self.is_alive():
            return False
        self._release()
        package_root = str(Path(__file__).resolve().parent.parent)
        paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "easyckpt.sidecar", msgspec.json.encode(self._settings).decode()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # Ctrl-C in the terminal is the trainer's; the last flush goes on
            )
        except OSError as error:
            text = f"the flushing helper cannot be started: {error}. Memory holds the newest step and training goes on"
            self._listener(Event(kind="flush_failed", text=text, tier="storage"))
            return False
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="easyckpt-events", daemon=True)
        self._reader.start()
        return True

    def tell(self, word: str) -> bool:
        """False when the helper is gone. One that is stopped, with a full pipe, has words enough for when it goes on: nobody waits for it."""
        if self._process is None or self._process.stdin is None:
            return False
        try:
            os.write(self._process.stdin.fileno(), word.encode() + b"\n")
        except BlockingIOError:
            return True
        except (BrokenPipeError, ValueError):
            return False
        return True

    def close(self, timeout_seconds: float) -> bool:
        """Lets it finish and end; False if it is still at it, which it then finishes alone (it keeps its `pid`), or died."""
        process = self._process
        if process is None:
            return True
        self.tell("close")
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        self._release()
        return process.returncode == 0

    def _release(self) -> None:
        """Closes the pipes of a helper that has ended, after its last words were read."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(READ_SECONDS)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        out = process.stdout
        if out is None:
            return
        with contextlib.suppress(ValueError):  # closed under us at the end
            for line in out:
                # What a library printed is no word of the helper's, and must not end the reading of what follows.
                with contextlib.suppress(msgspec.MsgspecError):
                    self._hand_on(msgspec.json.decode(line, type=Event))

    def _hand_on(self, event: Event) -> None:
        try:
            self._listener(event)
        except Exception:  # a listener is the user's and may raise anything; the words that follow must be read
            logging.getLogger("easyckpt").exception("on_event failed for %s", event.kind)


def run(settings: Settings) -> None:
    """The helper's life."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    events = Events(_tell_trainer)
    scrubber = Scrubber(Path(settings.folder), lambda damage: events.emit(_damaged(damage)))
    flusher = _make_flusher(settings, events, scrubber)
    _look_around(Path(settings.folder), events)
    scrubber.start()
    threading.Thread(target=_watch, args=(flusher.progress, events), name="easyckpt-watch", daemon=True).start()
    closing = False
    for word in _words(settings.parent, lambda: AGAIN_SECONDS if flusher.is_waiting else IDLE_SECONDS):
        closing = word == "close"
        if _flush_all(flusher, scrubber) and flusher.newest is not None and word:
            # Another writer may have been faster: the trainer hears what is there, whoever brought it.
            lineage, step = flusher.newest
            events.emit(Event(kind="flush_found", lineage=lineage, step=step, tier="storage"))
    # Whatever the interval: the newest state must not depend on this node's memory any longer.
    _flush_all(flusher, scrubber, marked_only=False)
    give_up_at = time.monotonic() + OTHERS_SECONDS
    while (flusher.is_waiting or _others_follow(settings, flusher.newest)) and time.monotonic() < give_up_at:
        time.sleep(AGAIN_SECONDS)
        _flush_all(flusher, scrubber, marked_only=False)
    scrubber.close()
    if closing:
        _remove_own(settings, events, flusher.disputed)


def _make_flusher(settings: Settings, events: Events, scrubber: Scrubber) -> Flusher:
    folder, storage, role = Path(settings.folder), settings.storage, settings.role
    make = Flusher if settings.here is None else partial(PartFlusher, here=settings.here)
    return make(
        folder, storage, role=role, keep=settings.keep, keep_every=settings.keep_every, events=events, scrubber=scrubber
    )


def _look_around(folder: Path, events: Events) -> None:
    """What a run that was killed left behind and nobody can use goes; what is not ours is named and left alone."""
    removed = shm.reclaim(folder)
    if removed:
        text = f"memory of killed processes was freed: {', '.join(path.name for path in removed)}"
        events.emit(Event(kind="reclaimed", text=text, tier="shm"))
    strange = shm.strangers(folder)
    if strange:
        text = f"files that are no segments lie in {folder}: {', '.join(strange)}; they are left alone"
        events.emit(Event(kind="strangers_found", text=text, tier="shm"))


def _flush_all(flusher: Flusher, scrubber: Scrubber, *, marked_only: bool = True) -> bool:
    """All there is now. False after a failure, which was told as an event; the next word tries again."""
    good = True
    with scrubber.resting(), flusher.progress.under_way():
        while True:
            try:
                if flusher.flush_newest(marked_only=marked_only) is None:
                    return good
            except Corrupt:
                good = False  # that step is passed over: an older one is better than none
            except (EasyckptError, OSError):
                return False


def _watch(flushing: Progress, events: Events) -> None:
    """On a thread of its own, since the other one is where the storage has it."""
    while True:
        time.sleep(min(WATCH_SECONDS, progress.STALLED_SECONDS))
        if text := flushing.news(time.monotonic(), progress.STALLED_SECONDS):
            events.emit(Event(kind="flush_stalled", text=text, tier="storage"))


def _words(parent: int, patience_seconds: Callable[[], float]) -> Iterator[str]:
    """What the trainer says, until "close", the end of the pipe or of the trainer (whose children may hold the pipe open)."""
    pidfd = -1
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(parent)
    pending = b""
    while True:
        ready, _, _ = select.select([0, pidfd] if pidfd >= 0 else [0], [], [], patience_seconds())
        if 0 in ready:
            block = os.read(0, 4096)
            *lines, pending = (pending + block).split(b"\n")
            # Several words at once mean the same as the last of them.
            if lines:
                yield lines[-1].decode()
            if not block or b"close" in lines:
                return
        elif pidfd in ready or pidfd < 0:
            return
        else:
            yield ""  # now and then by itself: a failed flush is tried again, an older one adopted


def _others_follow(settings: Settings, flushed: Version | None) -> bool:
    """Whether a step that storage lacks is sealed by some ranks of this node, while others of it are still at work on it."""
    held: dict[int, Version] = {}
    folder = Path(settings.folder)
    for name in shm.segment_names(folder):
        if name.member == settings.member and not name.peer and (version := shm.peek(folder / str(name))) is not None:
            held[name.rank] = max(version, held.get(name.rank, version))
    newest = max(held.values(), default=None)
    if newest is None or (flushed is not None and newest <= flushed):
        return False
    late = [rank for rank in range(settings.ranks) if held.get(rank) != newest]
    return any(shm.living_writer(folder, f"{settings.member}.r{rank}") is not None for rank in late)


def _remove_own(settings: Settings, events: Events, disputed: Collection[Version]) -> None:
    """At a clean end no memory stays behind that is on storage, whoever brought it there and whoever sealed it."""
    folder = Path(settings.folder)
    try:
        stored = [record.version for record in list_manifests(settings.storage, settings.role)]
    except (EasyckptError, OSError):
        stored = []  # then nothing goes
    staying = []
    for name in shm.segment_names(folder):
        if name.member != settings.member or name.peer:
            continue
        version = shm.peek(folder / str(name))
        if version not in disputed and may_be_removed(
            version, stored, is_being_written=shm.living_writer(folder, name.stem) is not None
        ):
            with contextlib.suppress(FileNotFoundError):
                (folder / str(name)).unlink()
        elif version is not None:
            staying.append(f"{name} (step {version[1]})")
    if staying:
        text = f"storage has nothing as new as {', '.join(staying)} in {folder}: they stay in memory"
        events.emit(Event(kind="housekeeping_failed", text=text, tier="shm"))
    with contextlib.suppress(OSError):
        folder.rmdir()


def may_be_removed(version: Version | None, stored: Collection[Version], *, is_being_written: bool) -> bool:
    """Whether a segment may go at a clean end: storage has it or a newer one; one that is not sealed, when nobody writes it."""
    if version is None:
        return not is_being_written
    return bool(stored) and version <= max(stored)


def _damaged(damage: Damage) -> Event:
    lineage, step = damage.version
    return Event(kind="segment_damaged", text=damage.text, lineage=lineage, step=step, tier=damage.tier)


def _tell_trainer(event: Event) -> None:
    with contextlib.suppress(BrokenPipeError, OSError):
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Settings))
