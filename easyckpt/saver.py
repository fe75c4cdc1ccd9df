"""One save at a time, from the training thread to the seal.

    claim   a slot that may be overwritten, its seal zeroed (or none: the save is skipped)
    begin   copy at once what may change before the next optimizer step, leave the rest to the saving thread
    ready   wait for that thread's copy, or until everything may change, no longer; hashing and sealing go on behind

What is copied later and something else than an optimizer changed meanwhile is named and copied at once from then on; the snapshot is not sealed.
Every save sees so by torch's counters. The first ones hash it as well, for what torch does not count: at the save, when copied, and at `ready`.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from easyckpt import layout, memory, retain, shm
from easyckpt.cuda import Lane
from easyckpt.errors import NotReady, Pinned, SaveFailed
from easyckpt.events import Event, Events, Kind
from easyckpt.layout import SegmentHeader, SegmentName, TensorEntry, Version
from easyckpt.proof import Proof, prove
from easyckpt.retain import SlotState
from easyckpt.shm import Segment
from easyckpt.slot import Slot
from easyckpt.snapshot import Copy, Leaf, Small, counter_of
from easyckpt.sorting import Sorter
from easyckpt.walk import Capture
from easyckpt.writeprotect import Shield

PROVED_SAVES = 2
CLONED_BYTES = 256 << 20
"""Of what must be copied from devices at once: so much is cloned there, which nobody waits for; there may be no room for more."""
LOOK_SECONDS = 0.5


class Job(msgspec.Struct, kw_only=True):
    """One save on its way."""

    header: SegmentHeader
    """Without digests yet."""
    slot: Slot
    """Claimed."""
    copy: Copy
    """What is copied and hashed so far."""
    later: list[Leaf]
    """For the saving thread to copy."""
    guarded: list[Leaf]
    """Write-protected, and copied by the helper of the protection."""
    kept: list[Leaf]
    """What the slot still holds from an earlier save, to be hashed only."""
    proofs: list[Proof]
    """In the first saves, of what is copied later."""
    lane: Lane | None
    """The way from devices, where there are some."""
    counters: list[int]
    """Of what is copied later, at the moment of the save."""
    copied: threading.Event
    """Set when an optimizer may step."""
    proven: threading.Event
    """Set when everything may change."""
    started: float
    """Monotonic seconds."""


class Saver:
    """The slots of one rank and the thread that fills them."""

    def __init__(
        self,
        folder: Path,
        name: SegmentName,
        *,
        ranks: int,
        slots: int,
        overlap: bool,
        shield: Shield | None = None,
        events: Events,
        on_sealed: Callable[[Path, SegmentHeader], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._folder = folder
        self._name = name
        self._ranks = ranks
        self._overlap = overlap
        self._shield = shield
        self._events = events
        self._on_sealed = on_sealed
        self._on_failed = on_failed
        names = [msgspec.structs.replace(name, slot=slot) for slot in range(slots)]
        self._slots = [Slot(folder / str(one)) for one in names]
        # Under write protection everything may change at once: what is still is protected and copied like the rest.
        self._sorter = Sorter(overlap=overlap, keeps=shield is None)
        self.unsealed = ""
        """Why the last save is no snapshot, where that is no failure."""
        self._targets: dict[Path, tuple[Sequence[Small], int, list[memoryview]]] = {}
        """By slot, for the small tensors of a capture and the slot's address: where they go."""
        self._proofs: list[Proof] = []
        """Of the save before, until the gate."""
        self._last: Version = (0, 0)
        """That save's."""
        self._room: tuple[tuple[TensorEntry, ...] | None, int, int] = (None, 0, 0)
        self._begun = 0
        self._job: Job | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._jobs: queue.Queue[Job | SegmentHeader | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._work, name=f"easyckpt-{name.stem}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ training thread

    def prepare(self, header: SegmentHeader, leaves: Sequence[Leaf] = ()) -> None:
        """Takes and touches the memory for snapshots like this one. Raises NoRoom."""
        if not all(slot.is_touched for slot in self._slots):
            room = layout.room_for(header)
            for slot in self._slots:
                slot.warm(room, header.data_bytes)
            if self._shield is not None:
                self._shield.prepare([slot for slot in self._slots if slot.is_touched], leaves)

    def prepare_later(self, header: SegmentHeader) -> None:
        """The same on the saving thread; a save meanwhile waits for it."""
        self._must_work()
        self._idle.clear()
        self._jobs.put(header)

    def held(self, segment: Segment, fd: int) -> memoryview | None:
        """The bytes of a segment that is one of the slots here, open as `fd`."""
        for slot in self._slots:
            if slot.path == segment.path:
                return slot.held(fd, segment.prefix_bytes, segment.header.data_bytes)
        return None

    def claim(self, header: SegmentHeader) -> Slot | None:
        """A slot that is ours to write; None when every one must stay."""
        own = self._own_states(header)
        chosen = retain.choose_slot(own, self._other_states())
        if chosen is None:
            self._skip(header, "no slot is free: one is being copied away, or holds the only whole step")
            return None
        slot = self._slots[chosen]
        self._tell_exposed([state.version for state in own if state.version is not None], slot.version)
        try:
            slot.fit(self._room_for(header), header.data_bytes)
            slot.claim()
        except Pinned as error:
            self._skip(header, str(error))
            return None
        return slot

    def begin(self, header: SegmentHeader, slot: Slot, captured: Capture, started: float) -> None:
        self._must_work()
        now, later, kept = self._sorter.sort(captured, slot.written)
        guarded = self._shield.take(slot, now + later) if self._shield is not None else []
        if self._shield is not None:
            # Whatever the protection left may change as soon as this returns.
            names = {leaf.entry.name for leaf in guarded}
            now = [leaf for leaf in now + [one for one in later if one.tensor.is_cpu] if leaf.entry.name not in names]
            later = [leaf for leaf in later if not leaf.tensor.is_cpu]
        devices = {leaf.tensor.device for leaf in now + later if not leaf.address and leaf.tensor.is_cuda}
        if devices and self._overlap:
            # What has to be copied at once is cloned in the order of the training stream, so the host waits for nothing.
            cloned = _few([leaf for leaf in now if leaf.tensor.is_cuda])
            later += [Leaf(leaf.entry, leaf.tensor.detach().clone()) for leaf in cloned.values()]
            now = [leaf for leaf in now if leaf.entry.name not in cloned]
        # Before the way is opened: it waits for what the training stream was given until then.
        self._proofs = [prove(leaf) for leaf in later] if self._begun < PROVED_SAVES else []
        self._last = header.version
        lane = Lane(sorted(devices, key=str)) if devices else None
        copy = Copy(slot.view(), lane)
        copy.copy_small(captured.small, self._targets_of(slot, captured.small))
        copy.copy_only(now)
        if not self._overlap:
            # Everything may change when this returns: what was to stay in the slot is proven now, or copied.
            copy.keep(kept)
            copy.copy_only([leaf for leaf in kept if not _is_kept(copy, slot, leaf)])
            kept = []
        copy.finish()
        self._begun += 1
        self.unsealed = ""
        copied, proven = threading.Event(), threading.Event()
        if not later:
            copied.set()
        if not later and not kept:
            proven.set()
        self._job = Job(
            header=header,
            slot=slot,
            copy=copy,
            later=later,
            guarded=guarded,
            kept=kept,
            proofs=self._proofs,
            lane=lane,
            counters=[counter_of(leaf.tensor) for leaf in later],
            copied=copied,
            proven=proven,
            started=started,
        )
        self._idle.clear()
        self._jobs.put(self._job)

    def ready(self, timeout_seconds: float, *, for_optimizer: bool = False) -> None:
        """Until everything may change, or what an optimizer's step changes."""
        job = self._job
        if job is not None and not (done := job.copied if for_optimizer else job.proven).is_set():
            started = time.monotonic()
            job.copy.hurry = True
            if not done.wait(timeout_seconds):
                step = job.header.step
                raise NotReady(
                    f"the copy of step {step} is not done after {timeout_seconds} s: do not change the state yet"
                )
            self._tell("save_waited", job.header.version, seconds=time.monotonic() - started)
        self._prove()

    def _prove(self) -> None:
        """The state was to change only from here on: by an optimizer, after `ready`, or because no save is on its way any more."""
        proofs, self._proofs = self._proofs, []
        # What changed although nothing but an optimizer was to change it would get into a snapshot sooner or later.
        if proofs and (moved := self._sorter.moved(one.name for one in proofs if not one.holds())):
            text = f"something else than an optimizer changed {moved} after the save, before ready() or wait()"
            self._tell("tensor_moved", self._last, text=f"{text}; copied at once from now on")

    def settle(self, timeout_seconds: float) -> None:
        """Until no save is on its way."""
        job = self._job
        if job is not None:
            job.copy.hurry = True
        give_up_at = time.monotonic() + timeout_seconds
        while not self._idle.wait(max(0.0, min(LOOK_SECONDS, give_up_at - time.monotonic()))):
            self._must_work()
            if time.monotonic() < give_up_at:
                continue
            raise NotReady(f"the save before is not sealed after {timeout_seconds:.0f} s")
        self._prove()

    def close(self, timeout_seconds: float) -> None:
        with contextlib.suppress(queue.Full):  # a thread that does not take its job does not end either
            self._jobs.put(None, timeout=timeout_seconds if self._thread.is_alive() else 0)
        self._thread.join(timeout_seconds)
        if self._shield is not None:
            self._shield.close()
        for slot in self._slots:
            if not self._thread.is_alive():
                slot.discard()
            slot.close()

    def _must_work(self) -> None:
        if not self._thread.is_alive():
            raise SaveFailed(
                "the saving thread has ended: nothing is saved any more. Close this checkpointer and make a new one"
            )

    def _room_for(self, header: SegmentHeader) -> int:
        """As `layout.room_for`, measured anew only when the tensors differ or the rest has grown by much."""
        extra_bytes = len(msgspec.json.encode((header.extra, header.chain, header.rewinds)))
        tensors, measured_bytes, room = self._room
        if header.tensors is not tensors or abs(extra_bytes - measured_bytes) > layout.PAGE_BYTES // 8:
            room = layout.room_for(header)
            self._room = (header.tensors, extra_bytes, room)
        return room

    def _own_states(self, header: SegmentHeader) -> list[SlotState]:
        held = shm.pinned_names(self._folder)
        for slot in self._slots:
            if slot.is_lost():
                self._tell("segment_lost", header.version, text=f"{slot.path} was removed or replaced by someone else")
                slot.close()
                slot.version = shm.peek(slot.path)
        return [
            SlotState(slot=index, version=slot.version, pinned=slot.path.name in held)
            for index, slot in enumerate(self._slots)
        ]

    def _other_states(self) -> list[list[SlotState]]:
        """The other ranks' slots in this folder. Ranks on other nodes are not seen here; their steps become whole on storage."""
        if self._ranks == 1:
            return []
        found = shm.slot_states(self._folder, self._name.member)
        return [states for rank, states in found.items() if rank != self._name.rank]

    def _targets_of(self, slot: Slot, small: Sequence[Small]) -> list[memoryview]:
        known, address = self._targets.get(slot.path), slot.data_address
        if known is None or known[0] is not small or known[1] != address:
            found = [memory.block_at(address + one.at, len(one.block)) for one in small]
            known = self._targets[slot.path] = (small, address, found)
        return known[2]

    def _tell_exposed(self, held: list[Version], going: Version | None) -> None:
        """While a slot is copied away, the newest step is overwritten in the other: until the seal, memory falls back further than one step."""
        left = [version for version in held if version != going]
        if going is not None and left and max(left) < going:
            text = f"step {going[1]} is overwritten while step {max(left)[1]} is copied away: until the seal, memory holds that one"
            self._tell("save_exposed", max(left), text=text)

    def _skip(self, header: SegmentHeader, text: str) -> None:
        self._tell("save_skipped", header.version, text=text)

    # -------------------------------------------------------------------------------------------------- saving thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            header = job.header if isinstance(job, Job) else job
            try:
                if isinstance(job, Job):
                    self._finish(job)
                    self._job = None
                self.prepare(header)
            except BaseException as error:  # noqa: BLE001 - whatever it was, the trainer hears of it on its next call
                if isinstance(job, Job):
                    job.slot.written = {}  # it may hold half of both
                self._on_failed(error)
                # The failure is kept by now: one in telling it must not end the thread, which later saves wait for.
                with contextlib.suppress(Exception):
                    self._tell("save_failed", header.version, text=str(error))
            finally:
                if isinstance(job, Job):
                    job.copied.set()
                    job.proven.set()
                    self._job = None
                self._idle.set()

    def _finish(self, job: Job) -> None:
        job.copy.copy(job.later)
        moved = {one.name for one in job.proofs if job.lane is not None and not one.holds_in(job.lane)}
        now = [counter_of(leaf.tensor) for leaf in job.later]
        moved.update(leaf.entry.name for leaf, a, b in zip(job.later, job.counters, now, strict=True) if a != b)
        job.copied.set()
        if self._shield is not None and job.guarded:
            self._shield.finish()
            job.copy.adopt(job.guarded)
        job.copy.keep(job.kept)
        job.proven.set()
        job.copy.hash_rest()
        self._name_moved(job, moved)
        if changed := [leaf.entry.name for leaf in job.kept if not _is_kept(job.copy, job.slot, leaf)]:
            # As they may: but whether before or after the save, nobody can tell.
            self._sorter.moved(changed)
            self.unsealed = (
                f"step {job.header.step} was not saved: {changed} had stayed the same for some saves, were not copied, and changed"
                " before they were proven; copied at once from now on"
            )
            self._skip(job.header, self.unsealed)
            job.slot.written = {}
            return
        self._sorter.saved(job.copy.digests)
        header = layout.with_digests(job.header, job.copy.digests)
        job.slot.seal(header)
        seconds = time.monotonic() - job.started
        self._tell("save_sealed", header.version, tier="shm", nbytes=header.data_bytes, seconds=seconds)
        self._on_sealed(job.slot.path, header)
        if self._shield is not None:
            self._shield.settle(job.guarded)

    def _name_moved(self, job: Job, seen: set[str]) -> None:
        found = job.copy.digests
        seen.update(one.name for one in job.proofs if one.digest is not None and found[one.name] != one.digest)
        if seen:
            self._sorter.moved(seen)
            text = f"something else than an optimizer changed {sorted(seen)} while it was copied"
            self._tell("tensor_moved", job.header.version, text=f"{text}; copied at once from now on")
            raise SaveFailed(f"step {job.header.step} was not saved: {text}. Call ready() before changing the state so")

    def _tell(self, kind: Kind, version: Version, **fields: str | float) -> None:
        lineage, step = version
        self._events.emit(msgspec.convert({"kind": kind, "lineage": lineage, "step": step, **fields}, Event))


def _is_kept(copy: Copy, slot: Slot, leaf: Leaf) -> bool:
    """Whether a tensor that was not copied is what the slot holds, now that both are hashed."""
    held = slot.written[leaf.entry.name]
    return copy.digests[leaf.entry.name] == (held.digest, held.parts)


def _few(leaves: Sequence[Leaf]) -> dict[str, Leaf]:
    """The first of them that are no more than CLONED_BYTES together, by name."""
    ends = itertools.accumulate(leaf.entry.nbytes for leaf in leaves)
    return {leaf.entry.name: leaf for leaf, end in zip(leaves, ends, strict=True) if end <= CLONED_BYTES}
