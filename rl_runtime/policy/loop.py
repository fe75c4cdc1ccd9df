"""The turn loop of a policy member: say what is in hand, do what is answered, say it again.

    Turn(stage) -> Word -> (a stage's deed) -> the next stage

Everything lasting is decided by the controller. The loop keeps local gradients until their step is committed, applies nothing
before `Committed`, and on any doubt comes back with what it has: a resent turn changes nothing. Only `Stop` ends it; an exception
of the model's or the user's code is not caught here and ends the process with its traceback.
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog
from torch import Tensor

from aimaster.wire.checkpoint import Version
from aimaster.wire.training import (
    Aborted,
    Begin,
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
    Stage,
    Stop,
    Take,
    Taken,
    Turn,
    Wait,
)
from rl_runtime.algo.loss import Normaliser
from rl_runtime.drills import Drills
from rl_runtime.elastic import ElasticGroup, ReductionAborted
from rl_runtime.links.base import PolicyLink
from rl_runtime.member import Identity
from rl_runtime.policy.gradients import GradientNote, keep_gradient
from rl_runtime.policy.state import MemberState
from rl_runtime.policy.trainer import Batch, digest

WAIT_PAUSE_SECONDS = 0.01
"""Between a Wait and the next question; the controller holds the question itself."""

RETAKE_PAUSE_SECONDS = 0.2
"""After a state that could not be taken; the hold may still go on."""

Joining = Begin | Restore | Rehearse | Take | Leave
Training = Hold | Compute | Host | Reduce | Committed

log = structlog.get_logger("policy")


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """A reduced gradient that waits for its commit."""

    stage: Reduced
    reduced: Tensor


class PolicyLoop:
    """See the module."""

    def __init__(
        self,
        identity: Identity,
        link: PolicyLink,
        state: MemberState,
        group: ElasticGroup,
        drills: Drills,
        *,
        beat: Callable[[str], None],
        gradients: Path | None = None,
    ) -> None:
        """`gradients`: the folder in which each committed step's reduced gradient is kept; None: it is not."""
        self._identity = identity
        self._link = link
        self._state = state
        self._group = group
        self._drills = drills
        self._beat = beat
        self._gradients = gradients
        self._epoch = 0
        self._stage: Stage = Fresh()
        self._learning_rate = 0.0
        self._vote: Vote | None = None
        self._figures: dict[str, float] = {}

    def run(self) -> str:
        """Take turns until told to stop; return the reason."""
        self._stage = Fresh(candidates=self._state.candidates())
        while True:
            word = self._link.turn(self._turn())
            if isinstance(word, Stop):
                log.info("stopping", reason=word.reason)
                return word.reason
            self._stage = self._obey(word)

    def close(self) -> None:
        self._group.close()
        self._state.close()

    def _turn(self) -> Turn:
        sealed = self._state.sealed
        return Turn(
            member=self._identity.member,
            incarnation=self._identity.incarnation,
            node=self._identity.node,
            version=self._state.version,
            chain=self._state.chain,
            epoch=self._epoch,
            sealed=None if sealed is None else Version(sealed.lineage, sealed.step),
            sealed_digest="" if sealed is None else sealed.state_digest,
            stage=self._stage,
            figures=self._figures | self._state.figures(),
        )

    def _obey(self, word: Wait | Joining | Training) -> Stage:
        if isinstance(word, Wait):
            time.sleep(WAIT_PAUSE_SECONDS)
            return Fresh(candidates=self._state.candidates()) if isinstance(self._stage, Fresh) else self._stage
        if isinstance(word, Joining):
            return self._join(word)
        return self._train(word)

    def _join(self, word: Joining) -> Stage:
        """Come to a state, or drop it."""
        match word:
            case Take():
                return self._take(word)
            case Begin():
                self._forget()
                self._state.begin(word.lineage)
                return Ready()
            case Restore():
                self._forget()
                return Ready() if self._state.restore(word.version, word.lineage) else self._fresh()
            case Rehearse():
                self._forget()
                return Rehearsed(seconds=self._state.rehearse(word.version))
            case Leave():
                log.warning("left", reason=word.reason)
                return self._fresh()

    def _train(self, word: Training) -> Stage:
        """Take part in a step, with the state in place."""
        match word:
            case Hold():
                return self._hold(word)
            case Compute():
                return self._compute(word)
            case Host():
                return self._host(word)
            case Reduce():
                return self._reduce(word)
            case Committed():
                return self._commit(word)

    def _fresh(self) -> Fresh:
        self._forget()
        self._state.drop()
        return Fresh(candidates=self._state.candidates())

    def _forget(self) -> None:
        """Drop what belongs to a past membership."""
        self._vote = None
        self._group.close()

    def _take(self, word: Take) -> Stage:
        taken = self._state.take(word.version, word.lineage, word.deadline_seconds)
        if taken is None or self._state.version is None:
            time.sleep(RETAKE_PAUSE_SECONDS)
            return Rehearsed(seconds=0.0)
        if taken != word.state_digest:
            log.error("the state taken is not the others'", taken=taken, expected=word.state_digest)
        return Taken(version=self._state.version, state_digest=taken)

    def _hold(self, word: Hold) -> Stage:
        if word.version != self._state.version:
            return self._stage  # the controller will see the difference and say Leave
        sealed = self._state.seal(self._epoch)
        return self._stage if sealed is None else Held(version=word.version, state_digest=sealed.state_digest)

    def _compute(self, word: Compute) -> Stage:
        version = self._state.version
        if version is None or version != Version(word.lineage, word.step - 1):
            log.error("asked to compute a step that does not follow", version=version, step=word.step)
            return self._fresh()
        self._beat("compute")
        self._drills.at(word.step)
        self._epoch = max(self._epoch, word.epoch)
        self._learning_rate = word.learning_rate
        self._vote = None
        trainer = self._state.trainer
        trainer.begin(Batch(step=word.step, digest=word.batch_digest))
        norm = Normaliser(tokens=word.loss_tokens, sequences=word.sequences)
        started = time.monotonic()
        for share in word.shares:
            trainer.add(share, norm=norm, beat=lambda: self._beat("compute"))
        if word.shares:
            self._figures = trainer.figures.means() | {"compute_seconds": time.monotonic() - started}
        return Computed(step=word.step, batch_digest=word.batch_digest, shares=tuple(sorted(trainer.shares)))

    def _host(self, word: Host) -> Stage:
        self._epoch = max(self._epoch, word.epoch)
        stage = self._stage
        if not isinstance(stage, Computed | Hosting):
            return stage
        return Hosting(
            step=stage.step,
            batch_digest=stage.batch_digest,
            shares=stage.shares,
            epoch=word.epoch,
            address=self._group.host(word.epoch),
        )

    def _reduce(self, word: Reduce) -> Stage:
        self._epoch = max(self._epoch, word.epoch)
        if self._vote is not None and (self._vote.stage.step, self._vote.stage.epoch) == (word.step, word.epoch):
            return self._vote.stage
        batch = self._state.trainer.batch
        if batch is None or batch.step != word.step:
            return self._fresh()
        shares = tuple(sorted(self._state.trainer.shares))
        self._beat("reduce")
        started = time.monotonic()
        try:
            reduced = self._group.reduce(
                self._state.trainer.gradient, word, still_wanted=lambda: self._is_still_wanted(word)
            )
        except ReductionAborted as aborted:
            log.warning("reduction aborted", step=word.step, epoch=word.epoch, reason=str(aborted))
            return Aborted(
                step=word.step, epoch=word.epoch, batch_digest=batch.digest, shares=shares, reason=str(aborted)
            )
        self._figures["reduce_seconds"] = time.monotonic() - started
        stage = Reduced(step=word.step, epoch=word.epoch, digest=digest(reduced), shares=shares)
        self._vote = Vote(stage=stage, reduced=reduced)
        return stage

    def _is_still_wanted(self, word: Reduce) -> bool:
        """Ask the same question again: whether this reduction is still the answer."""
        again = self._link.turn(self._turn())
        return isinstance(again, Reduce) and again.epoch == word.epoch

    def _commit(self, word: Committed) -> Stage:
        vote, version = self._vote, self._state.version
        if vote is None or version is None or word.version.step != vote.stage.step:
            log.error("told of a commit that was not voted for", version=version, committed=word.version)
            return self._fresh()
        self._beat("compute")
        self._epoch = max(self._epoch, word.epoch)
        if self._gradients is not None:
            self._keep(word, vote, self._gradients)
        norm = self._state.commit(word, vote.reduced, learning_rate=self._learning_rate)
        self._vote = None
        self._figures["gradient_norm"] = norm
        return Ready()

    def _keep(self, word: Committed, vote: Vote, folder: Path) -> None:
        """Keep the gradient before it is applied, so that a step whose state exists has its gradient too."""
        batch = self._state.trainer.batch
        note = GradientNote(
            version=word.version,
            epoch=vote.stage.epoch,
            batch_digest=batch.digest if batch is not None else "",
            shares=vote.stage.shares,
            learning_rate=self._learning_rate,
        )
        keep_gradient(folder, note, dict(self._state.trainer.views(vote.reduced)))
