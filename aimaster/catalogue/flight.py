"""Flight recorder dumps of PyTorch process groups: which ranks never came to the collective that the others wait in.

A dump is a file per rank (nccl_trace_rank_3, comm_lib_trace_rank_3, …), pickled or JSON; pickles are read by `plain_pickle`, never unpickled.
`compare` lays the dumps of one collection side by side, group by group: who enqueued the sequence number that others wait for, who has another
operation there, and, among groups that wait for each other, which rank waits for nobody.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from aimaster.catalogue.plain_pickle import NotPlainError, read_plain_pickle
from aimaster.wire.health import Evidence, Finding, Role, Subject

LARGEST_BYTES: Final = 64 * 1024 * 1024
"""A dump of the default 2,000 entries with stacks has a few megabytes; what is larger is not read."""
MOST_ENTRIES: Final = 200_000

_RANK_IN_NAME = re.compile(r"(\d+)(?:\.(?:json|pickle|pkl))?$")
_SAME_SIZE: Final = ("all_reduce", "allreduce", "broadcast", "reduce")
"""Operations whose input has the same size on every rank."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One collective of one rank, as it was enqueued."""

    sequence: int
    operation: str
    sizes: str
    done: bool
    created_ns: int


class Dump(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank recorded."""

    rank: int
    node: str | None
    file: str
    members: dict[str, tuple[int, ...]]
    """Ranks of each group that the dump knows."""
    calls: dict[str, tuple[Call, ...]]
    """The newest collectives of each group, in order."""


def may_be_dump(head: bytes) -> bool:
    """A cheap look at the first bytes of a file."""
    start = head[:4096]
    if start[:1] == b"\x80":
        return b"pg_config" in start or b"version" in start[:64]
    return start.lstrip()[:1] == b"{" and (b'"pg_config"' in start or b'"entries"' in start or b'_version"' in start)


def read_dump(data: bytes, *, file: str, node: str | None) -> Dump | None:
    """The dump in a file's bytes, or None when it is none."""
    try:
        document: Any = read_plain_pickle(data) if data[:1] == b"\x80" else json.loads(data)
    except (NotPlainError, json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        return None
    rank = _rank(document, file)
    if rank is None or "pg_config" not in document:
        return None
    calls: dict[str, list[Call]] = defaultdict(list)
    for entry in document["entries"][-MOST_ENTRIES:]:
        if isinstance(entry, dict) and (call := _call(entry)) is not None:
            calls[_group(entry)].append(call)
    return Dump(
        rank=rank,
        node=node,
        file=file,
        members=_members(document.get("pg_config")),
        calls={group: tuple(sorted(found, key=lambda one: one.sequence)) for group, found in calls.items()},
    )


def _rank(document: Mapping[str, Any], file: str) -> int | None:
    told = document.get("rank")
    if isinstance(told, int):
        return told
    named = _RANK_IN_NAME.search(file)
    return int(named[1]) if named else None


def _group(entry: Mapping[str, Any]) -> str:
    group = entry.get("process_group")
    return _word(group[0] if isinstance(group, (list, tuple)) and group else entry.get("pg_id"))


def _call(entry: Mapping[str, Any]) -> Call | None:
    if entry.get("is_p2p"):
        return None
    sequence = _number(entry.get("collective_seq_id", entry.get("seq_id")))
    if sequence is None:
        return None
    return Call(
        sequence=sequence,
        operation=_word(entry.get("profiling_name")).rpartition(":")[2],
        sizes=_sizes(entry.get("input_sizes")),
        done=entry.get("state") == "completed" or bool(entry.get("retired")),
        created_ns=_number(entry.get("time_created_ns")) or 0,
    )


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _word(value: Any) -> str:
    """A name or number as text; anything else is not spelt out, for it may be larger than the dump."""
    return str(value)[:200] if isinstance(value, (str, int)) else "?"


def _sizes(value: Any) -> str:
    """The shapes of the first few tensors."""
    shapes = [shape for shape in value[:8] if isinstance(shape, (list, tuple))] if isinstance(value, list) else []
    return " ".join("x".join(_word(size) for size in shape[:8]) or "scalar" for shape in shapes)


def _members(config: Any) -> dict[str, tuple[int, ...]]:
    found = {}
    for name, row in config.items() if isinstance(config, dict) else ():
        ranks = row.get("ranks") if isinstance(row, dict) else None
        if isinstance(ranks, str):
            found[_word(name)] = tuple(int(rank) for rank in re.findall(r"\d{1,9}", ranks))
        elif isinstance(ranks, list):
            found[_word(name)] = tuple(rank for rank in ranks if isinstance(rank, int))
    return found


# ------------------------------------------------------------------------------------------------------------ comparing


class _Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One group that stands still: at which number, who waits, who is not there."""

    group: str
    call: Call
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


def compare(dumps: Iterable[Dump]) -> list[Finding]:
    """The ranks that never came, or the operations that differ; nothing when all dumps agree."""
    by_rank = {dump.rank: dump for dump in dumps}
    if len(by_rank) < 2:
        return []
    groups = sorted({group for dump in by_rank.values() for group in dump.calls})
    waits = [wait for group in groups if (wait := _wait(group, by_rank)) is not None]
    differing = [found for group in groups if (found := _differing(group, by_rank))]
    if differing:
        return differing[0]
    held_up = {rank for wait in waits for rank in wait.waiting}
    guilty = [(wait, rank) for wait in waits for rank in wait.missing if rank not in held_up]
    if not guilty and waits:
        first = min(waits, key=lambda wait: wait.call.created_ns)
        guilty = [(first, rank) for rank in first.missing]
    return [_missing(by_rank, wait, rank) for wait, rank in _once_per_rank(guilty)]


def _wait(group: str, dumps: Mapping[int, Dump]) -> _Wait | None:
    """Where the group stands still, if some of it wait for others."""
    open_calls = {
        rank: next((call for call in dump.calls.get(group, ()) if not call.done), None) for rank, dump in dumps.items()
    }
    numbers = [call.sequence for call in open_calls.values() if call is not None]
    if not numbers:
        return None
    front = min(numbers)
    waiting = tuple(rank for rank, call in open_calls.items() if call is not None and call.sequence == front)
    reached = {
        rank: max((call.sequence for call in dump.calls.get(group, ())), default=0) for rank, dump in dumps.items()
    }
    expected = _expected(group, [dumps[rank] for rank in waiting]) or tuple(dumps)
    missing = tuple(rank for rank in expected if reached.get(rank, 0) < front and rank not in waiting)
    if not missing or len(missing) * 2 > len(expected):
        return None
    call = open_calls[waiting[0]]
    return None if call is None else _Wait(group=group, call=call, waiting=waiting, missing=missing)


def _expected(group: str, waiting: Sequence[Dump]) -> tuple[int, ...]:
    """The group's ranks as those who wait know them; the default group of gloo is written down without its name."""
    for dump in waiting:
        for name in (group, ""):
            if dump.members.get(name):
                return dump.members[name]
    return ()


def _differing(group: str, dumps: Mapping[int, Dump]) -> list[Finding]:
    """Another operation, or another size where all must be equal, under one sequence number."""
    at_number: dict[int, list[tuple[int, Call]]] = defaultdict(list)
    for rank, dump in dumps.items():
        for call in dump.calls.get(group, ()):
            at_number[call.sequence].append((rank, call))
    for number in sorted(at_number):
        calls = at_number[number]
        kinds = {call.operation for _, call in calls}
        sizes = {call.sizes for _, call in calls}
        if len(kinds) > 1 or (len(sizes) > 1 and kinds <= set(_SAME_SIZE)):
            return [
                _finding(
                    dumps[rank],
                    category="app.collective_mismatch",
                    sign="torch.flight-mismatch",
                    role="self",
                    subject=Subject(),
                    weight=88,
                    text=f"group {group or 'default'}, number {number}: rank {rank} enqueued {call.operation} {call.sizes}",
                    call=call,
                )
                for rank, call in _one_of_each(calls)
            ]
    return []


def _one_of_each(calls: Sequence[tuple[int, Call]]) -> list[tuple[int, Call]]:
    seen: dict[tuple[str, str], tuple[int, Call]] = {}
    for rank, call in calls:
        seen.setdefault((call.operation, call.sizes), (rank, call))
    return list(seen.values())


def _once_per_rank(guilty: Iterable[tuple[_Wait, int]]) -> list[tuple[_Wait, int]]:
    first: dict[int, tuple[_Wait, int]] = {}
    for wait, rank in sorted(guilty, key=lambda pair: pair[0].call.created_ns):
        first.setdefault(rank, (wait, rank))
    return list(first.values())


def _missing(dumps: Mapping[int, Dump], wait: _Wait, rank: int) -> Finding:
    witness = dumps[wait.waiting[0]]
    own = dumps.get(rank)
    silent = "" if own is not None else ", and left no dump"
    return _finding(
        witness,
        category="hang.straggler",
        sign="torch.missing-ranks",
        role="accusation",
        subject=Subject(node=own.node if own else None, rank=rank),
        weight=88,
        text=(
            f"group {wait.group or 'default'}: {len(wait.waiting)} ranks wait in {wait.call.operation} number "
            f"{wait.call.sequence}; rank {rank} never enqueued it{silent}"
        ),
        call=wait.call,
    )


def _finding(
    dump: Dump, *, category: str, sign: str, role: Role, subject: Subject, weight: int, text: str, call: Call
) -> Finding:
    at = call.created_ns / 1e9 or None
    proof = Evidence(node=dump.node, file=dump.file, time_seconds=at, text=text, role=role, sign=sign)
    return Finding(
        sign=sign,
        category=category,
        role=role,
        subject=subject,
        node=dump.node,
        time_seconds=at,
        weight=weight,
        details={"seq": str(call.sequence), "op": call.operation, "why": text},
        evidence=(proof,),
    )
