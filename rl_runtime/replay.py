"""Trains a run's batches again, undisturbed, and compares: `python -m rl_runtime.replay RUN [--from STEP] [--to STEP] [--json]`.

    snapshot on storage -> for each step: all its shares in one process -> gradient against the one that was kept
                        -> both applied -> parameters against each other; the kept gradient moves the state on

So each step is compared from the very state that the run had, however its members came and went. Wherever storage holds a later
snapshot, the state must be that snapshot's. Reads the run folder and changes nothing in it, also while the run goes on; needs a run
that kept its gradients (aimaster.record_gradients). Exit code 0: all within 1e-5; 1: something differs; 2: nothing can be compared.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from aimaster.journal import JournalError
from aimaster.settings import from_json
from aimaster.wire.checkpoint import Version
from aimaster.wire.codec import encode_json
from aimaster.wire.places import RunPlaces
from easyckpt import Checkpointer
from easyckpt.errors import EasyckptError
from rl_runtime.algo.loss import Normaliser
from rl_runtime.config import chosen_device, policy_settings
from rl_runtime.controller.errors import LedgerBrokenError
from rl_runtime.controller.history import History, LiveStep, read_history
from rl_runtime.controller.ledger import read_ledger
from rl_runtime.controller.settings import ControllerSettings, controller_settings, learning_rate
from rl_runtime.models.load import load_model
from rl_runtime.policy.gradients import GradientNote, kept_gradients, read_gradient
from rl_runtime.policy.state import ROLE
from rl_runtime.policy.trainer import Batch, Trainer, digest

TOLERANCE = 1e-5
"""Largest ||a - b|| / ||b|| of any tensor: what another order of float32 sums may cost, and no more."""

State = Mapping[str, Mapping[str, Tensor]]


class ReplayError(Exception):
    """Nothing can be compared; a message for the user."""


class Worst(msgspec.Struct, frozen=True, kw_only=True):
    """The tensor that differs most."""

    difference: float
    tensor: str


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One step, trained again."""

    version: Version
    epochs: tuple[int, ...]
    """That its batch went through, from deal to commit: more than one where it was disturbed."""
    members: tuple[str, ...]
    """Of the epoch that committed it."""
    shares: dict[str, tuple[int, ...]]
    """Who had computed which of them, by those that kept a gradient."""
    dealt_at: float
    committed_at: float
    norm: float
    """Of the kept gradient, before clipping."""
    gradient: Worst
    parameters: Worst
    snapshot: Worst | None = None
    """The state against a snapshot of this version on storage."""
    problems: tuple[str, ...] = ()
    """What else is wrong, in words."""

    @property
    def ok(self) -> bool:
        worst = (self.gradient, self.parameters, self.snapshot)
        return not self.problems and all(one.difference <= TOLERANCE for one in worst if one is not None)


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """All steps."""

    start: Version
    """The snapshot that was begun with."""
    tolerance: float = TOLERANCE
    steps: tuple[StepReport, ...]

    @property
    def ok(self) -> bool:
        return bool(self.steps) and all(step.ok for step in self.steps)


