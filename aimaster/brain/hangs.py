"""What can be learnt when nobody says that he failed: sequence numbers, missing ranks, and who fell silent. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from aimaster.brain.correlate import Picture
from aimaster.wire.health import Evidence, Finding, Subject

SILENT_SECONDS: Final = 60.0
"""A node whose logs end that much before the others' is called silent."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusion from the echoes of a stall."""

    category: str
    subject: Subject = Subject()
    confidence: float
    why: str
    evidence: tuple[Evidence, ...] = ()


def explain_stall(picture: Picture) -> Stall | None:
    """Mismatched collectives, else the rank that is behind, else the peer everybody lost, else nobody."""
    echoes = [finding for finding in picture.findings if finding.role == "follower" and finding.weight >= 8]
    if not echoes:
        return None
    return (
        _mismatch(echoes)
        or _behind(echoes)
        or _did_not_wait(echoes)
        or _lost_peer(picture, echoes)
        or _silent_node(picture, echoes)
        or _never_came(picture, echoes)
        or _nobody(echoes)
    )


def _timeouts(echoes: Iterable[Finding]) -> list[Finding]:
    return [echo for echo in echoes if echo.sign == "torch.watchdog-timeout" and "seq" in echo.details]


def _groups(echoes: Iterable[Finding]) -> dict[int | None, str]:
    """The process group each rank waits in, where one of its lines tells it: numbers of different groups say nothing of each other."""
    return {echo.subject.rank: echo.details["pg"] for echo in echoes if "pg" in echo.details}


def _group(echo: Finding, groups: dict[int | None, str]) -> str:
    return echo.details.get("pg") or groups.get(echo.subject.rank, "")


def _mismatch(echoes: list[Finding]) -> Stall | None:
    """Different operations at the same sequence number: no rank is lost, the program diverged."""
    groups = _groups(echoes)
    by_number: dict[tuple[str, str], dict[int | None, Finding]] = {}
    for echo in _timeouts(echoes):
        place = (_group(echo, groups), echo.details["seq"])
        by_number.setdefault(place, {}).setdefault(echo.subject.rank, echo)
    for (_, number), ranks in by_number.items():
        kinds = {echo.details.get("op", "?") for echo in ranks.values()}
        sizes = {echo.details["numel_in"] for echo in ranks.values() if "numel_in" in echo.details}
        if len(kinds) > 1:
            return Stall(
                category="app.collective_mismatch",
                confidence=0.85,
                why=f"at sequence number {number} the ranks wait in different operations: {', '.join(sorted(kinds))}",
                evidence=tuple(echo.evidence[0] for echo in ranks.values()),
            )
        if len(sizes) > 1 and kinds <= {"ALLREDUCE", "BROADCAST", "REDUCE"}:
            return Stall(
                category="app.collective_mismatch",
                confidence=0.75,
                why=f"at sequence number {number} the ranks reduce tensors of different sizes: {', '.join(sorted(sizes))}",
                evidence=tuple(echo.evidence[0] for echo in ranks.values()),
            )
    return None


def _behind(echoes: list[Finding]) -> Stall | None:
    """The one rank with the smallest last enqueued number never reached the collective the others wait in."""
    known = _groups(echoes)
    groups: dict[str, dict[int, tuple[int, Finding]]] = {}
    for echo in echoes:
        rank = echo.subject.rank
        text = echo.details.get("enqueued") or (
            echo.details.get("seq") if echo.sign == "torch.watchdog-timeout" else None
        )
        if rank is None or text is None or not text.isdigit():
            continue
        numbers = groups.setdefault(_group(echo, known), {})
        if rank not in numbers or int(text) > numbers[rank][0]:
            numbers[rank] = (int(text), echo)
    found = [stall for numbers in groups.values() if (stall := _last_of(numbers)) is not None]
    return found[0] if found else None


def _did_not_wait(echoes: list[Finding]) -> Stall | None:
    """All ranks but one timed out in the same collective; that one only heard of it from them."""
    waits = {echo.subject.rank: echo for echo in _timeouts(echoes) if echo.subject.rank is not None}
    heard = {
        echo.subject.rank: echo for echo in echoes if echo.sign == "torch.dump-signal" and echo.subject.rank is not None
    }
    others = sorted({rank for echo in echoes if (rank := echo.subject.rank) is not None} - set(waits))
    if len(others) != 1 or others[0] not in heard or len({echo.details["seq"] for echo in waits.values()}) != 1:
        return None
    if len(waits) < 2:
        return None
    echo = heard[others[0]]
    return Stall(
        category="hang.straggler",
        subject=echo.subject,
        confidence=0.6,
        why=f"all ranks but {others[0]} timed out in the same collective",
        evidence=(next(iter(waits.values())).evidence[0], echo.evidence[0]),
    )


