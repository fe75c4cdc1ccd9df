"""Where the ranks of one job stand, and which of them keeps the others waiting. Pure.

Looks at all ranks are taken some time apart. Those that stand in the same place in all looks are *steady*. The guilty are the steady few
that are elsewhere than the steady many, where the many wait: in a collective, or idle. A rank that moves is computing, and then nobody is
guilty; nor is anybody where all stand in the same place (a slow phase looks like that), or where the waiting are fewer than the others.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from agents.rules.hang import IDLE_RATIO, Frame, same_place

LEAST_LOOKS: Final = 3
COLLECTIVE_FILES: Final = (
    "torch/distributed/",
    "torch/nn/parallel/distributed.py",
    "deepspeed/comm/",
    "horovod/",
    "mpi4py/",
)
COLLECTIVE_CALLS: Final = frozenset(
    {
        "all_reduce",
        "allreduce",
        "all_gather",
        "allgather",
        "all_gather_into_tensor",
        "reduce_scatter",
        "all_to_all",
        "broadcast",
        "barrier",
        "monitored_barrier",
        "reduce_scatter_tensor",
        "broadcast_object_list",
        "all_gather_object",
    }
)
INNER_FRAMES: Final = 8
"""A collective is among the innermost frames; further out, `torch/distributed` may only have started the program."""
LAUNCHERS: Final = ("torch/distributed/run.py", "torch/distributed/launcher/", "torch/distributed/elastic/")


class RankLook(msgspec.Struct, frozen=True, kw_only=True):
    """One rank at one time."""

    rank: int
    member: str
    pid: int
    at: float
    """Monotonic seconds."""
    state: str
    """Of /proc/PID/stat."""
    cpu_seconds: float
    stack: tuple[Frame, ...] | None
    """Of its main thread, innermost first; None where it could not be read."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """These ranks are here."""

    ranks: tuple[int, ...]
    stack: tuple[Frame, ...] | None
    waits: bool
    """In a collective."""


class Apart(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that the others wait for, and why."""

    ranks: tuple[int, ...]
    kind: Literal["straggler", "mismatch"]
    """`mismatch`: they wait as well, in another collective."""
    idle: bool
    """They use no processor."""
    seconds: float
    """How long they were seen so."""


def waits(stack: tuple[Frame, ...] | None) -> bool:
    """Whether the thread stands in a collective."""
    return any(
        frame.function in COLLECTIVE_CALLS
        or (any(part in frame.file for part in COLLECTIVE_FILES) and not any(part in frame.file for part in LAUNCHERS))
        for frame in (stack or ())[:INNER_FRAMES]
    )


def group(looks: Sequence[RankLook]) -> list[Group]:
    """The ranks of one look by place, the largest group first; ranks whose stack is unknown stand together by state."""
    places: list[list[RankLook]] = []
    for look in sorted(looks, key=lambda one: one.rank):
        place = next((place for place in places if _together(place[0], look)), None)
        if place is None:
            places.append([look])
        else:
            place.append(look)
    places.sort(key=lambda place: -len(place))
    return [
        Group(ranks=tuple(one.rank for one in place), stack=place[0].stack, waits=waits(place[0].stack))
        for place in places
    ]


def find_apart(history: Sequence[Sequence[RankLook]], *, lease_seconds: float) -> Apart | None:
    """Who keeps the others waiting, over the longest run of looks up to the last in which everybody was steady.

    They must have stood there for a lease; for two, where they use the processor: a long computation in one call looks like a spin.
    """
    looks = _steady(history)
    if len(looks) < LEAST_LOOKS or not looks[-1]:
        return None
    first, last = looks[0], looks[-1]
    groups = group(last)
    many = next((one for one in groups if one.waits), None) or groups[0]
    few = [one for one in groups if one is not many]
    count = sum(len(one.ranks) for one in few)
    idle = _idle(first, last)
    seconds = min(one.at for one in last) - max(one.at for one in first)
    if not few or count > len(many.ranks):
        return None
    if not many.waits and (count == len(many.ranks) or not set(many.ranks) <= idle):
        return None
    guilty = [one for one in few if not one.waits]
    kind: Literal["straggler", "mismatch"] = "straggler" if guilty else "mismatch"
    ranks = tuple(sorted(rank for one in (guilty or few) for rank in one.ranks))
    resting = set(ranks) <= idle
    if seconds < lease_seconds * (1 if resting else 2):
        return None
    return Apart(ranks=ranks, kind=kind, idle=resting, seconds=seconds)


def describe(groups: Sequence[Group]) -> list[str]:
    """One line a group: who is where."""
    lines = []
    for one in groups:
        names = ",".join(map(str, one.ranks))
        who = f"rank {names} is" if len(one.ranks) == 1 else f"ranks {names} are"
        if not one.stack:
            lines.append(f"{who} where no stack can be read")
            continue
        own = next((frame for frame in one.stack if not _library(frame)), one.stack[-1])
        inner = one.stack[0]
        called = "" if own == inner else f", called from {own.function} ({_short(own)})"
        doing = "waiting in" if one.waits else "in"
        lines.append(f"{who} {doing} {inner.function} ({_short(inner)}){called}")
    return lines


def _together(one: RankLook, other: RankLook) -> bool:
    if one.stack is None or other.stack is None:
        return one.stack is other.stack and one.state == other.state
    return same_place(one.stack, other.stack)


def _steady(history: Sequence[Sequence[RankLook]]) -> list[Sequence[RankLook]]:
    """The looks at the end that all show everybody where the last one does."""
    if not history:
        return []
    last = {one.rank: one for one in history[-1]}
    kept: list[Sequence[RankLook]] = []
    for looks in reversed(history):
        seen = {one.rank: one for one in looks}
        if seen.keys() != last.keys() or not all(_together(seen[rank], last[rank]) for rank in last):
            break
        kept.insert(0, looks)
    return kept


def _idle(first: Sequence[RankLook], last: Sequence[RankLook]) -> set[int]:
    before = {one.rank: one for one in first}
    return {
        one.rank
        for one in last
        if one.cpu_seconds - before[one.rank].cpu_seconds <= IDLE_RATIO * max(0.0, one.at - before[one.rank].at) + 0.02
    }


def _library(frame: Frame) -> bool:
    return "site-packages/" in frame.file or "/lib/python" in frame.file or frame.file.startswith("<frozen")


def _short(frame: Frame) -> str:
    return f"{frame.file.rpartition('/')[2]}:{frame.line}"
