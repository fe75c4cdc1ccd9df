"""The audit of a run: every sample's way through the ledger, counted anew from the records, and every snapshot's chain.

Read-only, also while the run goes on. It shares no code with the account it checks, only the records: what the account believes is
not asked. `python -m rl_runtime.controller.audit RUN [--json]` exits 1 when something is lost, doubled or does not follow.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from aimaster.journal import JournalError
from aimaster.wire.codec import encode_json
from aimaster.wire.places import MEMORY_ROOT, RunPlaces
from easyckpt import shm
from easyckpt.errors import EasyckptError
from easyckpt.storage import list_manifests
from rl_runtime.controller.account import Account
from rl_runtime.controller.ledger import read_ledger
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
    Record,
    Rewound,
)

ROLE = "policy"
MOST_PROBLEMS = 50
NO_CHAIN = ""
"""Before the first step."""


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """Samples counted by what became of them, and what is wrong."""

    leased: int
    """Handed out at least once."""
    admitted: int
    filtered: int
    """Of groups without spread, which are never dealt."""
    waiting: int
    """Admitted and not dealt: buffered, or of groups that are not complete."""
    dealt: int
    """Dealt to a step of the live lineage, or due again there."""
    trained: int
    """In a committed step of the live lineage."""
    duplicate: int
    """Admitted twice, or trained twice on the live lineage."""
    lost: int
    """Admitted, and now nowhere; or dealt to a step that was passed without it."""
    steps: int
    """Committed on the live lineage."""
    lineage: int
    rewinds: int
    epochs: int
    finished: bool
    snapshots: int
    """Snapshots whose chain was compared with the ledger's."""
    snapshots_of_dropped_lineages: int
    """Of lineages whose chain compaction dropped: not compared."""
    problems: tuple[str, ...]
    """What does not follow, in words; empty when all is well."""

    @property
    def ok(self) -> bool:
        """Tell whether nothing is wrong."""
        return not self.problems and not self.duplicate and not self.lost


def audit(run: Path) -> AuditReport:
    """Audit a run folder. Raises JournalError where the ledger cannot be read."""
    places = RunPlaces(run)
    # Snapshots first: of a run that goes on, the ledger read after them knows every step that they can be of.
    snapshots = list(snapshot_chains(places))
    count = Count()
    for entry in read_ledger(places.ledger):
        if isinstance(entry, Account):
            count.begin_at(entry)
        else:
            count.take(entry)
    return count.report(snapshots)


