"""What a caller hands in, checked at once and by name, so that nothing odd travels to the saving thread, a file or a helper. Pure."""

from __future__ import annotations

import contextlib
import operator
import re
from typing import Any

MODES = ("overlap", "copy", "protect")
_LIMIT = 1 << 63
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def count(name: str, value: Any) -> int:
    """A plain int out of whatever is one (also numpy's, or a tensor of one). Raises TypeError, or ValueError below 0 or past 63 bits."""
    number = None
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # told below, with the name
            number = operator.index(value)
    if number is None:
        raise TypeError(
            f"{name} {value!r} is a {type(value).__name__}; nothing was saved. Give a whole number, int({name})"
        )
    if not 0 <= number < _LIMIT:
        raise ValueError(f"{name} {number} is out of range; nothing was saved. Give a number from 0 on")
    return number


def text(name: str, value: Any) -> str:
    """Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} {value!r} is a {type(value).__name__}; nothing was saved. Give text, str({name})")
    return str.__str__(value)


def check(
    *,
    member: str,
    role: str,
    rank: int,
    ranks: int,
    slots: int,
    keep: int,
    keep_every: int | None,
    flush_every: int | str | None,
    mode: str,
) -> None:
    """Of a new engine. Raises ValueError."""
    for kind, name in (("member", member), ("role", role)):
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{kind} {name!r} may have letters, digits, '_' and '-' only")
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
    if isinstance(flush_every, str) and flush_every != "auto":
        raise ValueError(f"flush_every {flush_every!r}: give a number, 'auto' or None")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: out of range")
    least_one = {"slots": slots, "keep": keep, "keep_every": keep_every, "flush_every": flush_every}
    for kind, number in least_one.items():
        if isinstance(number, int) and number < 1:
            raise ValueError(f"{kind} {number}: out of range, at least 1")
