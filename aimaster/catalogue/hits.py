"""What the scan of a log keeps: statements, and how far the log has come; and how many statements of one sign."""

from __future__ import annotations

from typing import Final

import msgspec

from aimaster.catalogue.lines import Speaker, Stamp
from aimaster.catalogue.sign import Sign
from aimaster.wire.health import Subject

CAP: Final = {"echo": 512, "root": 8192, "fact": 65536}


class Hit(msgspec.Struct, kw_only=True):
    """One statement found in a log, before names and times are settled."""

    sign: Sign
    groups: dict[str, str]
    speaker: Speaker
    context: Subject | None
    """Whom the lines before it spoke of, for lines that name nobody."""
    stamp: Stamp | None
    offset: int
    line: int
    text: str
    count: int = 1
    last_line: bytes = b""
    last_offset: int = 0


def most_of(sign: Sign) -> int:
    """How many different statements of one sign are kept of one log."""
    if sign.kind != "sign":
        return CAP["fact"]
    return CAP["root"] if sign.role in ("self", "accusation") else CAP["echo"]


class ProgressMark(msgspec.Struct, frozen=True, kw_only=True):
    """The newest progress of this file at some point of it."""

    stamp: Stamp | None
    offset: int
    number: float
    text: str
