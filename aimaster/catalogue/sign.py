"""One sign of failure as data, and how signs are read from TOML.

A sign names the literal text that a line must hold (so that gigabytes can be searched for all literals at once), a pattern that confirms the line
and reads its named groups, and what it means: category, role in a cascade, severity, weight. Its examples that must and must not match stand
beside it and are tests. A user's own rules are read by the same code and may switch signs off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from aimaster.wire.health import CATEGORIES, Action, FaultOf, Kind, Role, Severity

SHORTEST_LITERAL: Final = 6
"""Shorter literals occur everywhere and cost more than they find."""

SUBJECT_GROUPS: Final = frozenset({"node", "rank", "gpu", "pid"})
"""Named groups that say whom a line speaks of; all others are kept as details."""


class RuleError(ValueError):
    """A rules file that cannot be used; says which sign and why."""


class Sign(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    """Unique name, SOURCE.NAME."""
    literal: tuple[str, ...]
    """A line can only match if it holds one of these, exactly as written."""
    pattern: str
    """Regular expression searched in the line; groups node, rank, gpu, pid, peer, xid … are read."""
    category: str
    """Key of the taxonomy."""
    role: Role
    """self: about where it was said; accusation: about `node`; follower: an echo; benign: no failure, and it silences the line."""
    kind: Kind = "sign"
    """See Finding.kind."""
    severity: Severity = "error"
    weight: int = 50
    """See Finding.weight."""
    fault_of: FaultOf | None = None
    action: Action | None = None
    where: str = ""
    """`kernel`: only in a kernel log line; `central`: said in a log of many nodes, so the log's own node is not meant; empty: anywhere."""
    opens: str = ""
    """Name of the block of lines that this line begins: traceback, torchrun, flight, faulthandler; `context`: the next lines speak of its subject."""
    match: tuple[str, ...] = ()
    """Lines that must match."""
    no_match: tuple[str, ...] = ()
    """Lines that must not."""

    @property
    def source(self) -> str:
        return self.id.partition(".")[0]


def read_signs(document: Mapping[str, Any], source: str) -> list[Sign]:
    """The signs of one TOML document; ids get the source's name in front."""
    found = []
    for raw in document.get("sign", ()):
        row = dict(raw)
        row["id"] = f"{source}.{row.get('id', '?')}"
        literal = row.get("literal", ())
        row["literal"] = [literal] if isinstance(literal, str) else literal
        row.setdefault("role", "self")
        try:
            sign = msgspec.convert(row, Sign)
        except msgspec.ValidationError as error:
            raise RuleError(f"sign {row['id']}: {error}") from error
        _check(sign)
        found.append(sign)
    return found


def check_pattern(sign: Sign) -> None:
    """Refuses a pattern that is no regular expression; for a user's own signs, ours are compiled by the tests."""
    try:
        re.compile(sign.pattern.encode())
    except re.error as error:
        raise RuleError(f"sign {sign.id}: pattern: {error}") from error


def retryable_signs(strings: Iterable[str], source: str) -> list[Sign]:
    """Plain error strings that a user declares worth another try."""
    return [
        Sign(
            id=f"{source}.retryable-{number}",
            literal=(text,),
            pattern=re.escape(text),
            category="app.retryable",
            role="self",
            weight=90,
        )
        for number, text in enumerate(strings, start=1)
    ]


def _check(sign: Sign) -> None:
    if sign.category not in CATEGORIES:
        raise RuleError(f"sign {sign.id}: unknown category {sign.category!r}")
    if not sign.literal:
        raise RuleError(f"sign {sign.id}: names no literal, so it could never be found")
    for literal in sign.literal:
        if len(literal) < SHORTEST_LITERAL:
            raise RuleError(f"sign {sign.id}: literal {literal!r} is shorter than {SHORTEST_LITERAL} characters")
