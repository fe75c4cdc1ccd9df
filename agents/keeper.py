"""Owns the node's snapshot memory: which segments lie in it, what of them goes to storage, and how long each is kept.

The memory outlives trainer and agent alike: a restarted agent finds what is sealed and goes on flushing what is marked. Flushing is
done by one thread of low priority. A segment marked for storage is pinned the moment its seal is told, so that the trainer's
next saves leave it; a newer mark lets a waiting older one go. Every failure is told with its reason and tried again.
"""

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from agents import snapshot_findings
from agents.config import Keeping
from aimaster.wire import places
from aimaster.wire.checkpoint import SaveTrouble, SealedNotice, SnapshotPlace, Version
from aimaster.wire.health import Finding
from aimaster.wire.ids import MemberId, NodeId
from aimaster.wire.messages import AgentEvent, Found, SnapshotMoved, SnapshotsDeleted
from easyckpt import flush, layout, shm, storage
from easyckpt.claims import Claims
from easyckpt.errors import AlreadyFlushed, BeingFlushed, EasyckptError, Torn
from easyckpt.manifest import Manifest, folder_name
from easyckpt.shm import Segment
from easyckpt.takeover import take_over

PIN_SECONDS = 600.0
TAKEOVER_SECONDS = 600.0
END_SECONDS = 8.0
LOOK_SECONDS = 0.1
GONE_LOOKS = 3
"""A segment that is missing in so many looks, one a second, was removed and is not being replaced."""
LOW_PRIORITY = 10
log = structlog.get_logger()

_Flushed = tuple[MemberId, Version, Manifest | None]
"""What was flushed; None where somebody else had done so."""


