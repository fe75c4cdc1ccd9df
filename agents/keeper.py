"""Owns the node's snapshot memory: which segments lie in it, what of them goes to storage, and how long each is kept.

The memory outlives trainer and agent alike: a restarted agent finds what is sealed and goes on flushing what is marked. Flushing is
done by one thread of low priority. A segment marked for storage is pinned the moment its seal is told, so that the trainer's
next saves leave it; a newer mark lets a waiting older one go. Every failure is told with its reason and tried again. What lies here is read
again by and by, and damage is told.
"""

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import structlog

from agents import snapshot_findings
from agents.config import Keeping, Pace
from agents.keeper_flush import PIN_SECONDS, Flushed, Flushing, lower_priority, stored_places
from agents.metrics import Kept
from aimaster.wire import places
from aimaster.wire.checkpoint import SaveTrouble, SealedNotice, SnapshotPlace, Version
from aimaster.wire.health import Finding
from aimaster.wire.ids import MemberId, NodeId
from aimaster.wire.messages import AgentEvent, Found, SnapshotMoved, SnapshotsDeleted
from easyckpt import layout, shm, storage
from easyckpt.errors import BeingFlushed, EasyckptError, StorageError
from easyckpt.scrub import Damage, Scrubber
from easyckpt.shm import Segment

TAKEOVER_SECONDS = 600.0
END_SECONDS = 8.0
END_STALLED_SECONDS = 30.0
"""At the end of a node, a storage that hangs for so long is not waited for."""
LOOK_SECONDS = 0.1
GONE_LOOKS = 3
"""A segment that is missing in so many looks, one a second, was removed and is not being replaced."""
log = structlog.get_logger()


