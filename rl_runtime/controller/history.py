"""The steps of the live lineage as they came about: each with its batch, its commit, and the epochs that its batch went through. Pure.

A step whose batch was dealt in one epoch and committed in a later one was disturbed: somebody left while it was trained. What a
rewind made void is left out. The samples are all that the ledger's files still hold: compaction drops those of settled steps.
"""

from collections.abc import Iterable

import msgspec

from aimaster.wire.checkpoint import Version
from aimaster.wire.topology import Epoch
from rl_runtime.controller.account import Account, apply
from rl_runtime.controller.batches import Batch, make_batch
from rl_runtime.controller.settings import ControllerSettings
from rl_runtime.records import Admitted, Committed, Dealt, EpochOpened, Record, Rewound


class LiveStep(msgspec.Struct, frozen=True, kw_only=True):
    """One committed step."""

    dealt: Dealt
    committed: Committed
    epochs: tuple[Epoch, ...]
    """From the deal to the commit; empty for steps that were committed before the ledger was compacted."""
    groups: dict[int, dict[int, Admitted]]
    """The samples of its prompts, by prompt and index."""

    @property
    def version(self) -> Version:
        return Version(self.committed.lineage, self.committed.step)

    @property
    def was_disturbed(self) -> bool:
        """Whether the epoch changed between deal and commit."""
        return len(self.epochs) > 1

    def batch(self, settings: ControllerSettings) -> Batch:
        """Return the batch as it was dealt: a function of its samples alone."""
        before = Version(self.dealt.lineage, self.dealt.step - 1)
        account = Account(head=before, batches={self.dealt.step: self.dealt}, groups=self.groups)
        return msgspec.structs.replace(
            make_batch(account, settings, self.dealt.prompts, self.dealt.at), dealt=self.dealt
        )


class History(msgspec.Struct, frozen=True, kw_only=True):
    """All that the ledger tells."""

    account: Account
    """What it adds up to."""
    steps: dict[int, LiveStep]
    """In order; without those whose samples are gone."""

    def is_on_path(self, version: Version, chain: str) -> bool:
        """Whether a snapshot is of the run's own past: on the way to its head, not of what was gone back behind."""
        step = self.steps.get(version.step)
        if step is not None and step.committed.chain != chain:
            return False
        rewinds = self.account.rewinds
        return not any(rewind.lineage > version.lineage and version.step > rewind.step for rewind in rewinds)


def read_history(entries: Iterable[Record | Account]) -> History:
    """Fold a ledger. Raises LedgerBrokenError."""
    account, steps = Account(), dict[int, LiveStep]()
    epochs: list[Epoch] = []
    for entry in entries:
        if isinstance(entry, Account):
            account, epochs = entry, [entry.epoch]
            steps = {step: _step(account, commit, []) for step, commit in sorted(account.commits.items())}
            continue
        apply(account, entry)
        match entry:
            case Dealt():
                epochs = [account.epoch]
            case EpochOpened():
                epochs.append(entry.epoch)
            case Committed():
                steps[entry.step] = _step(account, entry, epochs)
                epochs = []
            case Rewound():
                steps = {step: kept for step, kept in steps.items() if step <= entry.step}
    return History(account=account, steps=steps)


def _step(account: Account, commit: Committed, epochs: Iterable[Epoch]) -> LiveStep:
    dealt = account.batches[commit.step]
    groups = {prompt_id: account.groups[prompt_id] for prompt_id in dealt.prompts}
    return LiveStep(dealt=dealt, committed=commit, epochs=tuple(epochs), groups=groups)
