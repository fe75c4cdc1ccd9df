"""The engine's own helper process where no agent is: it flushes what the trainer seals, at low priority, and outlives the trainer's death.

The trainer writes a word a line to its standard input ("sealed", "close"); it answers with events as JSON lines. When the trainer is gone,
however it went, the newest whole step is flushed, then it ends. It holds no torch, so a flush takes no memory and no lock of the trainer's.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from easyckpt import shm
from easyckpt.errors import EasyckptError
from easyckpt.events import Event, Events, Listener
from easyckpt.flush import Flusher
from easyckpt.parts import PartFlusher

NICENESS = 10
IDLE_SECONDS = 30.0
AGAIN_SECONDS = 0.1
OTHERS_SECONDS = 60.0
"""How long the last step may wait for the ranks of other nodes."""
READ_SECONDS = 5.0


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
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="easyckpt-events", daemon=True)
        self._reader.start()
        return True

    def tell(self, word: str) -> bool:
        """False when the helper is gone."""
        if self._process is None or self._process.stdin is None:
            return False
        try:
            self._process.stdin.write(word.encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return False
        return True

    def close(self, timeout_seconds: float) -> bool:
        """Lets it finish and end; False if it is still at it, which it then finishes alone."""
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
        return True

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
                self._listener(msgspec.json.decode(line, type=Event))


def run(settings: Settings) -> None:
    """The helper's life."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    events = Events(_tell_trainer)
    flusher = _make_flusher(settings, events)
    _look_around(Path(settings.folder), events)
    closing = False
    for word in _words(settings.parent, lambda: AGAIN_SECONDS if flusher.is_waiting else IDLE_SECONDS):
        closing = word == "close"
        if _flush_all(flusher) and flusher.newest is not None and word:
            # Another writer may have been faster: the trainer hears what is there, whoever brought it.
            lineage, step = flusher.newest
            events.emit(Event(kind="flush_found", lineage=lineage, step=step, tier="storage"))
    # Whatever the interval: the newest state must not depend on this node's memory any longer.
    done = _flush_all(flusher, marked_only=False)
    give_up_at = time.monotonic() + OTHERS_SECONDS
    while flusher.is_waiting and time.monotonic() < give_up_at:
        time.sleep(AGAIN_SECONDS)
        done = _flush_all(flusher, marked_only=False)
    if done and closing and not flusher.is_waiting:
        _remove_own(Path(settings.folder), settings.member)


def _make_flusher(settings: Settings, events: Events) -> Flusher:
    folder, storage, role = Path(settings.folder), settings.storage, settings.role
    keep, keep_every = settings.keep, settings.keep_every
    if settings.here is None:
        return Flusher(folder, storage, role=role, keep=keep, keep_every=keep_every, events=events)
    return PartFlusher(folder, storage, here=settings.here, role=role, keep=keep, keep_every=keep_every, events=events)


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


def _flush_all(flusher: Flusher, *, marked_only: bool = True) -> bool:
    """All there is now. False after a failure, which was told as an event; the next word tries again."""
    try:
        while flusher.flush_newest(marked_only=marked_only) is not None:
            pass
    except (EasyckptError, OSError):
        return False
    return True


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


def _remove_own(folder: Path, member: str) -> None:
    """At a clean end no memory stays behind."""
    for name in shm.segment_names(folder):
        if name.member == member and not name.peer:
            with contextlib.suppress(FileNotFoundError):
                (folder / str(name)).unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def _tell_trainer(event: Event) -> None:
    with contextlib.suppress(BrokenPipeError, OSError):
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=Settings))