class Count:
    """The records, folded into plain tables."""

    def __init__(self) -> None:
        self.n_generation = 1
        self.problems: list[str] = []
        self.finished = False
        self.epochs = 0
        self.rewinds = 0
        self.leased: set[int] = set()
        self.filtered: set[int] = set()
        self.filtered_before = 0
        self.times_admitted: dict[tuple[int, int], int] = {}
        self.dealt: dict[int, tuple[str, tuple[int, ...]]] = {}
        """By step: digest and prompts of the newest deal."""
        self.first_dealt: dict[int, int] = {}
        """By prompt: the step it was first dealt to."""
        self.live: dict[int, tuple[int, str, str]] = {}
        """By step: lineage, batch digest, chain."""
        self.chains: dict[tuple[int, int], str] = {(0, 0): NO_CHAIN}
        """By (lineage, step), dead lineages included."""
        self.lineage = 0

    # -- records -------------------------------------------------------------------------------------------------------

    def begin_at(self, account: Account) -> None:
        """Take over what compaction has summed up."""
        self.__init__()  # type: ignore[misc]  # what came before is summed up in it
        self.n_generation = account.began.n_generation if account.began else 1
        self.leased = set(range(account.cursor))
        self.filtered_before = account.filtered
        self.epochs, self.rewinds, self.lineage = account.epoch.number, len(account.rewinds), account.head.lineage
        self.finished = account.finished
        chain = NO_CHAIN
        for past in account.past:
            self._follow(past.step, chain, past.batch_digest, past.chain)
            chain = past.chain
            self._deal(past.step, past.batch_digest, past.prompts)
            self.live[past.step] = (past.lineage, past.batch_digest, past.chain)
            self.chains[past.lineage, past.step] = past.chain
            self.times_admitted |= {(prompt, index): 1 for prompt in past.prompts for index in range(self.n_generation)}
        for step, deal in sorted(account.batches.items()):
            self._deal(step, deal.batch_digest, deal.prompts)
        for step, commit in sorted(account.commits.items()):
            self._follow(step, chain, commit.batch_digest, commit.chain)
            chain = commit.chain
            self.live[step] = (commit.lineage, commit.batch_digest, commit.chain)
            self.chains[commit.lineage, step] = commit.chain
        for rewind in account.rewinds:
            self._note_rewound(rewind)
        for prompt, group in account.groups.items():
            self.times_admitted |= {(prompt, index): 1 for index in group}

    def take(self, record: Record) -> None:
        """Take the next record."""
        match record:
            case Began():
                self.n_generation = record.n_generation
            case Leased():
                self.leased |= set(range(record.first, record.last + 1))
            case Admitted():
                self._admit(record)
            case Filtered():
                self.filtered.add(record.prompt_id)
            case Dealt():
                self._deal(record.step, record.batch_digest, record.prompts)
            case Committed():
                self._commit(record)
            case Rewound():
                self.rewinds += 1
                self.lineage = record.lineage
                self._note_rewound(record)
                self.live = {step: row for step, row in self.live.items() if step <= record.step}
            case Finished():
                self.finished = True
            case EpochOpened():
                self.epochs += 1
            case Flushed():
                pass  # the manifests themselves are checked

    def _admit(self, record: Admitted) -> None:
        key = (record.prompt_id, record.index)
        self.times_admitted[key] = self.times_admitted.get(key, 0) + 1
        if record.prompt_id not in self.leased:
            self._problem(f"sample {key} was admitted and never leased")

    def _deal(self, step: int, digest: str, prompts: tuple[int, ...]) -> None:
        before = self.dealt.get(step)
        if before is not None and before != (digest, prompts):
            self._problem(f"step {step} was dealt batch {before[0]} and later another, {digest}")
        self.dealt[step] = (digest, prompts)
        for prompt in prompts:
            first = self.first_dealt.setdefault(prompt, step)
            if first != step:
                self._problem(f"prompt {prompt} was dealt to step {first} and to step {step}")

    def _commit(self, record: Committed) -> None:
        if record.lineage != self.lineage or record.step != len(self.live) + 1:
            self._problem(
                f"step {record.step} of lineage {record.lineage} was committed after step {len(self.live)} of {self.lineage}"
            )
        if self.dealt.get(record.step, ("", ()))[0] != record.batch_digest:
            self._problem(
                f"step {record.step} was committed with batch {record.batch_digest}, which was not dealt to it"
            )
        chain = self.live[record.step - 1][2] if record.step - 1 in self.live else NO_CHAIN
        self._follow(record.step, chain, record.batch_digest, record.chain)
        self.live[record.step] = (record.lineage, record.batch_digest, record.chain)
        self.chains[record.lineage, record.step] = record.chain

    def _follow(self, step: int, chain: str, digest: str, wanted: str) -> None:
        if xxhash.xxh3_128_hexdigest(f"{chain}|{step}|{digest}".encode()) != wanted:
            self._problem(f"the chain of step {step} does not follow from the step before and its batch")

    def _note_rewound(self, record: Rewound) -> None:
        chain = self.live[record.step][2] if record.step in self.live else NO_CHAIN
        self.chains[record.lineage, record.step] = chain

    def chain_of(self, lineage: int, step: int) -> str | None:
        """Return the chain that a snapshot of this version must carry; None where the ledger does not know it."""
        return self.chains.get((lineage, step))

    def _problem(self, text: str) -> None:
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(text)

    # -- result --------------------------------------------------------------------------------------------------------

    def report(self, snapshots: Iterable[tuple[str, int, int, str]]) -> AuditReport:
        """Sum up; `snapshots` are (where, lineage, step, chain)."""
        head, size = len(self.live), self.n_generation
        trained = [prompt for step in self.live for prompt in self.dealt[step][1]]
        dealt = {prompt for _, prompts in self.dealt.values() for prompt in prompts}
        passed = [
            step
            for step in self.dealt
            if step <= head and (step not in self.live or self.live[step][1] != self.dealt[step][0])
        ]
        twice = sum(times - 1 for times in self.times_admitted.values()) + (len(trained) - len(set(trained))) * size
        groups: dict[int, int] = {}
        for prompt, _ in self.times_admitted:
            groups[prompt] = groups.get(prompt, 0) + 1
        hollow = [prompt for prompt in dealt if groups.get(prompt, 0) != size]
        for prompt in hollow[:5]:
            self._problem(f"prompt {prompt} was dealt with {groups.get(prompt, 0)} of {size} admitted samples")
        waiting = sum(count for prompt, count in groups.items() if prompt not in dealt and prompt not in self.filtered)
        checked, unknown = self._check(snapshots)
        return AuditReport(
            leased=len(self.leased) * size,
            admitted=len(self.times_admitted) + self.filtered_before * size,
            filtered=(len(self.filtered) + self.filtered_before) * size,
            waiting=waiting,
            dealt=len(dealt) * size,
            trained=len(trained) * size,
            duplicate=twice,
            lost=sum(len(self.dealt[step][1]) for step in passed) * size
            + sum(size - groups.get(prompt, 0) for prompt in hollow),
            steps=head,
            lineage=self.lineage,
            rewinds=self.rewinds,
            epochs=self.epochs,
            finished=self.finished,
            snapshots=checked,
            snapshots_of_dropped_lineages=unknown,
            problems=tuple(self.problems),
        )

    def _check(self, snapshots: Iterable[tuple[str, int, int, str]]) -> tuple[int, int]:
        checked = unknown = 0
        for where, lineage, step, chain in snapshots:
            wanted = self.chain_of(lineage, step)
            if wanted is None and lineage < self.lineage:
                unknown += 1
            elif wanted is None:
                self._problem(
                    f"{where} is a snapshot of step {step}, lineage {lineage}, which the ledger does not know"
                )
            else:
                checked += 1
                if wanted != chain:
                    self._problem(
                        f"{where} carries the chain {chain}; the ledger has {wanted} for step {step}, lineage {lineage}"
                    )
        return checked, unknown


