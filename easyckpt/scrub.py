"""Reads again, by and by, what lies sealed in a folder of segments: memory goes bad, and stray writes happen, while nobody looks. No torch.

A file that nobody has proven for `after_seconds` is read piece by piece, each piece against its digest, whatever is sealed over it meanwhile: what
a save leaves in its slot is proven so, and nothing else proves it. Nothing is pinned: a writer that comes is no damage. It runs in a thread of
the lowest priority, reads RATE_BYTES_PER_SECOND at most, and rests while a flush runs. Damage is told once for each seal; then the segment goes,
unless it may be all that there is (see `may_go`): whoever reads that proves it, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from xxhash import xxh3_128

from easyckpt import layout, shm
from easyckpt.digest import PART_BYTES
from easyckpt.errors import BadSegment, Corrupt, Pinned, Torn
from easyckpt.layout import Version
from easyckpt.pieces import Piece, pieces
from easyckpt.shm import Segment

RATE_BYTES_PER_SECOND = 128 << 20
"""One or two hundredths of a core: a GiB takes it 0.1 to 0.2 s. A node of 200 GiB is through in half an hour."""
AFTER_SECONDS = 300.0
AGAIN_SHARE = 1 / 30
"""Of `after_seconds`: between two looks at the folder, and at a file that could not be read on."""
SLICE_BYTES = PART_BYTES
BLOCK_BYTES = 256 << 10
"""Hashed while it is in the core's own cache."""
TURN_SECONDS = 1.0
LEAST_PRIORITY = 19


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one file."""

    inode: int
    """Which file it is: another one under the same name begins anew."""
    due_at: float
    """When it is to be touched next, monotonic seconds."""
    at: int = 0
    """The next tensor byte to read."""
    opening: bytes = b""
    """Of the snapshot that was read from its first byte on; empty when it was overwritten on the way."""
    damaged: bytes = b""
    """The opening of the snapshot that is damaged."""


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed segment that does not hold what its digests say."""

    name: str
    """File name."""
    member: str
    """Whose snapshot it is."""
    version: Version
    """Which one."""
    tier: str
    """shm or peer."""
    text: str
    """A sentence for people."""


# ----------------------------------------------------------------------------------------------------------- decisions


def noticed(
    watched: Mapping[str, Watched], there: Mapping[str, int], now: float, after_seconds: float
) -> dict[str, Watched]:
    """What to watch, given the files that are there (name to inode): new ones are due when they have lain for that time."""
    return {
        name: watched[name]
        if name in watched and watched[name].inode == inode
        else Watched(inode=inode, due_at=now + after_seconds)
        for name, inode in there.items()
    }


def choose(watched: Mapping[str, Watched], now: float) -> str | None:
    """The file to read on in: the one that has been due longest."""
    due = {name: one.due_at for name, one in watched.items() if one.due_at <= now}
    return min(due, key=lambda name: (due[name], name), default=None)


def may_go(*, peer: bool, writer_lives: bool, others: bool) -> bool:
    """Whether a damaged segment may be removed. A copy: its owner sends it again. An own one: if its writer lives, who will save again, and whole, and
    another sealed one of that rank is there. Else it stays: a restore that finds damage says so; one that finds nothing begins from the start.
    """
    return peer or (writer_lives and others)


# -------------------------------------------------------------------------------------------------------------- action


class _Plan(NamedTuple):
    """What to read of one snapshot: worked out once for all slices, since a header may name thousands of tensors."""

    name: str
    segment: Segment
    prefix_bytes: int
    pieces: list[Piece]