class Keeper:
    """The node's memory folder; its methods are called on the event loop, those of `Flushing` on the one thread."""

    def __init__(
        self,
        memory: Path,
        node: NodeId,
        keeping: Keeping,
        report: Callable[[AgentEvent, float], None],
        pace: Pace,
    ) -> None:
        self.memory = memory
        self.folder = places.segments(memory)
        self._flushes: dict[str, int] = {"done": 0, "failed": 0, "taken_over": 0}
        self._damaged: dict[str, int] = {"shm": 0, "peer": 0}
        """Segments that were found damaged, by tier."""
        self.sealed = asyncio.Event()
        """Set at every seal; whoever copies clears it."""
        self._node = node
        self._keeping = keeping
        self._report = report
        self._pace = pace
        self.flush_trouble = ""
        """Why nothing reaches storage at present."""
        self._known: dict[str, tuple[bytes, Segment]] = {}
        self._proven: dict[tuple[str, tuple[int, int]], float] = {}
        """By name and version: when a flush or a copy last read all its bytes against their digests."""
        self._missing: dict[str, int] = {}
        """Sealed segments of own members that are gone, and in how many looks."""
        self._strange: set[str] = set()
        self._pins: dict[tuple[MemberId, Version], list[Path]] = {}
        self._failing: type[Exception] | None = None
        self._wanted = asyncio.Event()
        self._scrubber = Scrubber(self.folder, self._hear_damage, self._hear_proof, after_seconds=pace.scrub_seconds)
        self._flushing = Flushing(self.folder, keeping, self._scrubber)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flush", initializer=lower_priority)
        self._tidying: Future[None] | None = None

    def open(self) -> None:
        """Make the folders (mode 0700), or take over what is in them. On the event loop, which hears from the threads from then on."""
        self._loop = asyncio.get_running_loop()
        for folder in (self.memory, self.folder, self.memory / "progress"):
            shm.open_folder(folder)
            folder.chmod(0o700)
        removed = shm.reclaim(self.folder)
        if removed:
            log.info("segments_reclaimed", names=[path.name for path in removed])
        self._wanted.set()
        self.sealed.set()
        self._scrubber.start()

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
            if self._known.pop(gone)[1].tier == "shm" and gone not in self._scrubber.dropped:
                self._missing.setdefault(gone, 0)
        return sorted(found, key=lambda one: (one.header.version, one.tier == "shm"), reverse=True)

    def places(self) -> tuple[SnapshotPlace, ...]:
        return tuple(self.place(segment) for segment in self.segments())

    def figures(self) -> Kept:
        """For the metrics."""
        return Kept(
            places=self.places(),
            flushes=dict(self._flushes),
            flush_seconds=self._flushing.seconds,
            scrubbed_bytes=self._scrubber.read_bytes,
            damaged=dict(self._damaged),
        )

    def note_proven(self, segment: Segment) -> None:
        """All its bytes were just read and proven, here or by who received them."""
        self._proven[segment.path.name, segment.header.version] = time.time()
        self._scrubber.note_proven(segment)

    def suspect(self, segment: Segment) -> None:
        """Its bytes may be wrong: they are read next."""
        self._scrubber.suspect([segment])

    def is_damaged(self, segment: Segment) -> bool:
        return self._scrubber.is_damaged(segment)

    def _hear_proof(self, segment: Segment) -> None:
        """On the scrubber's thread, as the next."""
        key = (segment.path.name, segment.header.version)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._proven.__setitem__, key, time.time())

    def _hear_damage(self, damage: Damage) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._note_damage, damage)

    def _note_damage(self, damage: Damage) -> None:
        self._damaged[damage.tier] += 1
        log.error("segment_damaged", name=damage.name, reason=damage.text)
        self._find(snapshot_findings.segment_damaged(self._node, damage, time.time()))
        # It is no good for storage: nothing has to keep the trainer from its slot.
        for mark in self._pins.pop((MemberId(damage.member), Version(*damage.version)), []):
            shm.unpin(mark)

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
        if trouble := self._flushing.progress.news(time.monotonic(), self._pace.flush_stalled_seconds):
            log.error("flush_stalled", reason=trouble)
            self.flush_trouble = trouble
            self._find(snapshot_findings.flush_stalled(self._node, trouble, time.time()))
        if self._tidying is None or self._tidying.done():
            self._tidying = self._thread.submit(self._flushing.tidy)

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
            damaged=self.is_damaged(segment),
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
            for place in stored_places(record, None)
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
                flushed = await loop.run_in_executor(self._thread, self._flushing.marked)
            except BeingFlushed as error:
                log.info("flush_waits", reason=str(error))
                loop.call_later(self._pace.flush_retry_seconds, self._wanted.set)
                continue
            except (EasyckptError, OSError) as error:
                self._tell_failure(error)
                loop.call_later(self._pace.flush_retry_seconds, self._wanted.set)
                continue
            self._tell_flushed(flushed)

    async def take_over(self, members: tuple[MemberId, ...], newest: Version | None) -> str:
        """Flush what is held here of a lost node's members, unless another node does; returns what was done, in words."""
        give_up_at = time.monotonic() + TAKEOVER_SECONDS
        work = partial(self._flushing.take_over, members, newest)
        while True:
            try:
                flushed = await self._unless_stalled(work, self._pace.flush_stalled_seconds)
            except (EasyckptError, OSError) as error:
                if not isinstance(error, BeingFlushed):
                    self._tell_failure(error)
                if time.monotonic() > give_up_at:
                    return f"not flushed: {error}"
                await asyncio.sleep(self._pace.flush_retry_seconds)
                continue
            self._tell_flushed(flushed, taken_over=True)
            done = ", ".join(f"step {one.version.step} of {one.member}" for one in flushed)
            return f"flushed {done}" if done else "nothing newer than storage has is held here"

    async def flush_newest(self) -> None:
        """Flush the newest whole step in this memory, marked or not, if storage has none as new. For the end of a node."""
        give_up_at = time.monotonic() + END_SECONDS
        while True:
            try:
                flushed = await self._unless_stalled(self._flushing.last, END_STALLED_SECONDS)
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

    async def _unless_stalled(self, work: Callable[[], list[Flushed]], stalled_seconds: float) -> list[Flushed]:
        """What the thread made of it; StorageError when it has not got on for so long: nobody waits for a storage that hangs."""
        doing = asyncio.get_running_loop().run_in_executor(self._thread, work)
        while not (await asyncio.wait({doing}, timeout=LOOK_SECONDS))[0]:
            silent_seconds = self._flushing.progress.silent_seconds(time.monotonic())
            if silent_seconds > stalled_seconds:
                raise StorageError(f"storage does not get on for {silent_seconds:.0f} s: the flush is left as it is")
        return doing.result()

    def _tell_flushed(self, flushed: list[Flushed], *, taken_over: bool = False) -> None:
        self._failing, self.flush_trouble = None, ""
        deleted, self._flushing.deleted = self._flushing.deleted, []
        if deleted:
            self._report(SnapshotsDeleted(folders=tuple(deleted)), time.time())
        for member, version, record, segments in flushed:
            self._release(member, before=version, also=True)
            for segment in segments:
                self.note_proven(segment)
            if record is None:
                continue
            self._flushes["taken_over" if taken_over else "done"] += 1
            log.info(
                "flushed", member=member, step=record.step, lineage=record.lineage, seconds=round(self._flushing.seconds, 3),
                taken_over=taken_over,
            )  # fmt: skip
            for place in stored_places(record, time.time()):
                self._report(SnapshotMoved(place=place), time.time())

    def _tell_failure(self, error: Exception) -> None:
        self._flushes["failed"] += 1
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
        """End the threads; pins end with this process."""
        self._scrubber.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def is_empty(self) -> bool:
        """Whether no segment lies here, sealed or not."""
        return not any(self.folder.iterdir()) if self.folder.is_dir() else True

    def remove(self) -> None:
        """Remove the node's memory, at the clean end of a run."""
        shutil.rmtree(self.memory, ignore_errors=True)
