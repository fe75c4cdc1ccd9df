"""Nobody is in: who begins, or restores what. Pure.

The best candidate over all members that ask wins; they are compared for a moment first, unless one of them has the head itself.
Going back below the head is recorded (a rewind, a new lineage) before anybody is told to.
"""

from collections.abc import Iterable

import msgspec

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.training import Begin, Candidate, Fresh, Restore
from rl_runtime.controller.account import Account
from rl_runtime.controller.errors import LedgerLostError
from rl_runtime.controller.roll import Roll, Seen
from rl_runtime.controller.settings import ControllerSettings
from rl_runtime.records import Rewound


class Founder(msgspec.Struct, frozen=True, kw_only=True):
    """The member that was told to bring up the state, and how."""

    member: MemberId
    incarnation: Incarnation
    version: Version | None
    """Snapshot it restores; None: it begins."""
    lineage: int
    at: float

    @property
    def word(self) -> Begin | Restore:
        """What it is told."""
        return (
            Begin(lineage=self.lineage) if self.version is None else Restore(version=self.version, lineage=self.lineage)
        )


class NothingToRestoreError(Exception):
    """No candidate fits the ledger, and the first step can no longer be replayed either."""


def choose(
    account: Account, settings: ControllerSettings, roll: Roll, now: float
) -> tuple[Founder, Rewound | None] | None:
    """Return the founder and the rewind that must be recorded first; None: wait. Raises NothingToRestoreError."""
    fresh = list(roll.waiting(Fresh, now))
    if not fresh:
        return None
    best = {member: _best(account, seen.candidates) for member, seen in fresh}
    member = max(fresh, key=lambda one: (_rank(best[one[0]]), -fresh.index(one)))[0]
    candidate = best[member]
    if not _is_time(account, settings, fresh, candidate, now):
        return None
    if candidate is None and account.floor > 0:
        raise NothingToRestoreError
    if account.epoch.number == 0:
        _refuse_without_ledger(fresh)
    step = candidate.version.step if candidate else 0
    rewind = None
    lineage = account.head.lineage
    if step < account.head.step:
        lineage += 1
        cause = f"{member} restores step {step}" if candidate else f"{member} begins anew"
        rewind = Rewound(step=step, lineage=lineage, cause=f"{cause}, step {account.head.step} was committed", at=now)
    founder = Founder(
        member=member,
        incarnation=roll.seen[member].turn.incarnation,
        version=candidate.version if candidate else None,
        lineage=lineage,
        at=now,
    )
    return founder, rewind


def _refuse_without_ledger(fresh: Iterable[tuple[MemberId, Seen]]) -> None:
    """In a ledger without any epoch nobody ever trained: a snapshot of a later step in this run's own memory tells of a lost one."""
    in_memory = (
        candidate.version.step for _, seen in fresh for candidate in seen.candidates if candidate.tier != "storage"
    )
    step = max(in_memory, default=0)
    if step > 0:
        raise LedgerLostError(step, "a node's memory")


def still_stands(founder: Founder, settings: ControllerSettings, roll: Roll, now: float) -> bool:
    """Tell whether the founder can still be waited for: alive, not silent too long, and not back with something else than a state.

    It may come back fresh without the candidate, or rehearsed, when it was chosen while it was on its way from an earlier word.
    """
    if roll.is_past(founder.member, founder.incarnation):
        return False
    seen = roll.seen[founder.member]
    if (
        seen.turn.incarnation != founder.incarnation
        or now - max(seen.at, founder.at) > settings.founder_patience_seconds
    ):
        return False
    if not isinstance(seen.turn.stage, Fresh):
        return seen.at <= founder.at
    if founder.version is None:
        return True
    return any(candidate.version == founder.version for candidate in seen.candidates)


def best_version(account: Account, candidates: Iterable[Candidate]) -> Version | None:
    """Return the newest of the candidates that fits the ledger."""
    best = _best(account, candidates)
    return best.version if best else None


def _best(account: Account, candidates: Iterable[Candidate]) -> Candidate | None:
    return max((one for one in candidates if account.is_live(one.version, one.chain)), key=_rank, default=None)


def _rank(candidate: Candidate | None) -> tuple[int, int]:
    return (-1, -1) if candidate is None else (candidate.version.step, candidate.version.lineage)


def _is_time(
    account: Account,
    settings: ControllerSettings,
    fresh: list[tuple[MemberId, Seen]],
    best: Candidate | None,
    now: float,
) -> bool:
    if account.epoch.number == 0 or (best is not None and best.version.step == account.head.step):
        return True
    return len(fresh) >= settings.n_init or now >= min(seen.since for _, seen in fresh) + settings.gather_seconds
