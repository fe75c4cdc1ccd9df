"""The state of one policy member and its snapshots: how it comes to be, is sealed, restored, taken from a peer, and advanced.

    begin | restore | (rehearse, take) -> commit -> commit -> ...          seal: a forced snapshot, for a hold

`version` and `chain` say what is in place; None while it is not to be relied on. A snapshot that turns out damaged is remembered as
refused and is no candidate again.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog
from torch import Tensor

from aimaster.wire.checkpoint import FetchRequest, Version
from aimaster.wire.training import Candidate, Committed
from easyckpt import Checkpointer, Sealed
from easyckpt.errors import Corrupt, Mismatch, SaveFailed
from rl_runtime.config import PolicySettings
from rl_runtime.evaluate import Rows, evaluate_weights
from rl_runtime.links.base import SnapshotLink
from rl_runtime.models.base import Bundle
from rl_runtime.models.load import load_model
from rl_runtime.policy.origin import fill_from
from rl_runtime.policy.trainer import Trainer
from rl_runtime.policy.warm_start import warm_start

ROLE = "policy"
LOOK_SECONDS = 2.0
"""A fresh member asks other nodes for so long what they have."""
FETCH_SECONDS = 60.0
SEAL_POLL_SECONDS = 0.02

log = structlog.get_logger("state")


class MemberState:
    """See the module."""

    def __init__(
        self,
        settings: PolicySettings,
        checkpointer: Checkpointer,
        agent: SnapshotLink,
        *,
        rows: Sequence[dict[str, str]],
        heldout: Rows,
        steps: int,
        device: str,
        beat: Callable[[str], None],
    ) -> None:
        self.version: Version | None = None
        self.chain = ""
        self.skipped_saves = 0
        self._settings = settings
        self._checkpointer = checkpointer
        self._agent = agent
        self._rows = rows
        self._heldout = heldout
        self._steps = steps
        self._device = device
        self._beat = beat
        self._bundle: Bundle = load_model(settings.model)
        self.trainer = Trainer(
            self._bundle.model,
            loss=settings.loss,
            optimizer=settings.optimizer,
            micro_rows=settings.micro_rows,
            seed=settings.seed,
            device=device,
        )
        self._evaluations: dict[str, float] = {}
        self._state = {**self.trainer.state(), "evaluations": self._evaluations}
        self._refused: set[Version] = set()
        self._owes_flush = False
        """A snapshot that was to go to storage was skipped or lost; the next one goes in its place."""
        self._under_way: Version | None = None
        """Of the newest save that was begun."""
        self._flushes_under_way = False
        self._looked = False
        self._pristine = True
        """The weights are as the configuration gives them."""

    @property
    def sealed(self) -> Sealed | None:
        """The newest snapshot of this process's own, of what it is or was on the way to where it is."""
        newest = self._checkpointer.newest
        if newest is None or self.version is None or Version(newest.lineage, newest.step) > self.version:
            return None
        return newest

    def figures(self) -> dict[str, float]:
        """Return what a turn tells besides the training figures."""
        return self._evaluations | {"skipped_saves": float(self.skipped_saves)}

    def drop(self) -> None:
        """Rely on nothing any more."""
        self.version, self.chain = None, ""
        self.trainer.drop()

    def candidates(self) -> tuple[Candidate, ...]:
        """Return whole snapshots that could be restored, newest first, after asking other nodes once for newer ones."""
        self._beat("restore")
        if not self._looked:
            self._looked = True
            here = self._checkpointer.candidates()
            newest = Version(here[0].lineage, here[0].step) if here else None
            self._agent.fetch(FetchRequest(role=ROLE, newer_than=newest, deadline_seconds=LOOK_SECONDS))
        found = (
            Candidate(
                version=Version(one.lineage, one.step),
                chain=one.chain,
                state_digest=one.state_digest,
                tier=one.tier,
            )
            for one in self._checkpointer.candidates()
        )
        return tuple(one for one in found if one.version not in self._refused)

    def begin(self, lineage: int) -> None:
        """Initialise as step 0: from the configuration, warm start included, or from where it says that the run starts."""
        self._beat("startup")
        if self._settings.origin:
            self._fill_from(Path(self._settings.origin))
        else:
            self._start_afresh()
        log.info("begun", lineage=lineage)
        self.version, self.chain = Version(lineage, 0), ""
        self._evaluate("eval_before")
        self._save(epoch=0, flush=False)

    def restore(self, version: Version, lineage: int) -> bool:
        """Restore a candidate and go on with it on `lineage`; False when it cannot be read after all."""
        if not self._fill(version):
            return False
        self.version = Version(lineage, version.step)
        self._save(epoch=0, flush=False)
        return True

    def rehearse(self, version: Version | None) -> float:
        """Copy an older snapshot as `take` will do it and return how long that took; 0.0 where there is none."""
        if version is None:
            return 0.0
        started = time.monotonic()
        self._fetch(version, FETCH_SECONDS)
        copied = self._fill(version)
        self.drop()
        return time.monotonic() - started if copied else 0.0

    def take(self, version: Version, lineage: int, deadline_seconds: float) -> str | None:
        """Copy the state of the hold and return its digest; None when that failed."""
        self._fetch(version, deadline_seconds)
        digest = self._fill(version)
        if digest is None:
            return None
        self.version = Version(lineage, version.step)
        return digest

    def seal(self, epoch: int) -> Sealed | None:
        """Force a snapshot of what is in place; None while no slot is free: ask again."""
        newest = self.sealed
        if newest is not None and self.version == Version(newest.lineage, newest.step):
            return newest
        give_up_at = time.monotonic() + LOOK_SECONDS
        while time.monotonic() < give_up_at:
            # The step's own save may be under way: a second one would cost the older snapshot its slot. Or it was skipped, while
            # the free slot was being copied away: that takes a moment, and somebody waits for this seal.
            if self._under_way != self.version:
                self._save(epoch=epoch, flush=False, forced=True)
            newest = self.sealed
            if newest is not None and self.version == Version(newest.lineage, newest.step):
                return newest
            self._beat("save")
            time.sleep(SEAL_POLL_SECONDS)
        self._under_way = None  # whatever became of it, the next try saves anew
        return None

    def commit(self, word: Committed, reduced: Tensor, *, learning_rate: float) -> float:
        """Apply the committed gradient, snapshot, and return the gradient's norm."""
        norm = self.trainer.apply(reduced, learning_rate=learning_rate)
        self.version, self.chain = word.version, word.chain
        final = word.version.step >= self._steps
        if final:
            self._evaluate("eval_after")
        if word.flush or self._owes_flush or final or word.version.step % self._settings.save_every == 0:
            self._save(epoch=word.epoch, flush=word.flush)
        return norm

    def close(self) -> None:
        """Wait for the last save."""
        self._beat("save")
        self._checkpointer.close()

    def _fill_from(self, origin: Path) -> None:
        """Take over the state of another run, counted from 0 here."""
        self.trainer.drop()
        self._pristine = False
        segment, step = fill_from(origin, self.trainer.state(), beat=lambda: self._beat("restore"))
        log.info("state of another run", file=str(segment), its_step=step)

    def _start_afresh(self) -> None:
        """Take the configured weights, and train them on some answers where a warm start is asked for."""
        self._make_pristine()
        self.trainer.reset_optimizer()
        self.trainer.drop()
        loss = warm_start(
            self._bundle,
            self._rows,
            self._settings.warm_start,
            device=self._device,
            beat=lambda: self._beat("startup"),
        )
        self.trainer.drop()
        self._pristine = False
        if loss is not None:
            log.info("warm start", loss=loss)

    def _make_pristine(self) -> None:
        """Bring the weights back to their very first values, in place."""
        if self._pristine:
            return
        fresh = dict(load_model(self._settings.model).model.module.named_parameters())
        for name, view in self.trainer.weights().items():
            view.copy_(fresh[name].detach())

    def _evaluate(self, name: str) -> None:
        if not self._settings.evaluation.prompts:
            return
        self._beat("generate")
        weights = self.trainer.weights()
        reward = evaluate_weights(
            weights, self._bundle, self._heldout, self._settings, beat=lambda: self._beat("generate")
        )
        self._evaluations[name] = reward
        log.info("held-out reward", when=name.removeprefix("eval_"), mean=round(reward, 4))

    def _fetch(self, version: Version, seconds: float) -> None:
        """Bring a snapshot of a peer to this node, unless it is here."""
        if not any(one.version == (version.lineage, version.step) for one in self._checkpointer.candidates()):
            self._agent.fetch(FetchRequest(role=ROLE, at=version, deadline_seconds=seconds))

    def _fill(self, version: Version) -> str | None:
        """Fill the state from a snapshot of `version`; return its digest, None when there is no good copy."""
        self._beat("restore")
        self.drop()
        self._pristine = False
        self._evaluations.clear()
        try:
            restored = self._checkpointer.restore(self._state, at=(version.lineage, version.step))
        except (Corrupt, Mismatch) as error:
            log.warning("a snapshot cannot be used", version=version, reason=str(error))
            restored = None
        if restored is None:
            self._refused.add(version)
            return None
        self.chain = restored.chain
        log.info("restored", version=version, tier=restored.tier, seconds=round(restored.seconds, 3))
        return restored.state_digest

    def _save(self, *, epoch: int, flush: bool, forced: bool = False) -> None:
        """Begin a snapshot, or skip and count it; a forced one is not counted, it is tried again. A flush that is missed is made up for."""
        assert self.version is not None  # noqa: S101 - all callers have just set it
        flush = flush or self._owes_flush
        lost = False
        self._beat("save")  # the first one takes and fills the memory, which is long for a large model
        try:
            saved = self._checkpointer.save(
                self.version.step, self._state, lineage=self.version.lineage, epoch=epoch, chain=self.chain, flush=flush
            )
        except SaveFailed as error:
            # An earlier save went wrong in the background; this one is under way. Training goes on.
            log.warning("a snapshot was lost", reason=str(error))
            self.skipped_saves += 1
            saved, lost = True, self._flushes_under_way
        if saved:
            self._under_way, self._flushes_under_way = self.version, flush
        elif not forced:
            self.skipped_saves += 1
        self._owes_flush = (flush and not saved) or (lost and not flush)
