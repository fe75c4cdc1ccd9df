"""Signs of failure as data: one TOML per source, the Xid table, and the matcher. Used live by the agent and offline by `aimaster diagnose`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from aimaster.catalogue.matcher import Catalogue, Match
from aimaster.catalogue.sign import RuleError, Sign, check_pattern, read_signs, retryable_signs
from aimaster.catalogue.xid import Xid, XidTable, load_xids

__all__ = ["Catalogue", "Match", "RuleError", "Sign", "Xid", "XidTable", "load", "load_signs", "load_xids"]


def load_signs() -> list[Sign]:
    """All packaged signs, file by file."""
    found: list[Sign] = []
    folder = files(__package__)
    for entry in sorted(folder.iterdir(), key=lambda one: one.name):
        if entry.name.endswith(".toml"):
            found += read_signs(tomllib.loads(entry.read_text(encoding="utf-8")), entry.name.removesuffix(".toml"))
    return found


def load(extra_rules: Iterable[str | Path] = (), *, plain: bool = False) -> Catalogue:
    """The catalogue in force: packaged signs, plus those of the given rules files, less the signs these switch off.

    A rules file is TOML with [[sign]] tables as in the package, `disable = [ids]` and `retryable = [error strings]`.
    """
    signs = load_signs()
    disabled: set[str] = set()
    for path in map(Path, extra_rules):
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise RuleError(f"rules file {path}: {error}") from error
        unknown = set(document) - {"sign", "disable", "retryable", "title"}
        if unknown:
            raise RuleError(f"rules file {path}: unknown key {min(unknown)!r}; known are sign, disable, retryable")
        source = path.stem.replace(".", "-")
        own = read_signs(document, source) + retryable_signs(document.get("retryable", ()), source)
        for sign in own:
            check_pattern(sign)
        signs += own
        disabled |= set(document.get("disable", ()))
    known = {sign.id for sign in signs}
    strange = disabled - known
    if strange:
        raise RuleError(f"cannot switch off {min(strange)!r}: there is no such sign")
    return Catalogue([sign for sign in signs if sign.id not in disabled], load_xids(), plain=plain)
