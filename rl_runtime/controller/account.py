"""The ledger's meaning: the state that its records add up to. Pure; `apply` is the only thing that changes an Account.

Life of a prompt:  leased (open) -> all samples admitted -> waiting -> dealt -> trained -> past     or  -> filtered
Life of a step:    dealt (open) -> committed -> past          a rewind makes committed steps due again, from the same batches

The live state and a replay of the records are equal, byte for byte. A record that cannot follow raises LedgerBrokenError.
"""

from typing import Final

import msgspec
import xxhash

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import MemberId
from aimaster.wire.topology import Epoch
from rl_runtime.controller.errors import LedgerBrokenError
from rl_runtime.controller.shares import assign
from rl_runtime.records import (
    Admitted,
    Began,
    Committed,
    Dealt,
    EpochOpened,
    Filtered,
    Finished,
    Flushed,
    Leased,
    PastStep,
    Record,
    Rewound,
)

GENESIS: Final = ""
"""Chain before the first step: what a member that was told to begin has."""
NOBODY: Final = Epoch(number=0, members=(), incarnations={})


class Account(msgspec.Struct, kw_only=True):
    """All that the controller durably knows."""

    began: Began | None = None
    epoch: Epoch = NOBODY
    head: Version = Version(0, 0)
    """Newest committed step on the live lineage."""
    chains: dict[int, str] = msgspec.field(default_factory=lambda: {0: GENESIS})
    """Chain after each live step from the floor on."""
    commits: dict[int, Committed] = {}
    """Live commits above the floor."""
    batches: dict[int, Dealt] = {}
    """Batches of live steps above the floor, those due again after a rewind included."""
    assignment: dict[MemberId, tuple[int, ...]] = {}
    """Who computes which shares of the open deal; empty without one."""
    cursor: int = 0
    """First prompt that was never leased."""
    groups: dict[int, dict[int, Admitted]] = {}
    """Admitted samples by prompt and index: of open, waiting and dealt prompts above the floor."""
    waiting: dict[int, int] = {}
    """Complete groups to be dealt, in order of completion; the value is their number of samples."""
    open: dict[int, int] = {}
    """Leased prompts whose group is not complete, with the number of samples admitted."""
    filtered: int = 0
    """Groups that were filtered, ever."""
    filtered_in_a_row: int = 0
    """Since the last deal of new groups."""
    rewinds: list[Rewound] = []
    flushed: list[Version] = []
    """Whole snapshots on storage, oldest first, valid on the live lineage."""
    floor: int = 0
    """Batches up to this step can no longer be needed: two newer-or-equal flushes exist."""
    past: list[PastStep] = []
    """Committed steps up to the floor."""
    admitted: int = 0
    """Samples admitted, ever."""
    finished: bool = False

    @property
    def chain(self) -> str:
        """Chain at the head."""
        return self.chains[self.head.step]

    @property
    def open_deal(self) -> Dealt | None:
        """The batch that is being trained on the live lineage."""
        deal = self.batches.get(self.head.step + 1)
        return deal if deal is not None and deal.lineage == self.head.lineage else None

    @property
    def due_again(self) -> Dealt | None:
        """The batch that a rewind made due next and that is not dealt again yet."""
        deal = self.batches.get(self.head.step + 1)
        return deal if deal is not None and deal.lineage != self.head.lineage else None

    @property
    def next_new_step(self) -> int:
        """Step at which the next new groups will be trained."""
        return max(self.batches, default=self.head.step) + 1

    @property
    def samples_waiting(self) -> int:
        """Samples admitted and neither dealt nor filtered."""
        return sum(self.waiting.values()) + sum(self.open.values())

    def holds(self, prompt_id: int, index: int) -> bool:
        """Tell whether this key was admitted before."""
        if prompt_id in self.open:
            return index in self.groups.get(prompt_id, {})
        return prompt_id < self.cursor

    def is_live(self, version: Version, chain: str | None = None) -> bool:
        """Tell whether a snapshot of this version (with this chain) lies on the live path and can be gone on from."""
        if not self.floor <= version.step <= self.head.step or version.lineage > self.head.lineage:
            return False
        if any(rewind.lineage > version.lineage and version.step > rewind.step for rewind in self.rewinds):
            return False
        return chain is None or chain == self.chains[version.step]

    def copy(self) -> "Account":
        """Return an equal, independent account."""
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self), type=Account)


def next_chain(chain: str, step: int, batch_digest: str) -> str:
    """Extend the chain of applied batches by one step; the lineage is no part of it, a replay gives the same chain."""
    return xxhash.xxh3_128_hexdigest(f"{chain}|{step}|{batch_digest}".encode())


def apply(account: Account, record: Record) -> None:
    """Let the record become true."""
    match record:
        case Began():
            account.began = record
        case EpochOpened():
            _open_epoch(account, record.epoch)
        case Leased():
            _lease(account, record)
        case Admitted():
            _admit(account, record)
        case Filtered():
            _filter(account, record)
        case Dealt():
            _deal(account, record)
        case Committed():
            _commit(account, record)
        case Rewound():
            _rewind(account, record)
        case Flushed():
            _flush(account, record)
        case Finished():
            account.finished = True