class Keeper:
    """The node's memory folder; its methods are called on the event loop, `_flush_*` on the one thread."""

    def __init__(
        self,
        memory: Path,
        node: NodeId,
        keeping: Keeping,
        report: Callable[[AgentEvent, float], None],
        *,
        retry_seconds: float = 5.0,
    ) -> None:
        self.memory = memory
        self.folder = places.segments(memory)
        self.flushes: dict[str, int] = {"done": 0, "failed": 0, "taken_over": 0}
        self.flush_seconds = 0.0
        """Of the last one."""
        self.sealed = asyncio.Event()
        """Set at every seal; whoever copies clears it."""
        self._node = node
        self._keeping = keeping
        self._report = report
        self._retry_seconds = retry_seconds
        self.flush_trouble = ""
        """Why nothing reaches storage at present."""
        self._claims = Claims()
        self._deleted: list[str] = []
        """Checkpoints that the flush thread removed and nobody was told of yet."""
        self._known: dict[str, tuple[bytes, Segment]] = {}
        self._proven: dict[tuple[str, tuple[int, int]], float] = {}
        """By name and version: when a flush or a copy last read all its bytes against their digests."""
        self._missing: dict[str, int] = {}
        """Sealed segments of own members that are gone, and in how many looks."""
        self._strange: set[str] = set()
        self._pins: dict[tuple[MemberId, Version], list[Path]] = {}
        self._failing: type[Exception] | None = None
        self._wanted = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flush", initializer=_lower_priority)

    def open(self) -> None:
        """Make the folders (mode 0700), or take over what is in them."""
        for folder in (self.memory, self.folder, self.memory / "progress"):
            shm.open_folder(folder)
            folder.chmod(0o700)
        removed = shm.reclaim(self.folder)
        if removed:
            log.info("segments_reclaimed", names=[path.name for path in removed])
        self._wanted.set()
        self.sealed.set()

    # -- what is here ------------------------------------------------------------------------------------------------

    def segments(self) -> list[Segment]:
        """Sealed segments, newest first. A header is read again only when the first bytes, which hold its digest, changed."""
        found: list[Segment] = []
        names = [str(name) for name in shm.segment_names(self.folder)]
        for name in names:
            path = self.folder / name
            try:
                with path.open("rb", buffering=0) as file:
                    opening = file.read(layout.PEEK_BYTES)
                known = self._known.get(name)
                if known is None or known[0] != opening:
                    known = self._known[name] = (opening, shm.read_segment(path))
            except (EasyckptError, OSError):
                self._known.pop(name, None)
                continue
            found.append(known[1])
        for gone in set(self._known) - set(names):
            if self._known.pop(gone)[1].tier == "shm":
                self._missing.setdefault(gone, 0)
        return sorted(found, key=lambda one: (one.header.version, one.tier == "shm"), reverse=True)

    def places(self) -> tuple[SnapshotPlace, ...]:
        return tuple(self.place(segment) for segment in self.segments())

    def note_proven(self, segment: Segment) -> None:
        """All its bytes were just read and proven, here or by who received them."""
        self._proven[segment.path.name, segment.header.version] = time.time()

    def look_after(self) -> None:
        """Once a second: notice what others removed from this memory, and what they put there."""
        there = {str(name) for name in shm.segment_names(self.folder)}
        self._missing = {name: looks + 1 for name, looks in self._missing.items() if name not in there}
        lost = [name for name, looks in self._missing.items() if looks >= GONE_LOOKS]
        if lost:
            log.warning("segments_lost", names=lost)
            self._find(snapshot_findings.segments_lost(self._node, lost, time.time()))
        self._missing = {name: looks for name, looks in self._missing.items() if looks < GONE_LOOKS}
        strange = set(shm.strangers(self.folder))
        if strange - self._strange:
            log.warning("strangers_in_memory", names=sorted(strange))
            self._find(snapshot_findings.strangers_found(self._node, strange, time.time()))
        self._strange = strange
        held = {(name, known[1].header.version) for name, known in self._known.items()}
        self._proven = {key: at for key, at in self._proven.items() if key in held}

    def place(self, segment: Segment) -> SnapshotPlace:
        header = segment.header
        return SnapshotPlace(
            member=MemberId(header.member),
            role=header.role,
            rank=header.rank,
            ranks=header.ranks,
            version=Version(*header.version),
            chain=header.chain,
            state_digest=header.state_digest,
            tier=segment.tier,
            node=self._node,
            name=segment.path.name,
            size_bytes=segment.nbytes,
            verified_at=self._verified_at(segment),
        )

    def _verified_at(self, segment: Segment) -> float | None:
        """A copy was proven as it came, just before its seal; an own segment when a flush or a copy of it last was."""
        at = self._proven.get((segment.path.name, segment.header.version))
        if at is None and segment.tier == "peer":
            try:
                at = segment.path.stat().st_mtime
            except OSError:
                at = None  # replaced just now: the next look shows the new one
        return at

    def stored(self, role: str) -> list[SnapshotPlace]:
        """Committed checkpoints of a role on storage, newest first, one place a shard."""
        return [
            place
            for record in storage.list_manifests(self._keeping.storage, role)
            for place in _stored_places(record, None)
        ]

    # -- to storage --------------------------------------------------------------------------------------------------

    def note_sealed(self, notice: SealedNotice) -> None:
        """A member has sealed a segment."""
        self.sealed.set()
        self._missing = {
            name: looks for name, looks in self._missing.items() if not name.startswith(f"{notice.member}.")
        }
        if not notice.flush:
            return
        try:
            mark = shm.pin(self.folder / notice.name, deadline=PIN_SECONDS)
        except (EasyckptError, OSError) as error:
            log.warning("segment_not_pinned", name=notice.name, error=str(error))
            return
        self._release(notice.member, before=notice.version)
        self._pins.setdefault((notice.member, notice.version), []).append(mark)
        self._wanted.set()

    def note_trouble(self, trouble: SaveTrouble) -> None:
        """A member has lost a snapshot on its way into memory."""
        log.warning("save_failed", member=trouble.member, step=trouble.version.step, reason=trouble.text)
        self._find(snapshot_findings.save_failed(self._node, trouble, time.time()))

    async def flush_forever(self) -> None:
        """Flush what is marked whenever something was; a failure is told and tried again."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                flushed = await loop.run_in_executor(self._thread, self._flush_marked)
            except BeingFlushed as error:
                log.info("flush_waits", reason=str(error))
                loop.call_later(self._retry_seconds, self._wanted.set)
                continue
            except (EasyckptError, OSError) as error:
                self._tell_failure(error)
                loop.call_later(self._retry_seconds, self._wanted.set)
                continue
            self._tell_flushed(flushed)

    async def take_over(self, members: tuple[MemberId, ...], newest: Version | None) -> str:
        """Flush what is held here of a lost node's members, unless another node does; returns what was done, in words."""
        loop = asyncio.get_running_loop()
        give_up_at = time.monotonic() + TAKEOVER_SECONDS
        while True:
            try:
                records = await loop.run_in_executor(self._thread, self._take_over, members, newest)
            except (EasyckptError, OSError) as error:
                if not isinstance(error, BeingFlushed):
                    self._tell_failure(error)
                if time.monotonic() > give_up_at:
                    return f"not flushed: {error}"
                await asyncio.sleep(self._retry_seconds)
                continue
            self._tell_flushed(
                [(MemberId(record.member), Version(*record.version), record) for record in records], taken_over=True
            )
            done = ", ".join(f"step {record.step} of {record.member}" for record in records)
            return f"flushed {done}" if done else "nothing newer than storage has is held here"

    def _take_over(self, members: tuple[MemberId, ...], newest: Version | None) -> list[Manifest]:
        limit = None if newest is None else (newest.lineage, newest.step)
        return take_over(self.folder, self._keeping.storage, members, newest=limit, claims=self._claims)

    async def flush_newest(self) -> None:
        """Flush the newest whole step in this memory, marked or not, if storage has none as new. For the end of a node."""
        loop = asyncio.get_running_loop()
        give_up_at = time.monotonic() + END_SECONDS
        while True:
            try:
                flushed = await loop.run_in_executor(self._thread, self._flush_last)
            except BeingFlushed as error:
                # Another node brings the same step: it has to be seen through.
                if time.monotonic() > give_up_at:
                    log.warning("flush_left_to_another_node", reason=str(error))
                    return
                await asyncio.sleep(LOOK_SECONDS)
            except (EasyckptError, OSError) as error:
                self._tell_failure(error)
                return
            else:
                self._tell_flushed(flushed)
                return

    def _flush_marked(self) -> list[_Flushed]:
        held = shm.scan(self.folder)
        # Ranks of a member on other nodes are here as copies: with them, a step may be whole.
        members = {segment.header.member for segment in held if segment.tier == "shm"}
        own = [segment for segment in held if segment.header.member in members]
        done = []
        for role in sorted({segment.header.role for segment in own}):
            flushed = [record.version for record in storage.list_manifests(self._keeping.storage, role)]
            chosen = flush.newest_to_flush(own, role, flushed)
            if chosen is not None:
                done.append(self._flush_one(chosen))
            elif flushed:  # by another node: what is pinned up to there may go
                done += [
                    (MemberId(one.header.member), Version(*max(flushed)), None)
                    for one in own
                    if one.header.role == role
                ]
        return done

    def _flush_last(self) -> list[_Flushed]:
        groups: dict[tuple[str, tuple[int, int], str], dict[int, Segment]] = {}
        for segment in shm.scan(self.folder):
            header = segment.header
            groups.setdefault((header.role, header.version, header.member), {}).setdefault(header.rank, segment)
        newest: dict[str, list[Segment]] = {}
        for (role, _, _), ranks in sorted(groups.items(), key=lambda group: group[0]):
            if len(ranks) == next(iter(ranks.values())).header.ranks:
                newest[role] = [ranks[rank] for rank in sorted(ranks)]
        done = []
        for role, chosen in newest.items():
            flushed = [record.version for record in storage.list_manifests(self._keeping.storage, role)]
            if not flushed or chosen[0].header.version > max(flushed):
                done.append(self._flush_one(chosen))
        return done

    def _flush_one(self, chosen: list[Segment]) -> _Flushed:
        started = time.monotonic()
        header = chosen[0].header
        version = Version(*header.version)
        try:
            record = flush.flush_segment(chosen, self._keeping.storage, pin_seconds=PIN_SECONDS, claims=self._claims)
        except (
            AlreadyFlushed,
            Torn,
            FileNotFoundError,
        ):  # by another node, or overwritten meanwhile: a newer one follows
            return MemberId(header.member), version, None
        self.flush_seconds = time.monotonic() - started
        for segment in chosen:
            self.note_proven(segment)
        if self._keeping.keep > 0:
            try:
                self._deleted += flush.tidy(
                    self._keeping.storage,
                    role=header.role,
                    keep=self._keeping.keep,
                    keep_every=self._keeping.keep_every or None,
                    now=time.time(),
                )
            except (EasyckptError, OSError) as error:
                log.warning("old_checkpoints_stay", error=str(error))
        return MemberId(header.member), version, record

    def _tell_flushed(self, flushed: list[_Flushed], *, taken_over: bool = False) -> None:
        self._failing, self.flush_trouble = None, ""
        deleted, self._deleted = self._deleted, []
        if deleted:
            self._report(SnapshotsDeleted(folders=tuple(deleted)), time.time())
        for member, version, record in flushed:
            self._release(member, before=version, also=True)
            if record is None:
                continue
            self.flushes["taken_over" if taken_over else "done"] += 1
            log.info(
                "flushed", member=member, step=record.step, lineage=record.lineage, seconds=round(self.flush_seconds, 3),
                taken_over=taken_over,
            )  # fmt: skip
            for place in _stored_places(record, time.time()):
                self._report(SnapshotMoved(place=place), time.time())

    def _tell_failure(self, error: Exception) -> None:
        self.flushes["failed"] += 1
        log.error("flush_failed", error=str(error))
        self.flush_trouble = str(error)[: snapshot_findings.MOST_CHARACTERS]
        if type(error) is self._failing:  # told already, and still so
            return
        self._failing = type(error)
        self._find(snapshot_findings.flush_failed(self._node, error, time.time()))

    def _find(self, finding: Finding) -> None:
        self._report(Found(finding=finding), time.time())

    def _release(self, member: MemberId, *, before: Version, also: bool = False) -> None:
        """Let the marked segments of a member go that are older than this version (or of it, `also`)."""
        for key in [key for key in self._pins if key[0] == member and (key[1] < before or (also and key[1] == before))]:
            for mark in self._pins.pop(key):
                shm.unpin(mark)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the thread; pins end with this process."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def is_empty(self) -> bool:
        """Whether no segment lies here, sealed or not."""
        return not any(self.folder.iterdir()) if self.folder.is_dir() else True

    def remove(self) -> None:
        """Remove the node's memory, at the clean end of a run."""
        shutil.rmtree(self.memory, ignore_errors=True)


def _stored_places(record: Manifest, verified_at: float | None) -> list[SnapshotPlace]:
    folder = folder_name(record)
    return [
        SnapshotPlace(
            member=MemberId(record.member),
            role=record.role,
            rank=shard.rank,
            ranks=record.ranks,
            version=Version(*record.version),
            chain=record.chain,
            state_digest=shard.state_digest,
            tier="storage",
            node=None,
            name=f"{folder}/{shard.file}",
            size_bytes=shard.nbytes,
            verified_at=verified_at,
        )
        for shard in record.shards
    ]


def _lower_priority() -> None:
    """Of the calling thread alone: Linux keeps it for each thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
