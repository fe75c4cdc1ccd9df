"""A small world around the controller's pure parts: policy members, rollout workers, snapshots and a ledger that can lose its tail.

Members follow the protocol of wire/training.py exactly as real ones do, but a gradient is the multiset of the samples it was
computed from, so a share that is missing or counted twice shows at once. Nothing here sleeps: time is a number that is moved.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import xxhash

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.rollout import CompleteRequest, Completion, LeaseRequest, Partial, Piece, PromptLease, StreamRequest
from aimaster.wire.topology import EpochProposal
from aimaster.wire.training import (
    Aborted,
    Begin,
    Candidate,
    Committed,
    Compute,
    Computed,
    Fresh,
    Held,
    Hold,
    Host,
    Hosting,
    Leave,
    Ready,
    Reduce,
    Reduced,
    Rehearse,
    Rehearsed,
    Restore,
    Stop,
    Take,
    Taken,
    Turn,
    Wait,
    Word,
)
from rl_runtime.controller.account import GENESIS, Account, apply
from rl_runtime.controller.group import Group
from rl_runtime.controller.rollouts import Rollouts
from rl_runtime.controller.settings import ControllerSettings
from rl_runtime.records import Began, Flushed, Record

Key = tuple[int, int]


def small_settings(**changes: object) -> ControllerSettings:
    """Return a configuration with tiny batches: four samples in two groups a step."""
    values: dict[str, object] = {
        "steps": 6, "n_init": 2, "n_generation": 2, "batch_samples": 4, "mini_batch": 1, "allowed_outdated_steps": 1,
        "flush_every": 2,
    }  # fmt: skip
    return ControllerSettings(**(values | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Snapshot:
    """A sealed state: what was applied, in order."""

    version: Version
    chain: str
    state: tuple[tuple[int, str], ...]

    @property
    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(repr(self.state).encode())

    def candidate(self, tier: str) -> Candidate:
        return Candidate(version=self.version, chain=self.chain, state_digest=self.digest, tier=tier)


@dataclass
class Memory:
    """A node's snapshot memory: the two newest."""

    snapshots: list[Snapshot] = field(default_factory=list)

    def seal(self, snapshot: Snapshot) -> None:
        self.snapshots = [*(one for one in self.snapshots if one.version != snapshot.version), snapshot][-2:]