def _refuse(record: Record, why: str) -> LedgerBrokenError:
    return LedgerBrokenError(
        f"{type(record).__name__} cannot be true here: {why}; nothing was changed; please report it with the ledger folder"
    )


def _open_epoch(account: Account, epoch: Epoch) -> None:
    before = account.epoch
    if epoch.number != before.number + 1:
        raise _refuse(EpochOpened(epoch=epoch, at=0.0), f"epoch {epoch.number} after {before.number}")
    account.epoch = epoch
    deal = account.open_deal
    if deal is None:
        return
    kept = {
        member: shares
        for member, shares in account.assignment.items()
        if member in epoch.members and before.incarnations.get(member) == epoch.incarnations[member]
    }
    account.assignment = assign(deal.share_tokens, epoch.members, kept)


def _lease(account: Account, record: Leased) -> None:
    if record.first != account.cursor or record.last < record.first:
        raise _refuse(record, f"prompts {record.first} to {record.last}, but {account.cursor} is next")
    for prompt_id in range(record.first, record.last + 1):
        account.open[prompt_id] = 0
    account.cursor = record.last + 1


def _admit(account: Account, record: Admitted) -> None:
    prompt_id = record.prompt_id
    if prompt_id not in account.open or account.holds(prompt_id, record.index):
        raise _refuse(record, f"sample ({prompt_id}, {record.index}) is not open")
    if account.began is None or not 0 <= record.index < account.began.n_generation:
        raise _refuse(record, f"index {record.index} is outside the group")
    group = account.groups.setdefault(prompt_id, {})
    group[record.index] = record
    account.admitted += 1
    if len(group) == account.began.n_generation:
        del account.open[prompt_id]
        account.waiting[prompt_id] = len(group)
    else:
        account.open[prompt_id] = len(group)


def _filter(account: Account, record: Filtered) -> None:
    if account.waiting.pop(record.prompt_id, None) is None:
        raise _refuse(record, f"group {record.prompt_id} does not wait")
    del account.groups[record.prompt_id]
    account.filtered += 1
    account.filtered_in_a_row += 1


def _deal(account: Account, record: Dealt) -> None:
    if record.lineage != account.head.lineage or record.step != account.head.step + 1 or account.open_deal is not None:
        raise _refuse(record, f"step {record.step} of lineage {record.lineage}, but the head is {account.head}")
    due = account.due_again
    if due is not None:
        if (due.batch_digest, due.prompts, due.shares) != (record.batch_digest, record.prompts, record.shares):
            raise _refuse(record, f"step {record.step} is due again with batch {due.batch_digest}")
    else:
        for prompt_id in record.prompts:
            if account.waiting.pop(prompt_id, None) is None:
                raise _refuse(record, f"group {prompt_id} does not wait")
        account.filtered_in_a_row = 0
    account.batches[record.step] = record
    account.assignment = assign(record.share_tokens, account.epoch.members, {})


def _commit(account: Account, record: Committed) -> None:
    deal = account.open_deal
    if deal is None or (deal.step, deal.lineage) != (record.step, record.lineage):
        raise _refuse(record, f"step {record.step} of lineage {record.lineage} is not being trained")
    if record.batch_digest != deal.batch_digest or record.epoch != account.epoch.number:
        raise _refuse(
            record,
            f"batch {record.batch_digest} of epoch {record.epoch}, but {deal.batch_digest} of {account.epoch.number} is",
        )
    if record.chain != next_chain(account.chain, record.step, record.batch_digest):
        raise _refuse(record, "its chain does not follow")
    account.head = Version(record.lineage, record.step)
    account.chains[record.step] = record.chain
    account.commits[record.step] = record
    account.assignment = {}


def _rewind(account: Account, record: Rewound) -> None:
    if record.lineage <= account.head.lineage or not account.floor <= record.step <= account.head.step:
        raise _refuse(record, f"from {account.head} with the floor at {account.floor}")
    account.rewinds.append(record)
    account.head = Version(record.lineage, record.step)
    for step in [step for step in account.commits if step > record.step]:
        del account.commits[step], account.chains[step]
    account.flushed = [version for version in account.flushed if version.step <= record.step]
    account.assignment = {}


def _flush(account: Account, record: Flushed) -> None:
    if not account.is_live(record.version):
        raise _refuse(record, f"{record.version} is not on the live path to {account.head}")
    account.flushed = sorted({*account.flushed, record.version}, key=lambda version: version.step)
    steps = sorted({version.step for version in account.flushed})
    if len(steps) < 2 or steps[-2] <= account.floor:
        return
    account.floor = steps[-2]
    for step in sorted(step for step in account.batches if step <= account.floor):
        deal, commit = account.batches.pop(step), account.commits.pop(step)
        account.past.append(PastStep(step, commit.lineage, deal.batch_digest, commit.chain, deal.prompts))
        for prompt_id in deal.prompts:
            del account.groups[prompt_id]
    for step in [step for step in account.chains if step < account.floor]:
        del account.chains[step]
