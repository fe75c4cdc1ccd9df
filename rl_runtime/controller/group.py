"""The policy members' state machine. Pure: turns, deaths and time in; records and words out.

`hear`, `died`, `propose` and `tick` note what happened and let everything follow that now can: epochs, deals, commits, joins.
`word` looks up the answer to a turn. What must survive goes through `write` into the ledger; the roll of members and the tries
in progress are memory, which resent turns rebuild. So a turn may come twice, late, or to a restarted controller.

Invariants: a step of a lineage commits once, with the votes of all members of the current epoch, and each share of it is in
exactly one member's reduced sum. Whoever calls must not answer before all records written so far are durable.
"""

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.rollout import Offer
from aimaster.wire.topology import Epoch, EpochProposal
from aimaster.wire.training import Fresh, Hosting, Reduced, Rehearsed, Turn, Word
from rl_runtime.controller import words
from rl_runtime.controller.account import Account, next_chain
from rl_runtime.controller.batches import Batch, make_batch, next_prompts, to_filter
from rl_runtime.controller.errors import LedgerBrokenError, LedgerLostError, RefusalError, StateLostError
from rl_runtime.controller.findings import MOST, Found, note
from rl_runtime.controller.founding import Founder, NothingToRestoreError, choose, still_stands
from rl_runtime.controller.joining import Joining
from rl_runtime.controller.lapses import Change, Lapses
from rl_runtime.controller.roll import Roll
from rl_runtime.controller.seals import differing_seals, newest_offer
from rl_runtime.controller.settings import ControllerSettings, flusher
from rl_runtime.controller.trouble import all_but_one, minority
from rl_runtime.records import Committed, EpochOpened, Finished, Record

CHANGES_AT_ONCE = 1000
"""More changes than this from one event is a defect, not a workload."""
SEAL_PATIENCE_SECONDS = 1.5
"""A member's own save of the head may take so long (or be skipped, its slots being pinned) before one is forced."""
DIVERGENCE_CURES = 3
"""So many times members whose sealed states differ are sent to restore; after that (unlike machines?) it is only reported."""


