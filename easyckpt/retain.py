"""What may be overwritten or deleted, pure: yes/no questions about versions, each a small function with a truth table for a test.

Memory: after the answer of `choose_slot` is overwritten, the newest whole step of the member is still there, whatever the other ranks do.
Storage: `to_delete` never names the newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from easyckpt.layout import Rewind, Version, is_dead


class SlotState(msgspec.Struct, frozen=True, kw_only=True):
    """One slot of one rank, as seen just now."""

    slot: int
    """Its number."""
    version: Version | None
    """What it holds; None when it is not sealed."""
    pinned: bool = False
    """Whether it is being copied away."""


def newest_whole(ranks: Sequence[Sequence[SlotState]]) -> Version | None:
    """The newest version that every rank of a member holds."""
    return max(_whole(ranks), default=None)


def choose_slot(own: Sequence[SlotState], others: Sequence[Sequence[SlotState]] = ()) -> int | None:
    """The slot a rank may overwrite now, or None: the save is skipped.

    A slot that is not sealed is free. A sealed one may go if its version lies in another slot as well, if a newer version is whole, or a
    whole one is pinned on all ranks and so cannot go meanwhile, or if it can never become whole. Between several, the oldest goes.
    """
    ranks = [own, *others]
    whole = _whole(ranks)
    pinned_whole = {version for version in whole if all(_pinned(rank, version) for rank in ranks)}
    free = [state for state in own if not state.pinned]
    for state in sorted(free, key=lambda state: state.version or (-1, -1)):
        version = state.version
        twice = any(other.version == version and other.slot != state.slot for other in own)
        if version is None or len(own) == 1 or twice:
            return state.slot
        kept_newer = any(other > version for other in whole)
        if kept_newer or pinned_whole - {version} or (version not in whole and _can_not_be_whole(version, others)):
            return state.slot
    return None


def to_delete(
    versions: Iterable[Version],
    *,
    keep: int,
    keep_every: int | None = None,
    rewinds: Iterable[Rewind] = (),
    keep_abandoned: bool = True,
) -> list[Version]:
    """Which checkpoints on storage may go, oldest first.

    Kept are the `keep` newest that are alive, and every living one whose step is a multiple of `keep_every`. The dead ones (a later
    lineage began behind them) go, but, with `keep_abandoned`, the newest that was there when a run began from nothing: perhaps somebody only forgot
    to restore it. The newest living one always stays, and so does everything when all are dead.
    """
    rewinds = tuple(rewinds)
    every = sorted(set(versions), reverse=True)
    living = [version for version in every if not is_dead(version, rewinds)]
    if not living:
        return []
    kept = set(living[: max(1, keep)])
    if keep_every:
        kept.update(version for version in living if version[1] % keep_every == 0)
    for rewind in rewinds if keep_abandoned else ():
        if rewind.step == 0:
            kept.update([version for version in every if version[0] < rewind.lineage][:1])
    return [version for version in reversed(every) if version not in kept]


def _whole(ranks: Sequence[Sequence[SlotState]]) -> set[Version]:
    held = [{state.version for state in rank if state.version is not None} for rank in ranks]
    return set.intersection(*held) if held else set()


def _pinned(rank: Sequence[SlotState], version: Version) -> bool:
    return any(state.version == version and state.pinned for state in rank)


def _can_not_be_whole(version: Version, others: Sequence[Sequence[SlotState]]) -> bool:
    """Some other rank lacks it and went past it already."""
    for rank in others:
        held = [state.version for state in rank if state.version is not None]
        if version not in held and any(other > version for other in held):
            return True
    return False