def _last_of(numbers: dict[int, tuple[int, Finding]]) -> Stall | None:
    """The rank of one process group that is behind all others of it."""
    if len(numbers) < 2:
        return None
    least, most = min(value for value, _ in numbers.values()), max(value for value, _ in numbers.values())
    behind = sorted(rank for rank, (value, _) in numbers.items() if value == least)
    if least == most or len(behind) * 2 >= len(numbers):
        return None
    echo = numbers[behind[0]][1]
    return Stall(
        category="hang.straggler",
        subject=echo.subject,
        confidence=0.75,
        why=f"rank {behind[0]} last enqueued collective {least}, the others are at {most}",
        evidence=(echo.evidence[0],),
    )


def _lost_peer(picture: Picture, echoes: list[Finding]) -> Stall | None:
    """Survivors name the peer whose connection closed; the one who names nobody is the one named."""
    voters: dict[str, set[str | None]] = {}
    proof: dict[str, Finding] = {}
    speakers: set[str | None] = set()
    for echo in echoes:
        peer = echo.details.get("peer")
        if peer and peer != echo.node:
            voters.setdefault(peer, set()).add(echo.node)
            proof.setdefault(peer, echo)
            speakers.add(echo.node)
    silent = [peer for peer in voters if peer not in speakers]
    if not silent:
        return None
    peer = max(silent, key=lambda one: len(voters[one]))
    node = next((known for known in picture.nodes if known == peer or peer.startswith(f"{known}.")), peer)
    return Stall(
        category="node.lost",
        subject=Subject(node=node),
        confidence=0.5,
        why=f"the others lost their connection to {node}, which itself reports nothing",
        evidence=(proof[peer].evidence[0],),
    )


def _silent_node(picture: Picture, echoes: list[Finding]) -> Stall | None:
    """Everybody complains but one, whose logs end earlier."""
    speakers = {echo.node for echo in echoes if echo.node}
    quiet = [node for node in picture.nodes if node not in speakers and node in picture.ends]
    if len(quiet) != 1 or len(speakers) < 2:
        return None
    last = max(picture.ends.get(node, 0.0) for node in speakers if node)
    if last - picture.ends[quiet[0]] < SILENT_SECONDS:
        return None
    return Stall(
        category="node.lost",
        subject=Subject(node=quiet[0]),
        confidence=0.5,
        why=f"{quiet[0]} fell silent {last - picture.ends[quiet[0]]:.0f} s before the others stopped waiting for it",
    )


def _never_came(picture: Picture, echoes: list[Finding]) -> Stall | None:
    """Gloo gave up waiting in every log that shows steps but one: who had been in the collective would have given up as well, and a dead
    process would have closed its connections.
    """
    gave_up = [echo for echo in echoes if echo.sign == "torch.gloo-timeout" and echo.evidence]
    files = {echo.evidence[0].file for echo in gave_up}
    quiet = sorted(set(picture.progress) - {echo.evidence[0].file for echo in echoes if echo.evidence})
    if len(quiet) != 1 or not files & set(picture.progress):
        return None
    last = picture.progress[quiet[0]]
    return Stall(
        category="hang.straggler",
        subject=last.subject,
        confidence=0.5,
        why=f"all logs but {quiet[0]} say that they waited for a peer in vain",
        evidence=(gave_up[0].evidence[0], *last.evidence[:1]),
    )


def _nobody(echoes: list[Finding]) -> Stall | None:
    stalled = [echo for echo in echoes if echo.category in ("hang.unknown", "hang.straggler")]
    if not stalled:
        return None
    first = min(stalled, key=lambda echo: (echo.time_seconds is None, echo.time_seconds or 0.0))
    return Stall(
        category="hang.unknown",
        confidence=0.5,
        why="all ranks that speak wait in the same collective, and nothing says which one never came",
        evidence=(first.evidence[0],) if first.evidence else (),
    )