class Replay:
    """A run's past, and one trainer that goes through it."""

    def __init__(self, run: Path, snapshots: Path) -> None:
        """`snapshots`: an empty folder for the time being. Raises ReplayError where this is no run with a ledger and snapshots."""
        places = RunPlaces(run)
        try:
            job = from_json(places.resolved.read_bytes())
            self.history: History = read_history(read_ledger(places.ledger))
        except (OSError, msgspec.MsgspecError, JournalError, LedgerBrokenError) as error:
            raise ReplayError(f"{run} cannot be read: {error}") from error
        began = self.history.account.began
        if began is None:
            raise ReplayError(f"{run} has not begun to train: there is nothing to replay")
        self._settings: ControllerSettings = controller_settings(job, began.rows)
        self._kept = kept_gradients(places)
        policy = policy_settings(job)
        self._trainer = Trainer(
            load_model(policy.model).model,
            loss=policy.loss,
            optimizer=policy.optimizer,
            micro_rows=policy.micro_rows,
            seed=policy.seed,
            device=chosen_device(policy.device),
        )
        self._checkpointer = Checkpointer(
            job.aimaster.snapshots.storage or places.storage,
            member="replay",
            role=ROLE,
            folder=snapshots,
            flush_every=None,
            on_sealed=lambda path, header: None,  # noqa: ARG005 - nothing is saved here
        )
        found = ((Version(one.lineage, one.step), one.chain) for one in self._checkpointer.candidates())
        self._stored = {version for version, chain in found if self.history.is_on_path(version, chain)}

    def close(self) -> None:
        self._checkpointer.close()

    def range(self, first: int | None, last: int | None) -> tuple[Version, list[LiveStep]]:
        """Return the snapshot to begin with and the steps from there on. Raises ReplayError, which says what is missing."""
        kept = [step for step, one in self.history.steps.items() if one.version in self._kept]
        if not kept:
            raise ReplayError("no gradient of a live step was kept: run with aimaster.record_gradients = true")
        last = max(kept) if last is None else last
        before = sorted(version for version in self._stored if version.step < (last if first is None else first))
        if first is not None:
            before = before[-1:]
        for start in before:
            steps = [self.history.steps.get(step) for step in range(start.step + 1, last + 1)]
            whole = [step for step in steps if step is not None and step.version in self._kept]
            if len(whole) == last - start.step:
                return start, whole
        raise ReplayError(
            f"no snapshot on storage before step {last if first is None else first} from which each step up to {last} has its batch and its "
            f"gradient; snapshots: {_numbers(version.step for version in self._stored)}; gradients: {_numbers(kept)}"
        )

    def steps(self, start: Version, steps: Iterable[LiveStep]) -> Iterator[StepReport]:
        """Train them again, one after the other. Raises ReplayError where a file cannot be read after all."""
        if self._restore(start, dict(self._trainer.state())) is None:
            raise ReplayError(f"the snapshot of {start} is gone: name another first step with --from")
        for step in steps:
            yield self._step(step)

    def _step(self, step: LiveStep) -> StepReport:
        trainer = self._trainer
        notes, kept, problems = self._read(step)
        batch = step.batch(self._settings)
        if batch.dealt.batch_digest != step.committed.batch_digest:
            problems.append(
                f"the batch has the digest {batch.dealt.batch_digest}, {step.committed.batch_digest} was committed"
            )
        trainer.begin(Batch(step=step.version.step, digest=batch.dealt.batch_digest))
        norm = Normaliser(tokens=batch.loss_tokens, sequences=len(batch.samples))
        for share in batch.shares(range(len(step.dealt.shares))):
            trainer.add(share, norm=norm, beat=lambda: None)
        undisturbed = trainer.gradient.clone()
        gradient = worst(dict(trainer.views(undisturbed)), dict(trainer.views(kept)))

        before = _copy(trainer.state())
        trainer.apply(undisturbed, learning_rate=learning_rate(self._settings, step.version.step))
        parameters = _copy(trainer.state())["model"]
        _fill(trainer.state(), before)
        kept_norm = trainer.apply(kept, learning_rate=next(iter(notes.values())).learning_rate)
        return StepReport(
            version=step.version,
            epochs=tuple(epoch.number for epoch in step.epochs) or (step.committed.epoch,),
            members=step.epochs[-1].members if step.epochs else tuple(notes),
            shares={member: note.shares for member, note in notes.items()},
            dealt_at=step.dealt.at,
            committed_at=step.committed.at,
            norm=kept_norm,
            gradient=gradient,
            parameters=worst(parameters, trainer.weights()),
            snapshot=self._compare(step.version),
            problems=tuple(problems),
        )

    def _read(self, step: LiveStep) -> tuple[dict[str, GradientNote], Tensor, list[str]]:
        """Return what each member noted, the gradient that they kept, and what is wrong with it."""
        notes: dict[str, GradientNote] = {}
        problems: list[str] = []
        kept = None
        for path in self._kept[step.version]:
            member = path.parent.parent.name
            try:
                note, tensors = read_gradient(path)
                flat = torch.cat([tensors[name].reshape(-1) for name in self._trainer.weights()]).to(
                    self._trainer.gradient
                )
            except (OSError, SafetensorError, msgspec.MsgspecError, KeyError) as error:
                problems.append(f"{path} cannot be read: {error}")
                continue
            notes[member] = note
            is_voted = digest(flat) == step.committed.gradient_digest
            kept = flat if kept is None or is_voted else kept
            if not is_voted:
                problems.append(f"the gradient that {member} kept is not the one that was voted for")
            if note.epoch != step.committed.epoch:
                problems.append(
                    f"{member} reduced in epoch {note.epoch}, the step was committed in {step.committed.epoch}"
                )
        if kept is None:
            raise ReplayError(f"step {step.version.step}: {'; '.join(problems)}")
        shares = sorted(share for note in notes.values() for share in note.shares)
        if step.epochs and set(notes) == set(step.epochs[-1].members) and shares != list(range(len(step.dealt.shares))):
            problems.append(f"the members' sums held the shares {shares} of {len(step.dealt.shares)}")
        return notes, kept, problems

    def _compare(self, version: Version) -> Worst | None:
        """Return how far the state is from the snapshot of this version, None where there is none."""
        if version not in self._stored:
            return None
        stored = {
            part: {name: torch.empty_like(tensor) for name, tensor in of.items()}
            for part, of in self._trainer.state().items()
        }
        if self._restore(version, dict(stored)) is None:
            return None
        here = self._trainer.state()
        return worst(
            {f"{part}/{name}": tensor for part, of in here.items() for name, tensor in of.items()},
            {f"{part}/{name}": stored[part][name] for part, of in here.items() for name in of},
        )

    def _restore(self, version: Version, state: dict[str, object]) -> object | None:
        """Fill a state in place; None when retention has removed the snapshot meanwhile."""
        try:
            return self._checkpointer.restore(state, at=(version.lineage, version.step))
        except EasyckptError as error:
            raise ReplayError(f"the snapshot of {version} cannot be used: {error}") from error


