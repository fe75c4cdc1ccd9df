"""What a caller hands in, checked at once and by name, so that nothing odd travels to the saving thread, a file or a helper."""

from __future__ import annotations

import contextlib
import operator
import os
import re
from typing import Any

MODES = ("overlap", "copy", "protect")
_LIMIT = 1 << 63
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")


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


def version(name: str, value: Any) -> tuple[int, int] | None:
    """A (lineage, step) pair, or None. Raises TypeError."""
    if value is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        lineage, step = value
        return operator.index(lineage), operator.index(step)
    raise TypeError(f"{name} {value!r} is no version: give (lineage, step)")


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
    """Of a new engine. Raises ValueError, TypeError."""
    for kind, name in (("member", member), ("role", role)):
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{kind} {name!r} may have letters, digits, '_' and '-' only, a hundred at most")
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")
    if isinstance(flush_every, str) and flush_every != "auto":
        raise ValueError(f"flush_every {flush_every!r}: give a number, 'auto' or None")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks}: out of range")
    least_one = {"slots": slots, "keep": keep, "keep_every": keep_every, "flush_every": flush_every}
    for kind, number in least_one.items():
        if number is not None and not isinstance(number, int | str):
            raise TypeError(f"{kind} {number!r} is a {type(number).__name__}: give a whole number")
        if isinstance(number, int) and number < 1:
            raise ValueError(f"{kind} {number}: out of range, at least 1")


def check_surroundings(
    *,
    storage: str | os.PathLike[str] | None,
    folder: str | os.PathLike[str] | None,
    on_event: object,
    on_sealed: object,
) -> None:
    """Of a new engine. Raises ValueError, TypeError."""
    for kind, given in (("storage", storage), ("folder", folder)):
        if given is not None and not os.fspath(given):
            raise ValueError(f"{kind} is empty: name a folder{' or a URL' if kind == 'storage' else ''}, or give None")
    if storage is not None and os.path.exists(storage) and not os.path.isdir(storage):
        raise ValueError(f"storage {os.fspath(storage)!r} is no folder")
    for kind, one in (("on_event", on_event), ("on_sealed", on_sealed)):
        if one is not None and not callable(one):
            raise TypeError(f"{kind} {one!r} cannot be called")
