"""The trainer's checkpointer: `save` a state while it trains on, `restore` it from the nearest good copy.

    training thread   save: walk the state, copy what is small or not known to be changed by an optimizer only, hand the rest over
    saving thread     copy and hash the rest, write the header, seal; tell the agent (`on_sealed`) or the own sidecar
    optimizer step    waits for the copy, through torch.optim's global hook (or `ready()`); never for hashing, sealing or storage

A failure in the background is raised by the next call, once, after that call has done its own work. Not for use by two threads at once.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from easyckpt import agreement, arguments, fitting, gate, shm, sources, walk
from easyckpt.agreement import Agreement
from easyckpt.copier import Copier
from easyckpt.errors import EasyckptError, NotReady, Refused, SaveFailed
from easyckpt.events import Event, Events, Kind, Listener
from easyckpt.flusher import Flusher
from easyckpt.interval import Interval, Pace
from easyckpt.layout import SegmentHeader, SegmentName, Version
from easyckpt.lineage import History, Sealed, advance, begin
from easyckpt.marks import Every, Marks
from easyckpt.restore import Restored, Restorer
from easyckpt.saver import Saver
from easyckpt.shardserver import Peer
from easyckpt.shardwire import Bandwidth
from easyckpt.sidecar import Settings, ranks_here
from easyckpt.sources import Candidate
from easyckpt.storage import open_shared
from easyckpt.writeprotect import Shield

WAIT_SECONDS = 600.0
CLOSE_SECONDS = 300.0


class Checkpointer:
    """Saves and restores one rank of one member."""

    _failure: BaseException | None = None
    _newest: Sealed | None = None
    _captured: walk.Capture | None = None
    _begun = False
    """Whether the lineage of what is saved was settled since the start or the last restore."""
    _closed = False

    def __init__(
        self,
        storage: str | os.PathLike[str] | None = None,
        *,
        member: str = "trainer-0",
        role: str = "trainer",
        rank: int = 0,
        ranks: int = 1,
        folder: str | os.PathLike[str] | None = None,
        slots: int = 2,
        flush_every: Every = 1,
        keep: int = 3,
        keep_every: int | None = None,
        mode: Literal["overlap", "copy", "protect"] = "overlap",
        on_sealed: Callable[[Path, SegmentHeader], None] | None = None,
        on_event: Listener | None = None,
        ranks_agree: Agreement | None = None,
        peers: Sequence[Peer] = (),
        copies: int = 0,
        copy_bytes_per_second: float | None = None,
    ) -> None:
        """`storage`: a folder for durable checkpoints. `folder`: of the segments; with `on_sealed` an agent flushes them, else a helper does.

        `mode`: what large tensors wait for. "overlap": a copy beside training, which an optimizer's step waits for; other changes need `ready`.
        "copy": `save` returns when all is copied. "protect": `save` returns at once and everything may change, by write protection where the
        kernel allows it, else as "copy", which is told (`protect_refused`).
        `slots=1` halves the memory; a kill in the middle of a save then loses the copy in memory. `keep`, `keep_every`: what stays on storage.
        `peers`: shard servers on other nodes to restore from as well, and the first `copies` of them that answer hold a copy of the newest step,
        all copies together under a cap where one is given. `flush_every`: every so many saves, None (only at the end), or "auto":
        as often as step and flush times advise.
        """
        arguments.check(
            member=member, role=role, rank=rank, ranks=ranks, slots=slots, keep=keep, keep_every=keep_every,
            flush_every=flush_every, mode=mode,
        )  # fmt: skip
        arguments.check_surroundings(storage=storage, folder=folder, on_event=on_event, on_sealed=on_sealed)
        self.member, self.role, self.rank, self.ranks = member, role, rank, ranks
        self._storage = open_shared(storage) if storage is not None else None
        self._has_own_folder = folder is None
        place = Path(folder) if folder is not None else shm.default_folder(storage or f"{role}:{member}")
        self.folder = shm.open_folder(place)
        self._agreement = ranks_agree
        self._peers = tuple(peers)
        cap = Bandwidth(copy_bytes_per_second) if copy_bytes_per_second else None
        self._marks = Marks(flush_every)
        self._on_sealed = on_sealed
        self.events = Events(on_event)
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._history = History()
        self._pace = Pace(time.monotonic())
        self._writer = shm.claim_writer(self.folder, f"{member}.r{rank}")
        with contextlib.ExitStack() as given_up:
            given_up.callback(shm.unpin, self._writer)
            # One flusher for all ranks of a node; under an agent there is none here.
            flushes_here, here = ranks_here(rank, ranks)
            flushes = storage if on_sealed is None and flushes_here else None
            self._flusher = self._make_flusher(flushes, keep, keep_every, here) if flushes is not None else None
            self._saver = self._make_saver(slots, mode)
            given_up.callback(self._saver.close, CLOSE_SECONDS)
            self._copier = Copier(peers, copies=copies, events=self.events, bandwidth=cap) if copies else None
            given_up.pop_all()
        gate.watch(self)
        atexit.register(self.close)

    # ------------------------------------------------------------------------------------------------------------ save

    def save(
        self,
        step: int,
        state: Any,
        *,
        lineage: int | None = None,
        epoch: int = 0,
        chain: str = "",
        flush: bool | None = None,
    ) -> bool:
        """Starts a snapshot of `state` as it is now; False when it was skipped because no slot is free (counted, training goes on).

        Returns as soon as everything may change again but what only an optimizer's step changes, which waits by itself. The first save after the
        start or a restore is a call of all ranks of a process group: they begin the same lineage. Raises Unsupported with the path of a value
        that cannot be saved, NoRoom, or SaveFailed for an earlier failure (this save was still made).
        """
        self._must_be_open()
        step, epoch = arguments.count("step", step), arguments.count("epoch", epoch)
        lineage = arguments.count("lineage", lineage) if lineage is not None else None
        chain = arguments.text("chain", chain)
        started = time.monotonic()
        self._saver.settle(WAIT_SECONDS)
        if not self._begun and lineage is None:
            # Before anything that may fail or be skipped on one rank only: the others wait for it here.
            self._begin_history(self._restorer().newest_known())
        self._begun = True
        captured = walk.capture(state, self._captured)
        self._captured = captured.without_tensors()
        history = advance(self._history, step, lineage)
        self._pace.saw_save(step, started)
        marked = flush if flush is not None else self._is_flush_due(step)
        header = self._header(history, captured, epoch=epoch, chain=chain, flush=marked)
        slot = self._saver.claim(header)
        if slot is not None:
            if self._flusher is not None and self._flusher.awaits(slot.overwritten):
                # It was to go to storage and nobody came for it in time: this one goes in its place.
                marked, header = True, msgspec.structs.replace(header, flush=True)
            self._history = history
            self._marks.begun(header.version, marked=marked)
            self._saver.begin(header, slot, captured, started)
        self._pace.saw_stall(time.monotonic() - started)
        self._raise_failure()
        return slot is not None

    def ready(self, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Returns when everything may change. Optimizer steps wait by themselves; call it before changing the state in other ways."""
        self._ready(timeout_seconds, for_optimizer=False)

    def before_step(self) -> None:
        """What every optimizer's step calls: returns when it may change what it owns."""
        self._ready(WAIT_SECONDS, for_optimizer=True)

    def prepare(self, state: Any) -> None:
        """Takes and touches the memory for snapshots like `state` now, so that the first save costs no more than later ones. Raises NoRoom."""
        self._must_be_open()
        self._saver.settle(WAIT_SECONDS)
        captured = walk.capture(state)
        self._saver.prepare(self._header(History(step=0), captured), captured.leaves)

    @property
    def newest(self) -> Sealed | None:
        """The newest snapshot this engine sealed."""
        return self._newest

    @property
    def flush_interval(self) -> Interval:
        """What the measured step, flush and failure times advise, with the reason; `flush_every="auto"` follows it."""
        return self._pace.flush_interval(time.monotonic())

    @property
    def save_interval(self) -> Interval:
        """How often a save to memory pays, from the measured step, stall and failure times, with the reason. Advice: who calls `save` decides."""
        return self._pace.save_interval(time.monotonic())

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Until the last save is sealed and, when the engine flushes by itself, on storage. Raises NotReady or SaveFailed."""
        give_up_at = time.monotonic() + (WAIT_SECONDS if timeout_seconds is None else timeout_seconds)
        self._saver.settle(max(0.0, give_up_at - time.monotonic()))
        if self._flusher is not None:
            self._flusher.wait(give_up_at, lambda: self._failure is not None)
        self._raise_failure()
        self._raise_unsealed()

    def close(self) -> None:
        """Waits for the last save and flush and lets go of everything. A clean end leaves no memory behind that is on storage."""
        if self._closed or self._pid != os.getpid():
            return  # a forked child ends: what it inherited is its parent's
        self._closed = True
        atexit.unregister(self.close)
        gate.unwatch(self)
        with contextlib.suppress(NotReady):
            self._saver.settle(CLOSE_SECONDS)
        self._saver.close(CLOSE_SECONDS)
        shm.unpin(self._writer)
        flushed = self._flusher is not None and self._flusher.close(CLOSE_SECONDS)
        if self._has_own_folder:
            with contextlib.suppress(OSError):  # something lies there still, or nothing at all
                self.folder.rmdir()
        if self._copier is not None:
            # Copies of what is on storage are as little needed as the memory here.
            every = [str(SegmentName(member=self.member, rank=rank, slot=0)) for rank in range(self.ranks)]
            self._copier.close(CLOSE_SECONDS, take_back=every if flushed and self._failure is None else ())
        self._raise_failure()
        self._raise_unsealed()

    # --------------------------------------------------------------------------------------------------------- restore

    def candidates(self, *, member: str | None = None) -> list[Candidate]:
        """Whole snapshots of this role, newest first, over memory, peer copies and storage. Headers are proven, tensors are not yet."""
        return sources.find(self.folder, self._storage, role=self.role, member=member, own=self.member)

    def restore(
        self,
        state: Any,
        *,
        at: Version | None = None,
        member: str | None = None,
        strict: bool = True,
        only: str | Collection[str] | None = None,
    ) -> Restored | None:
        """Fills `state` in place from the newest whole snapshot, or from version `at`, which may be one that was left behind; nearest tier first;
        None when there is none.

        Every tensor is proven by its digest. A damaged copy is said, counted and left for the next tier, then for an older version. If none
        is good, Corrupt is raised and the state must not be used. A snapshot that does not fit raises Mismatch; nothing was changed then.
        `only` names the paths (or their beginnings) to fill; one that the snapshot has not is a Mismatch. The ranks of a process group agree on the version.
        """
        filled = self._restore(state, at=at, member=member, strict=strict, only=only)
        return None if filled is None else filled[0]

    def load(self, *, at: Version | None = None) -> tuple[Restored, Any] | None:
        """The newest snapshot (or `at`) as a new state: dicts, lists, tuples, values and CPU tensors, whatever was saved at its top."""
        return self._restore(fitting.NOTHING, at=at)

    def _restore(self, state: Any, **options: Any) -> tuple[Restored, Any] | None:
        self._must_be_open()
        at = arguments.version("at", options.pop("at"))
        self._saver.settle(WAIT_SECONDS)
        filled = self._restorer().restore(state, at=at, **options)
        if filled is not None:
            header = filled[0].header
            self._history = History(lineage=header.lineage, step=header.step, rewinds=header.rewinds)
            if self._newest is None:
                self._pace.resume(header.life)
            self._begun = False
            self._marks.restart()
            if header.ranks == self.ranks:
                self._saver.prepare_later(header)
        return filled

    def _restorer(self) -> Restorer:
        return Restorer(
            self.folder,
            self._storage,
            role=self.role,
            member=self.member,
            rank=self.rank,
            ranks=self.ranks,
            agreement=self._agreement if self._agreement is not None else agreement.default(self.ranks),
            events=self.events,
            peers=self._peers,
            held=self._saver.held,
        )

    # ---------------------------------------------------------------------------------------------------- inside a save

    def _ready(self, timeout_seconds: float, *, for_optimizer: bool) -> None:
        if self._pid != os.getpid():
            return  # a forked child's state is its own, and nobody copies it
        started = time.monotonic()
        self._saver.ready(timeout_seconds, for_optimizer=for_optimizer)
        self._pace.saw_stall(time.monotonic() - started)

    def _make_saver(self, slots: int, mode: Literal["overlap", "copy", "protect"]) -> Saver:
        if slots == 1:
            text = "slots=1: while a save overwrites the only slot, memory holds no copy; a kill then leaves the one before on a peer or storage"
            self._emit("save_exposed", None, text=text)
        shield = self._open_shield() if mode == "protect" else None
        return Saver(
            self.folder,
            SegmentName(member=self.member, rank=self.rank, slot=0),
            ranks=self.ranks,
            slots=slots,
            overlap=mode == "overlap" or shield is not None,
            shield=shield,
            events=self.events,
            on_sealed=self._after_seal,
            on_failed=self._fail,
        )

    def _open_shield(self) -> Shield | None:
        try:
            return Shield(lambda text: self._emit("protect_refused", None, text=text))
        except Refused as error:
            self._emit("protect_refused", None, text=f"{error}; every save copies at once instead")
            return None

    def _header(
        self, history: History, captured: walk.Capture, *, epoch: int = 0, chain: str = "", flush: bool = False
    ) -> SegmentHeader:
        return SegmentHeader(
            member=self.member,
            role=self.role,
            rank=self.rank,
            ranks=self.ranks,
            lineage=history.lineage,
            step=history.step,
            epoch=epoch,
            chain=chain,
            flush=flush,
            created_at=time.time(),
            rewinds=history.rewinds,
            life=self._pace.life(time.monotonic()),
            tensors=captured.entries,
            extra=captured.extra,
        )

    def _begin_history(self, newest: Version | None) -> None:
        before, self._history = self._history, begin(self._history, newest)
        if newest is not None and before.step < 0 and self._history != before:
            text = (
                f"checkpoints up to step {newest[1]} are there and none was restored: this run begins from nothing, as lineage"
                f" {self._history.lineage}. The newest of them stays until `easyckpt gc`; restore(state, at={newest}) takes it"
            )
            self._emit("begun_anew", self._history.version, text=text)

    def _is_flush_due(self, step: int) -> bool:
        if self._marks.follow_advice and (news := self._pace.news(time.monotonic())) is not None:
            self._emit("interval_chosen", (0, step), text=f"a flush every {news.steps} steps: {news.reason}")
        newest = self._newest.version if self._newest is not None else None
        return self._marks.is_due(step, newest, lambda: self.flush_interval.steps)

    def _after_seal(self, path: Path, header: SegmentHeader) -> None:
        """Runs on the saving thread."""
        self._newest = Sealed(
            lineage=header.lineage, step=header.step, state_digest=header.state_digest, chain=header.chain
        )
        if header.flush and self._flusher is not None:
            self._flusher.mark(header.version)
        if self._copier is not None:
            self._copier.sealed(path, header)
        if self._on_sealed is not None:
            self._on_sealed(path, header)

    def _make_flusher(
        self, storage: str | os.PathLike[str], keep: int, keep_every: int | None, here: int | None
    ) -> Flusher:
        settings = Settings(
            folder=str(self.folder),
            storage=os.fspath(storage),
            member=self.member,
            role=self.role,
            ranks=self.ranks,
            keep=keep,
            keep_every=keep_every,
            parent=os.getpid(),
            here=here,
        )
        return Flusher(
            settings,
            ranks=range(self.rank, self.rank + (here or 0)),
            changed=self._changed,
            events=self.events,
            pace=self._pace,
            on_failed=self._fail,
        )

    # ---------------------------------------------------------------------------------------------------------- faults

    def _emit(self, kind: Kind, version: Version | None, **fields: Any) -> None:
        lineage, step = version or (0, 0)
        self.events.emit(Event(kind=kind, lineage=lineage, step=step, **fields))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        with self._changed:
            error, self._failure = self._failure, None
        if error is not None:
            raise SaveFailed(f"an earlier save failed: {error}") from error

    def _raise_unsealed(self) -> None:
        """No failure, and no snapshot: who waits for one has to know."""
        if self._saver.unsealed:
            raise SaveFailed(self._saver.unsealed)

    def _must_be_open(self) -> None:
        if self._closed:
            raise EasyckptError("this checkpointer is closed: make a new one")
        if self._pid != os.getpid():
            raise EasyckptError(
                f"this checkpointer is that of process {self._pid}, which was forked: make one here, as another member"
            )