@dataclass
class SimMember:
    """One start of one policy member."""

    name: MemberId
    incarnation: Incarnation
    arena: Arena
    stage: object = None
    version: Version | None = None
    chain: str = ""
    state: tuple[tuple[int, str], ...] = ()
    in_hand: dict[int, tuple[Key, ...]] = field(default_factory=dict)
    of: tuple[int, str] = (0, "")
    total: Counter[Key] = field(default_factory=Counter)
    epoch: int = 0
    sealed: Snapshot | None = None
    busy: Word | None = None
    """Word it is working on; None while it asks."""
    done: bool = False
    failed: set[Version] = field(default_factory=set)
    hung: bool = False
    """Stopped: it lives and does nothing."""
    flip: bool = False
    """Its next sum has a wrong bit."""

    def __post_init__(self) -> None:
        self._fresh()

    # -- what it says --------------------------------------------------------------------------------------------------

    def turn(self) -> Turn:
        return Turn(
            member=self.name,
            incarnation=self.incarnation,
            node=f"node-of-{self.name}",
            version=self.version,
            chain=self.chain,
            epoch=self.epoch,
            sealed=self.sealed.version if self.sealed else None,
            sealed_digest=self.sealed.digest if self.sealed else "",
            stage=self.stage,
        )

    def _fresh(self) -> None:
        self.version, self.chain, self.state = None, "", ()
        self.in_hand, self.of, self.total = {}, (0, ""), Counter()
        self.stage = Fresh(candidates=tuple(self.arena.candidates(self)))

    # -- what it is told -----------------------------------------------------------------------------------------------

    def obey(self, word: Word) -> None:
        """Take an answer; what takes time makes it busy until `work`."""
        match word:
            case Wait():
                pass
            case Leave():
                self._fresh()
            case Stop():
                self.done = True
            case Reduce():
                self.busy = word
                self.epoch = word.epoch
                self.arena.enter(self, word)
            case Host():
                assert isinstance(self.stage, (Computed, Hosting)), self.stage
                self.epoch = word.epoch
                self.stage = Hosting(
                    step=self.of[0], batch_digest=self.of[1], shares=self._shares(), epoch=word.epoch,
                    address=f"{self.name}.{self.incarnation}:{word.epoch}",
                )  # fmt: skip
            case _:
                self.busy = word

    def work(self) -> None:
        """Finish what it was told to do."""
        word, self.busy = self.busy, None
        match word:
            case Begin():
                self._have(Snapshot(Version(word.lineage, 0), GENESIS, ()), word.lineage)
            case Restore():
                snapshot = self.arena.find(self, word.version)
                if snapshot is None:
                    self.failed.add(word.version)
                    self._fresh()
                else:
                    self._have(snapshot, word.lineage)
            case Rehearse():
                self.stage = Rehearsed(seconds=0.5 if word.version else 0.0)
            case Take():
                snapshot = self.arena.find_held(word.version, word.state_digest)
                if snapshot is None:
                    self.stage = Rehearsed(seconds=0.5)
                else:
                    self._have(snapshot, word.lineage)
                    self.stage = Taken(version=word.version, state_digest=snapshot.digest)
            case Hold():
                assert self.version == word.version, (self.version, word)
                self._seal()
                assert self.sealed is not None
                self.stage = Held(version=word.version, state_digest=self.sealed.digest)
            case Compute():
                self._compute(word)
            case Committed():
                self._apply(word)
            case other:
                raise AssertionError(f"nothing to do for {other}")

    def reduced(self, total: Counter[Key]) -> None:
        """The collective gave a sum."""
        word, self.busy = self.busy, None
        assert isinstance(word, Reduce)
        self.total = total
        if self.flip and word.world > 1:
            self.flip, self.total = False, total + Counter({(-1, word.rank): 1})
        digest = xxhash.xxh3_64_hexdigest(repr(sorted(self.total.items())).encode())
        self.stage = Reduced(step=word.step, epoch=word.epoch, digest=digest, shares=self._shares())

    def aborted(self) -> None:
        """The collective failed."""
        word, self.busy = self.busy, None
        assert isinstance(word, Reduce)
        self.stage = Aborted(
            step=word.step,
            epoch=word.epoch,
            batch_digest=self.of[1],
            shares=self._shares(),
            reason="connection closed by peer",
        )

    # -- inside --------------------------------------------------------------------------------------------------------

    def _shares(self) -> tuple[int, ...]:
        return tuple(sorted(self.in_hand))

    def _have(self, snapshot: Snapshot, lineage: int) -> None:
        self.version, self.chain, self.state = Version(lineage, snapshot.version.step), snapshot.chain, snapshot.state
        self.stage = Ready()
        self._seal()

    def _seal(self) -> None:
        assert self.version is not None
        self.sealed = Snapshot(self.version, self.chain, self.state)
        self.arena.memories[self.name].seal(self.sealed)

    def _compute(self, word: Compute) -> None:
        assert self.version == Version(word.lineage, word.step - 1), (self.version, word.step, word.lineage)
        if self.of != (word.step, word.batch_digest):
            self.in_hand, self.of = {}, (word.step, word.batch_digest)
        for share in word.shares:
            assert share.number not in self.in_hand, "a share was computed twice by one member"
            self.in_hand[share.number] = tuple((sample.prompt_id, sample.index) for sample in share.samples)
        self.epoch = word.epoch
        self.stage = Computed(step=word.step, batch_digest=word.batch_digest, shares=self._shares())

    def _apply(self, word: Committed) -> None:
        assert isinstance(self.stage, Reduced)
        assert word.version.step == self.stage.step
        assert self.version is not None
        assert word.version == Version(self.version.lineage, self.version.step + 1), (self.version, word)
        self.arena.check_sum(word, self.of[1], self.total)
        applied = (word.version.step, xxhash.xxh3_64_hexdigest(repr(sorted(self.total.items())).encode()))
        self.version, self.chain, self.state = word.version, word.chain, (*self.state, applied)
        self.in_hand, self.of, self.total = {}, (0, ""), Counter()
        self.stage = Ready()
        if self.arena.random.random() < 0.8:
            self._seal()
        if word.flush and self.sealed is not None and self.sealed.version == word.version:
            self.arena.flush(self.sealed)