class Group:
    """See the module."""

    def __init__(
        self, settings: ControllerSettings, account: Account, write: Callable[[Record], None], now: float
    ) -> None:
        self.settings = settings
        self.account = account
        self.roll = Roll()
        self.joining = Joining(settings, self.roll)
        self.founder: Founder | None = None
        self.address = ""
        """Of the current epoch's store."""
        self.findings: deque[Found] = deque(maxlen=MOST)
        """Newest last."""
        self.stopping = ""
        """Reason of a stop that was asked for."""
        self.refusal: RefusalError | None = None
        """Why this run cannot go on at all; the process is to end with it."""
        self.changes = 0
        """Rises with everything that may change somebody's word."""
        self._write_record = write
        self._lapses = Lapses(now)
        self._head_at = now
        """When the head came to be, as far as this controller knows."""
        self._expelled: set[tuple[MemberId, Incarnation]] = set()
        """Must drop their state and come back fresh."""
        self._cures = 0
        self._term = 0
        """Newest of a master that proposed."""
        self._batch: Batch | None = None
        self._lost_since: float | None = None
        """Since when nobody who asks has anything that could be restored."""

    # -- what happens --------------------------------------------------------------------------------------------------

    def hear(self, turn: Turn, now: float) -> None:
        """Note a member's turn."""
        epoch = self.account.epoch
        before = self.roll.seen.get(turn.member)
        if not self.roll.hear(turn, epoch.number, now):
            return
        if before is None or before.epoch != epoch.number or before.turn.stage != turn.stage:
            self.changes += 1  # somebody may be waiting for just this
        if epoch.incarnations.get(turn.member, turn.incarnation) < turn.incarnation:
            # Whoever started it anew knows of the death: there is no proposal to wait for.
            self._lapses.note_death(turn.member, now)
        if isinstance(turn.stage, Fresh):
            self._expelled.discard((turn.member, turn.incarnation))
        if self.is_in(turn.member, turn.incarnation):
            self._lapses.note_turn(turn, epoch.number, now)
            if isinstance(turn.stage, Hosting) and turn.stage.epoch == epoch.number and turn.member == epoch.members[0]:
                self.address = turn.stage.address
        self._note_rehearsal(turn, now)
        self._compare_seals(turn, now)
        self.advance(now)

    def died(self, member: MemberId, incarnation: Incarnation, now: float) -> None:
        """A start of a member is dead beyond doubt."""
        self.roll.bury(member, incarnation)
        epoch = self.account.epoch
        if member in epoch.members and epoch.incarnations[member] <= incarnation:
            self._lapses.note_death(member, now + self.settings.master_silence_seconds)
        self.advance(now)

    def propose(self, proposal: EpochProposal, now: float) -> bool:
        """The master wants an epoch without some; False when it speaks of an epoch that is past, or is itself of the past."""
        self.advance(now)
        if proposal.replaces != self.account.epoch.number or proposal.term < self._term:
            return False
        self._term = proposal.term
        leave = [member for member in proposal.leave if member in self.account.epoch.members]
        if leave:
            self._leave_out(leave, proposal.cause, now)
            self.advance(now)
        return True

    def tick(self, now: float) -> None:
        """Time went on."""
        self.advance(now)

    def stop(self, reason: str, now: float) -> None:
        """Let everybody go; the run can be resumed."""
        self.stopping = self.stopping or reason
        self.advance(now)

    def advance(self, now: float) -> None:
        """Let everything follow that now can."""
        for _ in range(CHANGES_AT_ONCE):
            if not (
                self._vote(now)
                or self._lapse(now)
                or self._found(now)
                or self._join(now)
                or self._next(now)
                or self._finish(now)
            ):
                return
            self.changes += 1
        raise LedgerBrokenError(f"the group changes without end at {self.account.head}, epoch {self.account.epoch}")

    def word(self, turn: Turn, now: float) -> Word:
        """Look up the answer to a turn that was heard."""
        return words.answer(self, turn, now)

    # -- what it is, for words and reports -----------------------------------------------------------------------------

    @property
    def batch(self) -> Batch | None:
        """The open deal with its samples."""
        deal = self.account.open_deal
        if deal is None:
            return None
        if self._batch is None or self._batch.dealt is not deal:
            batch = make_batch(self.account, self.settings, deal.prompts, deal.at)
            if batch.dealt.batch_digest != deal.batch_digest:
                raise LedgerBrokenError(
                    f"the batch of step {deal.step} is {batch.dealt.batch_digest}, the ledger dealt {deal.batch_digest}"
                )
            self._batch = msgspec.structs.replace(batch, dealt=deal)
        return self._batch

    def offer(self) -> Offer | None:
        """Return what rollouts are offered."""
        return newest_offer(self.account, self.roll)

    def is_in(self, member: MemberId, incarnation: Incarnation) -> bool:
        """Tell whether this start of the member is in the current epoch."""
        return member in self.account.epoch.members and self.account.epoch.incarnations[member] == incarnation

    def spoke(self, member: MemberId) -> Turn | None:
        """Return the newest turn of a member of the epoch, if it said it in this epoch."""
        seen = self.roll.seen.get(member)
        if seen is None or seen.epoch != self.account.epoch.number or not self.is_in(member, seen.turn.incarnation):
            return None
        return seen.turn

    def is_settled(self, member: MemberId, incarnation: Incarnation) -> bool:
        """Tell whether nothing more follows from the death of this start."""
        epoch = self.account.epoch
        return member not in epoch.members or epoch.incarnations[member] > incarnation

    def needs_seal(self, now: float) -> bool:
        """Tell whether a snapshot of the head must be forced: the run ends with it, or rollouts wait for newer weights than any sealed."""
        if any(seal.version == self.account.head for seal in self.roll.seals.values()):
            return False
        return self.account.head.step >= self.settings.steps or now >= self._head_at + SEAL_PATIENCE_SECONDS

    # -- votes and commits ---------------------------------------------------------------------------------------------

    def _vote(self, now: float) -> bool:
        """Commit the step, or find that it cannot be."""
        deal, epoch = self.account.open_deal, self.account.epoch
        if deal is None or not epoch.members:
            return False
        votes: dict[MemberId, Reduced] = {}
        for member in epoch.members:
            turn = self.spoke(member)
            if turn is None or not isinstance(turn.stage, Reduced) or not words.is_at_head(self, turn):
                return False
            if (turn.stage.step, turn.stage.epoch) != (deal.step, epoch.number):
                return False
            votes[member] = turn.stage
        if any(set(vote.shares) != set(self.account.assignment[member]) for member, vote in votes.items()):
            self._find(
                "reduction.shares",
                f"step {deal.step}: the members' sums do not hold each share once; reduced again",
                now,
            )
            self._follow(Change(cause="the sums did not hold each share once"), now)
            return True
        digests = {member: vote.digest for member, vote in votes.items()}
        if len(set(digests.values())) > 1:
            self._follow(self._lapses.differing(digests, deal.step), now)
        else:
            self._commit(votes[epoch.members[0]].digest, now)
        return True

    def _commit(self, gradient_digest: str, now: float) -> None:
        deal, epoch = self.account.open_deal, self.account.epoch
        assert deal is not None  # noqa: S101 - the caller looked
        self._write(
            Committed(
                lineage=deal.lineage,
                step=deal.step,
                epoch=epoch.number,
                gradient_digest=gradient_digest,
                batch_digest=deal.batch_digest,
                chain=next_chain(self.account.chain, deal.step, deal.batch_digest),
                flusher=flusher(self.settings, deal.step, epoch.members),
                at=now,
            )
        )
        self._new_head(now)

    # -- epochs --------------------------------------------------------------------------------------------------------

    def _lapse(self, now: float) -> bool:
        change = self._lapses.change(self, now)
        if change is not None:
            self._follow(change, now)
        return change is not None

    def _follow(self, change: Change, now: float) -> None:
        if change.finding is not None:
            self._find(*change.finding, now)
        self._leave_out(change.leave, change.cause, now)

    def _leave_out(self, leave: Sequence[MemberId], cause: str, now: float) -> None:
        epoch = self.account.epoch
        self._expelled |= {(member, epoch.incarnations[member]) for member in leave}
        stay = tuple(member for member in epoch.members if member not in leave)
        self._open_epoch(stay, {member: epoch.incarnations[member] for member in stay}, cause, now)

    def _open_epoch(
        self, members: tuple[MemberId, ...], incarnations: dict[MemberId, Incarnation], cause: str, now: float
    ) -> None:
        epoch = Epoch(
            number=self.account.epoch.number + 1, members=members, incarnations=dict(incarnations), cause=cause
        )
        self._write(EpochOpened(epoch=epoch, at=now))
        self.address = ""
        self._lapses.begin_epoch(members, now)
        self.joining.cancel()

    def _found(self, now: float) -> bool:
        """With nobody in, let the member come in that has the head, or choose one that brings it up."""
        if self.account.epoch.members or self.account.finished or self.stopping:
            return False
        for member, seen in sorted(self.roll.seen.items()):
            known = (member, seen.turn.incarnation)
            if (
                self.roll.is_live(member)
                and known not in self._expelled
                and words.has_state(seen.turn)
                and words.is_at_head(self, seen.turn)
            ):
                self.founder = None
                self._open_epoch((member,), {member: seen.turn.incarnation}, f"{member} has the newest state", now)
                return True
        if self.founder is not None and still_stands(self.founder, self.settings, self.roll, now):
            return False
        self.founder = None
        try:
            chosen = choose(self.account, self.settings, self.roll, now)
        except NothingToRestoreError:
            self._lose_state(now)
            return False
        except LedgerLostError as error:
            self.refusal = error
            return False
        if chosen is None:
            return False
        self._lost_since = None
        self.founder, rewind = chosen
        if rewind is not None:
            self._write(rewind)
            self._new_head(now)
        return True

    def _lose_state(self, now: float) -> None:
        """Nothing is invented: others are waited for a while, and then the run is given up with what is missing."""
        error = StateLostError(self.account.floor, self.account.head.step)
        self._find(error.category, str(error), now)
        self._lost_since = now if self._lost_since is None else self._lost_since
        if now - self._lost_since >= self.settings.lost_patience_seconds:
            self.refusal = error

    # -- joins ---------------------------------------------------------------------------------------------------------

    def _join(self, now: float) -> bool:
        verdict = self.joining.go_on(self.account.epoch.members, now)
        if verdict is None:
            return False
        epoch = self.account.epoch
        if verdict.differing:
            leave = all_but_one(minority(verdict.differing), verdict.differing)
            self._find(
                "replica.diverged",
                f"states differ at step {self.account.head.step}; {', '.join(leave)} restore(s) a snapshot",
                now,
            )
            self._leave_out(leave, "states differed in a hold", now)
            return True
        for member in verdict.refused:
            self._find(
                "join.refused", f"{member} took a state that is not the others' at step {self.account.head.step}", now
            )
        for member in verdict.late:
            self._find("join.late", f"{member} did not join within the hold; it tries again later", now)
        if verdict.joined:
            incarnations = epoch.incarnations | {m: self.roll.seen[m].turn.incarnation for m in verdict.joined}
            self._open_epoch(epoch.members + verdict.joined, incarnations, f"{', '.join(verdict.joined)} joined", now)
        return True

    def _note_rehearsal(self, turn: Turn, now: float) -> None:
        if not isinstance(turn.stage, Rehearsed):
            return
        self.joining.note(turn.member, turn.stage.seconds)
        if self.joining.needs_more_than_allowed(turn.stage.seconds):
            self._find(
                "join.slow",
                f"{turn.member} needs {turn.stage.seconds:.1f} s to copy a snapshot; it can hardly join within "
                f"aimaster.leases.join_hold_seconds = {self.settings.join_hold_seconds:g}: raise it",
                now,
            )

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _next(self, now: float) -> bool:
        """At a step boundary: let somebody join, else deal the next batch."""
        account = self.account
        at_boundary = bool(account.epoch.members) and account.open_deal is None and self.joining.hold is None
        if not at_boundary or account.finished or self.stopping or account.head.step >= self.settings.steps:
            return False
        if self.joining.begin(account.epoch.members, account.head, costs_nothing=not self.has_started, now=now):
            return True
        if not self._may_start(now):
            return False
        filtered = list(to_filter(account, self.settings))
        for record in filtered:
            self._write(record)
        prompts = next_prompts(account, self.settings)
        if prompts is None:
            return bool(filtered)
        batch = make_batch(account, self.settings, prompts, now)
        self._batch = batch
        self._write(batch.dealt)
        return True

    @property
    def has_started(self) -> bool:
        """Tell whether anything was ever dealt."""
        return bool(self.account.batches or self.account.past)

    def _may_start(self, now: float) -> bool:
        """Whether a new run has its members, or has waited long enough for them."""
        if self.has_started or len(self.account.epoch.members) >= self.settings.n_init:
            return True
        coming = any(True for kind in (Fresh, Rehearsed) for _ in self.roll.waiting(kind, now))
        patience = self.settings.start_patience_seconds * (4 if coming else 1)
        return now >= self._lapses.epoch_opened_at + patience

    def _finish(self, now: float) -> bool:
        account = self.account
        if account.finished or account.head.step < self.settings.steps:
            return False
        if not any(seal.version == account.head for seal in self.roll.seals.values()):
            return False
        self._write(Finished(step=account.head.step, at=now))
        return True

    def _new_head(self, now: float) -> None:
        self._head_at = now
        self._batch = None
        self._lapses.begin_step()

    def _compare_seals(self, turn: Turn, now: float) -> None:
        """Replicas that sealed the same step must have sealed the same state."""
        if not self.is_in(turn.member, turn.incarnation):
            return
        digests = differing_seals(self.account, self.roll, turn.member)
        if not digests:
            return
        text = f"sealed states differ: {', '.join(f'{member} {digest[:8]}' for member, digest in digests.items())}"
        self._find("replica.diverged", text, now)
        if self._cures < DIVERGENCE_CURES:
            self._cures += 1
            leave = all_but_one(minority(digests), digests)
            self.roll.forget_seals(leave)
            self._leave_out(leave, text, now)

    def _find(self, category: str, text: str, now: float) -> None:
        note(self.findings, category, text, now)

    def _write(self, record: Record) -> None:
        self._write_record(record)
        self.changes += 1
