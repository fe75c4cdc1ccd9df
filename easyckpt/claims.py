"""Who writes a checkpoint: of all that would flush the same version, one writes and the others let it. No torch.

A claim is a small file `.claim.N` in the checkpoint's folder (`.claimPART.N` for the ranks of one node), made exclusively; the highest N holds. It gives way to N + 1 when its process is
gone (seen on the same machine), or when nothing in the folder has changed for CLAIM_SECONDS by the watcher's own clock. A writer that
wakes up later does no harm: files of a later claim have other names, and only one manifest appears.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from easyckpt import shm
from easyckpt.errors import AlreadyFlushed, BeingFlushed, EasyckptError, StorageError
from easyckpt.progress import Progress

if TYPE_CHECKING:
    from easyckpt.storage import Storage

CLAIM_SECONDS = 60.0
BEAT_SECONDS = 5.0
_NAME = re.compile(r"\.claim(?P<part>[^.]*)\.(?P<number>\d+)")
_alive: set[str] = set()
"""Marks of this process's own claims: a file that could not be removed after its claim had ended holds nobody up."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process beyond doubt, as far as one machine can tell."""

    machine: str
    """Boot and pid namespace: where a pid means something."""
    pid: int
    """Of the process."""
    start: int
    """When it started, in clock ticks since boot."""
    mark: str
    """Which claim of that process it is."""


class Claims:
    """The claims that one flusher makes, and what it has seen of others'."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[object, float]] = {}
        """By folder: what lay in it, and since when on our clock nothing of it changed."""
        self.progress = Progress()
        """Of what is written under them."""

    @contextlib.contextmanager
    def held(self, storage: Storage, folder: str, *, part: str = "") -> Iterator[Claim]:
        """Makes this process the writer of a checkpoint, or of the named part of one. Raises BeingFlushed while another is at it, AlreadyFlushed
        when it is done.
        """
        claim = self._take(storage, folder, part)
        try:
            # Only now: who committed before our claim has removed his.
            if storage.read_manifest(folder) is not None:
                raise AlreadyFlushed(f"{folder} is on storage already; nothing was written")
            yield claim
        finally:
            self._seen.pop(folder, None)
            # A folder that cannot be tidied now is found again by the process that is named in the claim, which is then gone.
            with contextlib.suppress(EasyckptError, OSError):
                claim.end()

    def _take(self, storage: Storage, folder: str, part: str) -> Claim:
        stamps = storage.stamps(folder)
        found = [_NAME.fullmatch(name) for name in stamps]
        numbers = sorted(int(one["number"]) for one in found if one is not None and one["part"] == part)
        following = numbers[-1] + 1 if numbers else 1
        if numbers and not self._has_ended(storage, folder, f".claim{part}.{numbers[-1]}", stamps):
            raise BeingFlushed(f"{folder} is being written by another process; it is looked at again")
        claim = Claim(storage, folder, following, part, self.progress)
        try:
            begun = claim.begin()
        except StorageError:
            storage.remove_empty(folder)  # a full disk had room for that much
            raise
        if not begun:
            raise BeingFlushed(f"{folder} was claimed by another process just now; it is looked at again")
        return claim

    def _has_ended(self, storage: Storage, folder: str, name: str, stamps: dict[str, str]) -> bool:
        try:
            holder = msgspec.json.decode(storage.read_small(folder, name), type=Holder)
        except (msgspec.MsgspecError, FileNotFoundError):
            holder = None  # not written yet, or ended meanwhile: the clock decides
        if holder is not None and holder.machine == _machine():
            is_own = (holder.pid, holder.start) == (os.getpid(), shm.start_time(os.getpid()))
            return holder.mark not in _alive if is_own else shm.start_time(holder.pid) != holder.start
        seen, since = self._seen.get(folder, (None, 0.0))
        now = time.monotonic()
        if seen != stamps:
            self._seen[folder] = (stamps, now)
            return False
        return now - since > CLAIM_SECONDS


class Claim:
    """The right to write one checkpoint."""

    def __init__(self, storage: Storage, folder: str, number: int, part: str, progress: Progress) -> None:
        self.number = number
        self.part = part
        self.mark = secrets.token_hex(8)
        self._storage = storage
        self._folder = folder
        self._beat_at = time.monotonic()
        self._progress = progress

    @property
    def suffix(self) -> str:
        """For names of files, so that a writer who was given up writes into none of ours."""
        return "" if self.number == 1 else f".{self.number}"

    def begin(self) -> bool:
        """False where another was faster."""
        pid = os.getpid()
        holder = Holder(machine=_machine(), pid=pid, start=shm.start_time(pid) or 0, mark=self.mark)
        _alive.add(self.mark)
        begun = False
        try:
            begun = self._storage.create(self._folder, f".claim{self.part}.{self.number}", msgspec.json.encode(holder))
        finally:
            if not begun:
                _alive.discard(self.mark)
        return begun

    def beat(self) -> None:
        """Shows that the writer goes on, also where a file that is being written cannot be seen to grow."""
        self._progress.moved()
        if time.monotonic() - self._beat_at > BEAT_SECONDS:
            self._beat_at = time.monotonic()
            self._storage.create(self._folder, f".beat{self.part}.{self.number}.{int(self._beat_at)}", b"")

    def end(self) -> None:
        """Removes it, with those that it followed and their left-overs once the checkpoint is committed."""
        _alive.discard(self.mark)
        committed = self._storage.read_manifest(self._folder) is not None
        going = [
            name
            for name in self._storage.stamps(self._folder)
            if name == f".claim{self.part}.{self.number}"
            or name.startswith(f".beat{self.part}.{self.number}.")
            or (committed and name.startswith((".claim", ".beat")))
        ]
        self._storage.remove(self._folder, going)
        if not committed:
            self._storage.remove_empty(self._folder)


def _machine() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
