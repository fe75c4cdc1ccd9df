"""Where the snapshots of a run lie and how safe that is: who holds which ranks, when they were proven, in which failure domain, and what to
worry about. Pure, made from the one view model.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from aimaster.wire.checkpoint import SnapshotPlace, Tier, Version
from aimaster.wire.ids import MemberId, NodeId
from aimaster.wire.status import JobStatus

LAG_STEPS: Final = 2
"""A newest copy elsewhere that is older by more is said to lag."""
TIERS: Final = ("shm", "peer", "storage")
Labels = Mapping[NodeId, Mapping[str, str]]


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What one node's memory, or storage, has of a snapshot."""

    tier: Tier
    node: NodeId | None
    """None for storage."""
    domain: str
    """The node's failure domains, widest first: `rack=r7,switch=s3`; empty where none are told."""
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    """Ranks that are not here, or damaged."""
    verified_at: float | None
    """When the last of these ranks was proven by its digests that was proven longest ago; None: one was not since its seal."""
    damaged: tuple[int, ...] = ()
    """Ranks whose bytes here are not what their digests say."""


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """One member's snapshot of one step."""

    member: MemberId
    role: str
    version: Version
    chain: str
    ranks: int
    size_bytes: int
    whole: bool
    """Each rank lies somewhere."""
    missing: tuple[int, ...]
    """Ranks that lie nowhere."""
    holdings: tuple[Holding, ...]
    """Own memory, peers, storage."""

    @property
    def safe_places(self) -> list[Holding]:
        """Those that have it whole, each enough by itself."""
        return [holding for holding in self.holdings if not holding.missing]


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """All snapshots of a run, newest first, and what to worry about."""

    snapshots: tuple[Copies, ...]
    warnings: tuple[str, ...]


def overview(status: JobStatus) -> Overview:
    """What `aimaster checkpoints` shows."""
    labels = {node.node: node.labels for node in status.nodes}
    found = gather(status.snapshots, labels)
    return Overview(snapshots=found, warnings=tuple(warnings(found, labels)))


def gather(places: Iterable[SnapshotPlace], labels: Labels) -> tuple[Copies, ...]:
    """One record for each member and step, newest first."""
    grouped: dict[tuple[Version, MemberId], list[SnapshotPlace]] = {}
    for place in places:
        grouped.setdefault((place.version, place.member), []).append(place)
    order = sorted(grouped, key=lambda key: (-key[0].lineage, -key[0].step, key[1]))
    return tuple(_copies(grouped[key], labels) for key in order)


def warnings(found: Sequence[Copies], labels: Labels) -> Iterable[str]:
    """For each member: what one failure takes away that nothing elsewhere makes up for, and a rank that lies nowhere."""
    for member in sorted({copies.member for copies in found}):
        own = [copies for copies in found if copies.member == member]
        newest = next((copies for copies in own if copies.safe_places), None)
        for copies in own:
            yield from _damages(copies)
        if own[0].missing:
            yield f"step {own[0].version.step} of {member} is not whole: {_ranks(own[0].missing)} lies nowhere"
        if newest is None:
            yield f"no node and no storage holds a whole snapshot of {member}"
        elif (danger := _danger(newest, labels)) is not None:
            yield from _left_without(newest, own, *danger)


def _copies(places: list[SnapshotPlace], labels: Labels) -> Copies:
    first = places[0]
    every = set(range(first.ranks))
    by_place: dict[tuple[Tier, NodeId | None], dict[int, SnapshotPlace]] = {}
    for place in places:
        by_place.setdefault((place.tier, place.node), {})[place.rank] = place
    holdings = [_holding(tier, node, ranks, every, labels) for (tier, node), ranks in by_place.items()]
    held = {place.rank: place.size_bytes for place in places if not place.damaged}
    return Copies(
        member=first.member,
        role=first.role,
        version=first.version,
        chain=first.chain,
        ranks=first.ranks,
        size_bytes=sum({place.rank: place.size_bytes for place in places}.values()),
        whole=set(held) == every,
        missing=tuple(sorted(every - set(held))),
        holdings=tuple(sorted(holdings, key=lambda one: (TIERS.index(one.tier), one.node or ""))),
    )


def _holding(
    tier: Tier, node: NodeId | None, ranks: Mapping[int, SnapshotPlace], every: set[int], labels: Labels
) -> Holding:
    good = {rank: place for rank, place in ranks.items() if not place.damaged}
    return Holding(
        tier=tier,
        node=node,
        domain="" if node is None else _domain(labels.get(node, {})),
        ranks=tuple(sorted(good)),
        missing=tuple(sorted(every - set(good))),
        verified_at=_oldest(place.verified_at for place in good.values()),
        damaged=tuple(sorted(set(ranks) - set(good))),
    )


def _danger(copies: Copies, labels: Labels) -> tuple[str, set[NodeId]] | None:
    """The one failure that takes every whole copy away, in words and as nodes; None where there is none. Storage is a domain of its own."""
    what = f"step {copies.version.step} of {copies.member}"
    nodes = {holding.node for holding in copies.safe_places if holding.node is not None}
    if len(nodes) < len({holding.node for holding in copies.safe_places}):
        return None
    first = min(nodes)
    if len(nodes) == 1:
        domain = _domain(labels.get(first, {}))
        return f"the only whole copy of {what} lies on {first}{f' ({domain})' if domain else ''}", nodes
    for label, value in labels.get(first, {}).items():
        together = {node for node, one in labels.items() if one.get(label) == value}
        elsewhere = any(label in one and one[label] != value for one in labels.values())
        if elsewhere and nodes <= together:
            return f"all copies of {what} lie in {label} {value} ({', '.join(sorted(nodes))})", together
    return None


def _left_without(newest: Copies, own: Sequence[Copies], danger: str, gone: set[NodeId]) -> Iterable[str]:
    """What would be left; a step or two behind is a copy on its way, and no worry."""
    for copies in own:
        left = [holding for holding in copies.safe_places if holding.node not in gone]
        if copies.version < newest.version and left:
            lag = newest.version.step - copies.version.step
            behind = (
                f"lags {lag} steps"
                if copies.version.lineage == newest.version.lineage
                else "is of a lineage that is past"
            )
            if lag > LAG_STEPS or copies.version.lineage != newest.version.lineage:
                yield f"{danger}; the newest copy elsewhere, step {copies.version.step} {_where(left[0])}, {behind}"
            return
    yield f"{danger}; without it, nothing of this member is left"


def _damages(copies: Copies) -> Iterable[str]:
    for holding in copies.holdings:
        if holding.damaged:
            whose = f"{_ranks(holding.damaged)} of step {copies.version.step} of {copies.member}"
            yield f"{whose} is damaged {_where(holding)}: nobody uses it; if it comes again, test that node's memory"


def _where(holding: Holding) -> str:
    return "on storage" if holding.node is None else f"on {holding.node}"


def _domain(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _oldest(moments: Iterable[float | None]) -> float | None:
    every = list(moments)
    return None if None in every or not every else min(at for at in every if at is not None)
