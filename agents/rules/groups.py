"""Where the ranks of one job stand, and which of them keeps the others waiting. Pure.

Looks at all ranks are taken some time apart. Those that stand in the same place in all looks are *steady*. The guilty are the steady few
that are elsewhere than the steady many, where the many wait: in a collective, or idle. A rank that moves is computing, and then nobody is
guilty; nor is anybody where all stand in the same place (a slow phase looks like that), or where the waiting are fewer than the others.

How long they are given depends on what they do there. *Asleep*: the main thread was never scheduled and no child works for it, so nothing
can have happened. *Busy*: it computes without reading or writing anything, as a spin does, and a long call too. *Working*: it or its children
read and write, or the kernel holds one of them for a disk or a file server (state D).
"""

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from agents.rules.hang import IDLE_RATIO, Frame, same_place

Doing = Literal["asleep", "busy", "working"]

LEAST_LOOKS: Final = 3
SWITCHES_PER_SECOND: Final = 1.0
SWITCHES_PER_LOOK: Final = 6.0
"""A dump that the process writes itself wakes its main thread."""
RESTING_RATIO: Final = 0.05
"""Of a core, for all of a rank's processes: what monitors and heartbeats in other threads take."""
BUSY_RATIO: Final = 0.1
"""Less is the polling of something outside; a spinner on a crowded machine still gets so much."""
CALLS_PER_SECOND: Final = 20.0
"""Reads and writes beyond those of a heartbeat."""
FLOORS: Final[dict[Doing, tuple[float, float]]] = {"asleep": (4, 2), "busy": (4, 2), "working": (24, 12)}
"""In shortest leases: the silence of the job that it takes, and for how long they must be seen standing."""
LEASES: Final[dict[Doing, float]] = {"asleep": 0.5, "busy": 1.0, "working": 4.0}
"""In leases, where one is learnt: the same silence. Half a lease is five times the usual pause."""
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
    children_cpu_seconds: float = 0.0
    """Of the living processes below it."""
    switches: int = 0
    """How often its main thread was scheduled."""
    calls: int = 0
    """Reads and writes of it and its children."""
    blocked: bool = False
    """One of them is in state D."""
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
    doing: Doing
    """What the busiest of them does there."""
    seconds: float
    """How long they are known to stand there."""


class Silence(msgspec.Struct, frozen=True, kw_only=True):
    """Since when nobody of the job has made a step, at the last look, and what is known of such silences."""

    seconds: float
    lease_seconds: float | None
    """What was learnt; None while unlearnt."""
    floor_seconds: float
    """The shortest lease."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of a node in one place."""

    waits: bool
    doing: Doing
    seen_seconds: float
    """How long they were seen there."""


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


def find_apart(history: Sequence[Sequence[RankLook]], silence: Silence) -> Apart | None:
    """Who keeps the others waiting, over the longest run of looks up to the last in which everybody was steady."""
    looks = steady(history)
    if len(looks) < LEAST_LOOKS or not looks[-1]:
        return None
    first, last = looks[0], looks[-1]
    groups = group(last)
    many = next((one for one in groups if one.waits), None) or groups[0]
    few = [one for one in groups if one is not many]
    count = sum(len(one.ranks) for one in few)
    if not few or count > len(many.ranks):
        return None
    if not many.waits and (count == len(many.ranks) or not set(many.ranks) <= _idle(first, last)):
        return None
    guilty = [one for one in few if not one.waits]
    kind: Literal["straggler", "mismatch"] = "straggler" if guilty else "mismatch"
    ranks = tuple(sorted(rank for one in (guilty or few) for rank in one.ranks))
    doings = activity(looks)
    doing = _busiest(doings[rank] for rank in ranks)
    asleep = doing == "asleep" or all(doings[rank] == "asleep" for rank in many.ranks)
    if silence.lease_seconds is None and not asleep:
        return None  # steps that nobody tells of may go by between the looks
    stood = _stood(history, looks, doing, silence)
    return None if stood is None else Apart(ranks=ranks, kind=kind, doing=doing, seconds=stood)


def find_standing(history: Sequence[Sequence[RankLook]], silence: Silence) -> Standing | None:
    """Where all ranks of this node stand together, as long as it takes to name one: who waits for whom, other nodes tell."""
    looks = steady(history)
    groups = group(looks[-1]) if looks else []
    if len(looks) < LEAST_LOOKS or len(groups) != 1 or groups[0].stack is None:
        return None
    there = groups[0]
    doing = _busiest(activity(looks).values())
    if silence.lease_seconds is None and doing != "asleep":
        return None
    # A collective may spin while it waits: that is no work.
    patience: Doing = "asleep" if there.waits else doing
    if _stood(history, looks, patience, silence) is None:
        return None
    return Standing(waits=there.waits, doing=doing, seen_seconds=_seen_seconds(looks))


def _busiest(doings: Iterable[Doing]) -> Doing:
    return max(doings, key=list(FLOORS).index)


def _stood(
    history: Sequence[Sequence[RankLook]],
    looks: Sequence[Sequence[RankLook]],
    doing: Doing,
    silence: Silence,
) -> float | None:
    """How long they are known to stand there; None where that is not long enough for what they do."""
    seen = _seen_seconds(looks)
    # Who stood there at the first look of this silence has stood there since it began, as far as anybody knows.
    stood = silence.seconds if len(looks) == len(history) else seen
    if seen < FLOORS[doing][1] * silence.floor_seconds or stood < patience_seconds(doing, silence):
        return None
    return stood


def _seen_seconds(looks: Sequence[Sequence[RankLook]]) -> float:
    return min(one.at for one in looks[-1]) - max(one.at for one in looks[0])


def patience_seconds(doing: Doing, silence: Silence) -> float:
    """How long nobody must have made a step before the guilty are named."""
    return max(FLOORS[doing][0] * silence.floor_seconds, LEASES[doing] * (silence.lease_seconds or 0.0))


def activity(looks: Sequence[Sequence[RankLook]]) -> dict[int, Doing]:
    """What each rank does, over these looks."""
    before = {one.rank: one for one in looks[0]}
    return {one.rank: _doing(before[one.rank], one, len(looks)) for one in looks[-1]}


def _doing(first: RankLook, last: RankLook, looks: int) -> Doing:
    seconds = max(last.at - first.at, 0.001)
    children = (last.children_cpu_seconds - first.children_cpu_seconds) / seconds
    own = (last.cpu_seconds - first.cpu_seconds) / seconds
    woken = last.switches - first.switches
    quiet = last.calls - first.calls <= CALLS_PER_SECOND * seconds and not last.blocked
    if quiet and woken <= SWITCHES_PER_SECOND * seconds + SWITCHES_PER_LOOK * looks and own + children <= RESTING_RATIO:
        return "asleep"
    return "busy" if quiet and children <= RESTING_RATIO and own >= BUSY_RATIO else "working"


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


def steady(history: Sequence[Sequence[RankLook]]) -> list[Sequence[RankLook]]:
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