def replay(run: Path, first: int | None = None, last: int | None = None) -> ReplayReport:
    """Replay a run folder from the newest snapshot before `first` (the oldest that will do) through `last` (the last that was kept)."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        past = Replay(run, Path(folder))
        try:
            start, steps = past.range(first, last)
            return ReplayReport(start=start, steps=tuple(past.steps(start, steps)))
        finally:
            past.close()


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return ||ours - theirs|| / ||theirs||; infinite where that is no number."""
    gap = float(torch.linalg.vector_norm(ours.double() - theirs.double()))
    scale = float(torch.linalg.vector_norm(theirs.double()))
    if gap == 0.0:
        return 0.0
    return gap / scale if scale > 0.0 and math.isfinite(gap / scale) else math.inf


def worst(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Worst:
    """Return the tensor that differs most."""
    found = {name: difference(tensor, theirs[name]) for name, tensor in ours.items()}
    name = max(found, key=lambda one: found[one])
    return Worst(difference=found[name], tensor=name)


def table(report: ReplayReport) -> Iterator[str]:
    """Yield the lines for people."""
    yield f"from the snapshot of step {report.start.step}, lineage {report.start.lineage}"
    yield f"{'step':>6} {'epochs':>8}  {'committed by':28} {'norm':>9} {'gradient':>9} {'parameters':>10} {'snapshot':>9}"
    for step in report.steps:
        epochs = ">".join(map(str, step.epochs))
        members = ", ".join(step.members)
        snapshot = f"{step.snapshot.difference:.1e}" if step.snapshot else ""
        yield (
            f"{step.version.step:>6} {epochs:>8}  {members:28} {step.norm:>9.2e} {step.gradient.difference:>9.1e} "
            f"{step.parameters.difference:>10.1e} {snapshot:>9}"
        )
        for problem in step.problems:
            yield f"       {problem}"
        if not step.ok and not step.problems:
            yield f"       furthest: {step.gradient.tensor}; of the parameters: {step.parameters.tensor}"
    disturbed = sum(len(step.epochs) > 1 for step in report.steps)
    verdict = "all" if report.ok else "NOT all"
    yield f"{len(report.steps)} steps, {disturbed} of them disturbed: {verdict} within {report.tolerance:g} of an undisturbed training"


def main(arguments: list[str]) -> int:
    """Print the table, or one JSON object; see the module for the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m rl_runtime.replay", description="Train a run's batches again and compare."
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--from", dest="first", type=int, help="begin with the newest snapshot before this step")
    parser.add_argument("--to", dest="last", type=int, help="last step; else the last whose gradient was kept")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the table")
    chosen = parser.parse_args(arguments)
    try:
        report = replay(chosen.run, chosen.first, chosen.last)
    except ReplayError as error:
        print(f"replay: {error}", file=sys.stderr)  # noqa: T201
        return 2
    if chosen.json:
        sys.stdout.write(encode_json({**msgspec.to_builtins(report), "ok": report.ok}).decode() + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in table(report))
    return 0 if report.ok else 1


def _copy(state: State) -> dict[str, dict[str, Tensor]]:
    return {part: {name: tensor.clone() for name, tensor in of.items()} for part, of in state.items()}


def _fill(state: State, values: State) -> None:
    for part, of in state.items():
        for name, tensor in of.items():
            tensor.copy_(values[part][name])


def _numbers(steps: Iterable[int]) -> str:
    """Return steps in words, runs of them shortened; `none` without any."""
    runs: list[list[int]] = []
    for step in sorted(set(steps)):
        if runs and runs[-1][-1] == step - 1:
            runs[-1][1:] = [step]
        else:
            runs.append([step])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