def snapshot_chains(places: RunPlaces) -> Iterator[tuple[str, int, int, str]]:
    """Yield (where, lineage, step, chain) of every policy snapshot on storage and in the memory of this machine's nodes."""
    try:
        for manifest in list_manifests(places.storage, ROLE):
            yield f"storage {manifest.member} step {manifest.step}", manifest.lineage, manifest.step, manifest.chain
    except FileNotFoundError:
        pass
    for folder in _memory_folders(places):
        try:
            segments = shm.scan(folder)
        except (OSError, EasyckptError):
            continue  # the run ended meanwhile and its memory with it
        for segment in segments:
            header = segment.header
            if header.role == ROLE:
                yield str(segment.path), header.lineage, header.step, header.chain


def _memory_folders(places: RunPlaces) -> list[Path]:
    try:
        run_id = msgspec.json.decode(places.info.read_bytes()).get("run_id", "")
    except (FileNotFoundError, msgspec.DecodeError):
        return []
    return sorted(MEMORY_ROOT.glob(f"aimaster-{run_id}-*/segments")) if run_id else []


def main(arguments: list[str]) -> int:
    """Print the report of the run folder named; exit code 0 when all is well, 1 when not, 2 for a wrong call."""
    folders = [argument for argument in arguments if argument != "--json"]
    if len(folders) != 1:
        print("usage: python -m rl_runtime.controller.audit RUN [--json]", file=sys.stderr)  # noqa: T201
        return 2
    try:
        report = audit(Path(folders[0]))
    except JournalError as error:
        print(f"audit: {error}", file=sys.stderr)  # noqa: T201
        return 1
    if "--json" in arguments:
        sys.stdout.write(encode_json({**msgspec.to_builtins(report), "ok": report.ok}).decode() + "\n")
    else:
        for name, value in msgspec.to_builtins(report).items():
            shown = "; ".join(value) if isinstance(value, list) else value
            sys.stdout.write(f"{name:30} {shown}\n")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
