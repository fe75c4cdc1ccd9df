"""The ranks of one job on this node: who they are, where they stand, and the report on the one that the others wait for.

Ranks are found by the variables that every launcher sets (RANK, WORLD_SIZE), in members that are ranks themselves and among the children
of a launcher that is one member. Taking stacks never stops a process.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from agents import stacks
from agents.member import Ended, Member, read_record
from agents.rules.groups import Apart, Group, RankLook, describe
from agents.sensors.process import TICKS_PER_SECOND, context_switches, io_calls, members_of, read_table
from agents.shim import stat_fields
from aimaster.wire.health import Evidence, Finding, Subject

MOST_RANKS = 64
"""Of one node; more are not looked at."""
MOST_CHILDREN = 32
"""Of one rank, whose reads and writes are counted."""
LEFT_SECONDS = 60.0
"""A rank that left longer ago is not what the others waited for."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's process."""

    rank: int
    member: str
    pid: int
    dump: Path
    """Where faulthandler writes, if the process handles the signal."""


def is_rank(member: Member) -> bool:
    """Whether this member is one of several ranks of a wrapped command."""
    env = member.spec.env
    return member.spec.role == "command" and "RANK" in env and env.get("WORLD_SIZE", "1") != "1"


def find_ranks(members: Iterable[Member]) -> list[Rank]:
    """All ranks of a command on this node, in order; fewer than two are no group."""
    table = read_table()
    children: dict[int, list[int]] = {}
    for pid, fields in table.items():
        children.setdefault(int(fields[1]), []).append(pid)
    found: dict[int, Rank] = {}
    for member in members:
        if member.spec.role != "command" or member.process is None or not member.alive:
            continue
        for pid in _topmost(member.process.pid, children, members_of(member.process.pid, table)):
            rank = int(_variables(pid)["RANK"])
            python = _python(pid, children)
            found.setdefault(rank, Rank(rank=rank, member=member.name, pid=python, dump=member.folder / "stacks.txt"))
    return [found[rank] for rank in sorted(found)][:MOST_RANKS]


def _topmost(leader: int, children: Mapping[int, list[int]], family: set[int]) -> list[int]:
    """The outermost processes of a family that have a rank of their own: a rank's data loaders inherit its variables."""
    waiting, found = [leader], []
    while waiting:
        pid = waiting.pop()
        variables = _variables(pid)
        if variables.get("RANK", "").isdigit() and variables.get("WORLD_SIZE", "1") != "1":
            found.append(pid)
        else:
            waiting += [child for child in children.get(pid, ()) if child in family]
    return found


def _variables(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return {}
    wanted = (b"RANK=", b"WORLD_SIZE=")
    return dict(word.decode(errors="replace").split("=", 1) for word in words if word.startswith(wanted))


def _python(pid: int, children: Mapping[int, list[int]]) -> int:
    """The interpreter under a shell or wrapper; the process itself where there is none."""
    waiting = [pid]
    while waiting:
        one = waiting.pop(0)
        try:
            if "python" in os.path.basename(os.readlink(f"/proc/{one}/exe")):
                return one
        except OSError:
            pass
        waiting += children.get(one, ())
    return pid


async def look(ranks: Sequence[Rank], wait_seconds: float) -> tuple[list[RankLook], dict[int, str]]:
    """Where all of them stand, and the dumps as text; one after the other, so that a node of 64 ranks is not overrun."""
    looks, texts = [], {}
    table = await asyncio.to_thread(read_table)
    for one in ranks:
        text = await stacks.dump(one.pid, one.dump, wait_seconds)
        facts = stat_fields(one.pid)
        if facts is None or facts[0] in "ZX":
            continue
        texts[one.rank] = text or ""
        children = members_of(one.pid, table) - {one.pid}
        looks.append(
            RankLook(
                rank=one.rank,
                member=one.member,
                pid=one.pid,
                at=time.monotonic(),
                state=facts[0],
                cpu_seconds=_cpu_seconds(facts),
                children_cpu_seconds=sum(_cpu_seconds(table[pid]) for pid in children),
                switches=context_switches(one.pid),
                calls=sum(map(io_calls, (one.pid, *sorted(children)[:MOST_CHILDREN]))),
                blocked="D" in (facts[0], *(table[pid][0] for pid in children)),
                stack=stacks.stack_of(text, 0) if text else None,
            )
        )
    return looks, texts


def _cpu_seconds(fields: Sequence[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def accuse(node: str, looks: Sequence[RankLook], groups: Sequence[Group], apart: Apart, at: float) -> list[Finding]:
    """A finding for each guilty rank: where it is, and where the others are."""
    by_rank = {one.rank: one for one in looks}
    where = describe(groups)
    proof = tuple(
        Evidence(node=node, file="stacks", time_seconds=at, text=line, sign="ranks.apart", role="accusation")
        for line in where
    )
    return [
        Finding(
            id=f"{node}:ranks.apart:{rank}:{by_rank[rank].pid}",
            sign="ranks.apart",
            category="hang.straggler" if apart.kind == "straggler" else "app.collective_mismatch",
            role="accusation",
            severity="error",
            subject=Subject(node=node, rank=rank, pid=by_rank[rank].pid),
            node=node,
            time_seconds=at,
            weight=80 if apart.kind == "straggler" else 45,
            details={"seconds": f"{apart.seconds:.1f}", "doing": apart.doing, "ranks": str(len(looks))},
            evidence=proof,
        )
        for rank in apart.ranks
    ]


def left_early(node: str, dying: Member, members: Iterable[Member], at: float) -> list[Finding]:
    """Ranks that had left with exit code 0 when this one ended badly: others may have waited for them. It only counts where the
    dying one has no reason of its own.
    """
    found = []
    for other in members:
        how = read_record(other.folder / "exit.json", Ended)
        left = other is not dying and is_rank(other) and how is not None and how.incarnation == other.incarnation
        if not left or how is None or how.exit_code != 0 or not 0 <= at - how.at <= LEFT_SECONDS:
            continue
        text = f"{other.name} had left with exit code 0, {at - how.at:.1f} s before {dying.name} lost its peer"
        found.append(
            Finding(
                id=f"{node}:ranks.left:{other.name}:{other.incarnation}",
                sign="ranks.left",
                category="process.killed",
                role="accusation",
                subject=Subject(node=node, rank=other.spec.rank, pid=other.process.pid if other.process else None),
                node=node,
                time_seconds=how.at,
                weight=70,
                evidence=(
                    Evidence(
                        node=node,
                        file="exit.json",
                        time_seconds=how.at,
                        text=text,
                        role="accusation",
                        sign="ranks.left",
                    ),
                ),
            )
        )
    return found