class Arena:
    """The whole world; every method is one event."""

    def __init__(self, settings: ControllerSettings, *, members: int = 2, workers: int = 2, seed: int = 0) -> None:
        self.settings = settings
        self.random = random.Random(seed)
        self.now = 1000.0
        self.records: list[Record] = []
        """Durable ones."""
        self.queue: list[Record] = []
        """Written and not durable."""
        self.memories: dict[MemberId, Memory] = {MemberId(f"policy-{n}"): Memory() for n in range(members)}
        self.members: dict[MemberId, SimMember] = {}
        self.dead: dict[MemberId, SimMember] = {}
        """Last start of each that was killed."""
        self.graves: list[tuple[MemberId, Incarnation]] = []
        """Deaths that nobody told the controller of yet."""
        self.storage: list[Snapshot] = []
        self.collectives: dict[int, dict[MemberId, SimMember]] = {}
        self.entered: dict[int, float] = {}
        self.summed: dict[tuple[int, int], str] = {}
        self.old_turns: list[Turn] = []
        self.acknowledged: set[Key] = set()
        self.workers: dict[MemberId, list[PromptLease]] = {MemberId(f"rollout-{n}"): [] for n in range(workers)}
        self.worker_starts: Counter[MemberId] = Counter()
        self.boots = 0
        self.account = Account()
        self.boot()
        for name in self.memories:
            self.start(name)

    # -- controller ----------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Start a controller from what is durable."""
        self.boots += 1
        self.queue.clear()
        self.account = Account()
        for record in self.records:
            apply(self.account, record)
        if self.account.began is None:
            self.write(
                Began(
                    rows=50,
                    rows_digest="",
                    rules="",
                    seed=0,
                    shuffle=True,
                    n_generation=self.settings.n_generation,
                    batch_samples=self.settings.batch_samples,
                )
            )
        self.group = Group(self.settings, self.account, self.write, self.now)
        self.rollouts = Rollouts(self.settings, self.account, self.write, SimRows(), boot=str(self.boots), now=self.now)
        self.check()

    def write(self, record: Record) -> None:
        apply(self.account, record)
        self.queue.append(record)

    def fsync(self) -> None:
        self.records += self.queue
        self.queue.clear()

    def check(self) -> None:
        """What must hold at any time."""
        account = self.account
        for key in self.acknowledged:
            assert account.holds(*key), f"{key} was acknowledged and is gone"
        prompts = [prompt for step in account.past for prompt in step.prompts]
        prompts += [prompt for deal in account.batches.values() for prompt in deal.prompts]
        prompts += [*account.waiting, *account.open]
        assert len(prompts) == len(set(prompts)), "a prompt is in two places"
        assert len(prompts) + account.filtered == account.cursor, "a prompt is nowhere"
        steps = [step.step for step in account.past] + sorted(account.commits)
        assert steps == list(range(1, account.head.step + 1)), steps

    # -- policy members ------------------------------------------------------------------------------------------------

    def start(self, name: MemberId) -> None:
        before = self.members.get(name)
        incarnation = Incarnation(before.incarnation + 1 if before else 0)
        self.members[name] = SimMember(name, incarnation, self)

    def kill(self, name: MemberId) -> None:
        member = self.members.pop(name, None)
        if member is None:
            return
        self.graves.append((name, member.incarnation))
        self.dead[name] = member

    def restart(self, name: MemberId) -> None:
        if name in self.members:
            return
        before = self.dead[name]
        self.members[name] = SimMember(name, Incarnation(before.incarnation + 1), self)

    def ask(self, name: MemberId, *, lose_reply: bool = False, crash: bool = False) -> None:
        """One turn of a member that is not busy."""
        member = self.members.get(name)
        if member is None or member.busy is not None or member.done or member.hung:
            return
        turn = member.turn()
        self.old_turns = [*self.old_turns[-20:], turn]
        self.group.hear(turn, self.now)
        word = self.group.word(turn, self.now)
        if crash:
            self.boot()
            return
        self.fsync()
        self.check()
        if not lose_reply:
            member.obey(word)

    def late(self, number: int) -> None:
        """An old turn arrives again; nobody listens for the answer."""
        if self.old_turns:
            turn = self.old_turns[number % len(self.old_turns)]
            self.group.hear(turn, self.now)
            self.group.word(turn, self.now)
            self.fsync()

    def work(self, name: MemberId) -> None:
        member = self.members.get(name)
        if member is not None and member.busy is not None and not member.hung and not isinstance(member.busy, Reduce):
            member.work()

    def enter(self, member: SimMember, word: Reduce) -> None:
        room = self.collectives.setdefault(word.epoch, {})
        self.entered.setdefault(word.epoch, self.now)
        room[member.name] = member
        assert word.rank == self.account.epoch.members.index(member.name) or word.epoch != self.account.epoch.number
        if word.world == 1:
            member.reduced(Counter(key for keys in member.in_hand.values() for key in keys))

    def collective(self, epoch: int, *, lucky: int = -1) -> None:
        """Let a reduction end: with its sum where everybody came and lives, else (or for all but `lucky` of them) aborted."""
        room = {
            name: one
            for name, one in self.collectives.pop(epoch, {}).items()
            if isinstance(one.busy, Reduce) and one.busy.epoch == epoch
        }
        here = [one for one in room.values() if self.members.get(one.name) is one and not one.hung]
        if not here:
            return
        word = here[0].busy
        assert isinstance(word, Reduce)
        whole = (
            len(room) == word.world
            and len({(one.busy.step, one.of) for one in room.values() if isinstance(one.busy, Reduce)}) == 1
        )
        total = Counter(key for one in room.values() for keys in one.in_hand.values() for key in keys)
        for number, one in enumerate(here):
            if whole and (lucky < 0 or number < lucky) and (len(here) == len(room) or lucky >= 0):
                one.reduced(Counter(total))
            else:
                one.aborted()

    def notify(self) -> None:
        """Deliver the death notices."""
        graves, self.graves = self.graves, []
        for name, incarnation in graves:
            self.group.died(name, incarnation, self.now)
        self.fsync()

    def propose(self, name: MemberId, replaces: int) -> bool:
        taken = self.group.propose(EpochProposal(term=1, replaces=replaces, leave=(name,), cause="test"), self.now)
        self.fsync()
        return taken

    def check_sum(self, word: Committed, digest: str, total: Counter[Key]) -> None:
        """Each share of a committed step is in exactly one member's sum, and all members apply the same sum."""
        batch = next(
            r
            for r in reversed(self.records)
            if type(r).__name__ == "Dealt" and (r.step, r.lineage) == (word.version.step, word.version.lineage)
        )
        wanted = Counter((prompt, index) for prompt in batch.prompts for index in range(self.settings.n_generation))
        assert total == wanted, f"step {word.version}: {total} was applied for {wanted}"
        assert digest == batch.batch_digest
        before = self.summed.setdefault((word.version.lineage, word.version.step), digest)
        assert before == digest, "a step was committed twice"

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def candidates(self, member: SimMember) -> list[Candidate]:
        own = [snapshot.candidate("shm") for snapshot in self.memories[member.name].snapshots]
        stored = [snapshot.candidate("storage") for snapshot in self.storage[-3:]]
        return [one for one in own + stored if one.version not in member.failed]

    def find(self, member: SimMember, version: Version) -> Snapshot | None:
        places = self.memories[member.name].snapshots + self.storage
        return next((one for one in reversed(places) if one.version == version), None)

    def find_held(self, version: Version, digest: str) -> Snapshot | None:
        places = [one for memory in self.memories.values() for one in memory.snapshots]
        return next((one for one in places if (one.version, one.digest) == (version, digest)), None)

    def flush(self, snapshot: Snapshot) -> None:
        self.storage.append(snapshot)
        if self.account.is_live(snapshot.version, snapshot.chain):
            self.write(Flushed(version=snapshot.version))

    def lose_node(self, name: MemberId) -> None:
        self.kill(name)
        self.memories[name] = Memory()

    # -- rollouts ------------------------------------------------------------------------------------------------------

    def lease(self, worker: MemberId, capacity: int = 3) -> None:
        offer = self.group.offer()
        request = LeaseRequest(
            member=worker, incarnation=Incarnation(self.worker_starts[worker]), node="n", capacity=capacity,
            version=offer.version if offer else None, holding=tuple(lease.lease_id for lease in self.workers[worker]),
        )  # fmt: skip
        reply = self.rollouts.lease(request, offer, self.now)
        self.fsync()
        mine = [lease for lease in self.workers[worker] if lease.lease_id not in reply.dropped]
        self.workers[worker] = mine + list(reply.leases)

    def stream(self, worker: MemberId) -> None:
        for lease in self.workers[worker]:
            head = self.account.head
            piece = Piece(tokens=(1,), logprobs=(-0.5,), versions=(head,))
            partial = Partial(lease_id=lease.lease_id, start=len(lease.prefix.tokens), prompt_tokens=(7,), piece=piece)
            self.rollouts.stream(
                StreamRequest(member=worker, incarnation=Incarnation(self.worker_starts[worker]), partials=(partial,)),
                None,
                self.now,
            )

    def complete(self, worker: MemberId, number: int = 0, *, lose_reply: bool = False, crash: bool = False) -> None:
        if not self.workers[worker]:
            return
        lease = self.workers[worker][number % len(self.workers[worker])]
        offer = self.group.offer()
        version = offer.version if offer else self.account.head
        tokens = 1 + (lease.seed % 3)
        completion = Completion(
            lease_id=lease.lease_id, prompt_id=lease.prompt_id, index=lease.index, prompt_tokens=(7, 8),
            piece=Piece(tokens=(lease.seed % 97,) * tokens, logprobs=(-1.0,) * tokens, versions=(version,) * tokens),
            text="x", reward=float(lease.seed % 2), finish="stop",
        )  # fmt: skip
        reply = self.rollouts.complete(
            CompleteRequest(member=worker, incarnation=Incarnation(0), completions=(completion,))
        )
        self.group.tick(self.now)
        if crash:
            self.boot()
            return
        self.fsync()
        self.check()
        if lose_reply:
            return
        if reply.results[0] in ("admitted", "duplicate"):
            self.acknowledged.add((lease.prompt_id, lease.index))
        self.workers[worker].remove(lease)

    def kill_worker(self, worker: MemberId) -> None:
        self.rollouts.died(worker, Incarnation(self.worker_starts[worker]))
        self.worker_starts[worker] += 1
        self.workers[worker] = []

    # -- time ----------------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.rollouts.tick(self.now)
        self.group.tick(self.now)
        self.fsync()
        self.check()

    def round(self, *, seconds: float = 0.6, rollouts: bool = True, restarts: bool = True) -> None:
        """Let everybody do one thing, without any new fault."""
        for name in [name for name, member in self.members.items() if member.hung and restarts]:
            self.kill(name)
        self.notify()
        for name in list(self.memories):
            if name not in self.members and restarts:
                self.restart(name)
            self.ask(name)
            self.work(name)
        self.end_collectives()
        for worker in self.workers if rollouts else ():
            self.lease(worker)
            self.complete(worker)
            self.complete(worker)
        self.pass_time(seconds)

    def end_collectives(self) -> None:
        """End the reductions that are whole, lost a member, or ran into the group timeout."""
        for epoch, room in list(self.collectives.items()):
            here = [one for one in room.values() if self.members.get(one.name) is one and isinstance(one.busy, Reduce)]
            whole = bool(here) and isinstance(here[0].busy, Reduce) and len(here) == here[0].busy.world
            late = self.now > self.entered[epoch] + self.settings.group_timeout_seconds
            if (whole and not any(one.hung for one in here)) or len(here) < len(room) or late:
                self.collective(epoch)

    def run_until(self, wanted: Callable[[], bool], rounds: int = 200, **how: Any) -> None:
        """Go on, without faults, until something is so."""
        for _ in range(rounds):
            if wanted():
                return
            self.round(**how)
        raise AssertionError(f"it did not come about: head {self.account.head}, epoch {self.account.epoch}")

    def run_fairly(self, rounds: int = 400) -> bool:
        """Let everybody do their work without any fault; True when the run finishes."""
        for _ in range(rounds):
            if self.account.finished and all(member.done for member in self.members.values()):
                return True
            self.round()
        return False


class SimRows:
    """Fifty rows."""

    def __len__(self) -> int:
        return 50

    def row(self, position: int) -> dict[str, str]:
        return {"prompt": f"p{position}", "answer": "a"}

    def __getitem__(self, place: object) -> object:
        raise NotImplementedError