class Scrubber:
    """Watches one folder. `step` by hand, or `start` a thread that does."""

    def __init__(
        self,
        folder: Path,
        on_damaged: Callable[[Damage], None],
        on_proven: Callable[[Segment], None] = lambda _segment: None,
        *,
        after_seconds: float = AFTER_SECONDS,
    ) -> None:
        """The callbacks run on the thread; `on_proven` hears of a snapshot of which every byte was read."""
        self.read_bytes = 0
        self.dropped: set[str] = set()
        """Names of damaged segments that were removed here, until there is another."""
        self._folder = folder
        self._on_damaged = on_damaged
        self._on_proven = on_proven
        self._after = after_seconds
        self._again = after_seconds * AGAIN_SHARE
        self._watched: dict[str, Watched] = {}
        self._look_at = 0.0
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._plan: _Plan | None = None
        self._block = memoryview(bytearray(BLOCK_BYTES))
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="easyckpt-scrub", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(TURN_SECONDS)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Nothing is read meanwhile: a flush has the memory and the processor for itself."""
        with self._turn:
            yield

    def note_proven(self, segment: Segment) -> None:
        """Somebody else has just read every byte against its digests."""
        self._put_off(segment.path.name, time.monotonic() + self._after)

    def suspect(self, segments: Sequence[Segment]) -> None:
        """One of them is damaged, as somebody found who cannot tell which, or where: they are read next."""
        for segment in segments:
            self._put_off(segment.path.name, time.monotonic())
        self._wake.set()

    def is_damaged(self, segment: Segment) -> bool:
        with self._lock:
            known = self._watched.get(segment.path.name)
        return known is not None and known.damaged == segment.opening

    def step(self, now: float) -> float:
        """Reads one slice of what has been due longest, if anything is; returns how many seconds to rest then."""
        with self._lock:
            if now >= self._look_at:
                self._look(now)
            name = choose(self._watched, now)
            one = self._watched[name] if name is not None else None
            next_at = min([self._look_at, *(other.due_at for other in self._watched.values())])
        if name is None or one is None:
            return max(0.0, next_at - now)
        before = self.read_bytes
        known = self._visit(name, one, now)
        with self._lock:
            if known is None:
                self._watched.pop(name, None)
            elif self._watched.get(name) is one:  # else somebody told of it meanwhile
                self._watched[name] = known
        return (self.read_bytes - before) / RATE_BYTES_PER_SECOND

    def _work(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
        rest_seconds = 0.0
        while not self._closing:
            self._wake.wait(rest_seconds)
            self._wake.clear()
            if not self._turn.acquire(timeout=TURN_SECONDS):
                continue
            try:
                rest_seconds = self.step(time.monotonic())
            finally:
                self._turn.release()

    def _look(self, now: float) -> None:
        there = _files(self._folder)
        self._watched = noticed(self._watched, there, now, self._after)
        self.dropped = {name for name in self.dropped if name not in there}
        self._look_at = now + self._again

    def _put_off(self, name: str, due_at: float) -> None:
        """Until then, and from the first byte on."""
        with self._lock:
            if name not in self._watched:
                self._look(time.monotonic())
            if name in self._watched:
                self._watched[name] = msgspec.structs.replace(self._watched[name], due_at=due_at, at=0, opening=b"")

    def _visit(self, name: str, one: Watched, now: float) -> Watched | None:
        """What is known of the file afterwards; None when it is gone."""
        later = msgspec.structs.replace(one, due_at=now + self._again)
        path = self._folder / name
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            opening = os.pread(fd, layout.PEEK_BYTES, 0)
            try:
                return self._read_on(fd, path, opening, one, now)
            except Corrupt as error:
                if os.pread(fd, layout.PEEK_BYTES, 0) != opening:
                    return later  # its writer came
                return self._found(fd, path, opening, later, error)
            except (BadSegment, OSError):
                return later  # it is being written, or no segment of ours
        finally:
            os.close(fd)

    def _read_on(self, fd: int, path: Path, opening: bytes, one: Watched, now: float) -> Watched:
        """Raises Corrupt with `at` as it was: the same piece is read next time."""
        plan = self._plan_of(fd, path, opening)
        began = opening if one.at == 0 else one.opening if one.opening == opening else b""
        at, end = one.at, one.at + SLICE_BYTES
        for piece in plan.pieces[bisect_left(plan.pieces, at, key=_begin) :]:
            if piece.begin >= end:
                break
            self._prove(fd, plan.prefix_bytes, piece)
            at = piece.end
        if not shm.is_same(fd, plan.segment):
            raise Torn(f"{path} was overwritten while it was read")
        if plan.pieces and one.at < at < plan.pieces[-1].end:
            return msgspec.structs.replace(one, at=at, opening=began, damaged=b"")
        if began:
            self._on_proven(plan.segment)
        return msgspec.structs.replace(one, at=0, due_at=now + self._after, opening=b"", damaged=b"")

    def _plan_of(self, fd: int, path: Path, opening: bytes) -> _Plan:
        if self._plan is None or (self._plan.name, self._plan.segment.opening) != (path.name, opening):
            segment = shm.segment_of(fd, path)
            self._plan = _Plan(path.name, segment, segment.prefix_bytes, pieces(segment.header))
        return self._plan

    def _prove(self, fd: int, prefix_bytes: int, piece: Piece) -> None:
        """By reading, not by mapping: a file that is cut short or freed meanwhile is a wrong digest, never a signal."""
        hashed = xxh3_128()
        at, end = prefix_bytes + piece.begin, prefix_bytes + piece.end
        while at < end:
            count = os.preadv(fd, [self._block[: min(BLOCK_BYTES, end - at)]], at)
            if count == 0:
                break
            hashed.update(self._block[:count])
            at += count
            self.read_bytes += count
        if hashed.hexdigest() != piece.digest:
            raise Corrupt(
                f"bytes {piece.begin} to {piece.end} of the tensors, in {piece.tensor!r}, changed since the seal"
            )

    def _found(self, fd: int, path: Path, opening: bytes, later: Watched, error: Corrupt) -> Watched | None:
        name = layout.parse_name(path.name)
        version = layout.peek(opening)
        if name is None or version is None:
            return later
        if later.damaged != opening:
            tier = "peer" if name.peer else "shm"
            text = f"{path} is damaged: {error}. Nobody uses it, the next tier serves, and training goes on; if it comes again, test this node's memory"
            self._on_damaged(Damage(name=path.name, member=name.member, version=version, tier=tier, text=text))
        others = any(
            other.stem == name.stem and other != name and shm.peek(self._folder / str(other)) is not None
            for other in shm.segment_names(self._folder)
        )
        writer_lives = shm.living_writer(self._folder, name.stem) is not None
        if may_go(peer=name.peer, writer_lives=writer_lives, others=others) and _drop(fd, path, opening):
            self.dropped = {*self.dropped, path.name}
            return None
        return msgspec.structs.replace(later, damaged=opening)


def _begin(piece: Piece) -> int:
    return piece.begin


def _files(folder: Path) -> dict[str, int]:
    found = {}
    for name in shm.segment_names(folder):
        with contextlib.suppress(FileNotFoundError):
            found[str(name)] = os.stat(folder / str(name), follow_symlinks=False).st_ino
    return found


def _drop(fd: int, path: Path, opening: bytes) -> bool:
    """Removes it, if it still is what was read, and nobody has pinned it (then the next time)."""
    try:
        with shm.locked(fd, str(path)):
            shm.refuse_pinned(path)
            if os.pread(fd, layout.PEEK_BYTES, 0) != opening or os.stat(path).st_ino != os.fstat(fd).st_ino:
                return False
            path.unlink()
            return True
    except (Pinned, FileNotFoundError):
        return False
