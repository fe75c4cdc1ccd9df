"""What the configuration says to its reader.

SettingsError          the configuration cannot be used; holds every problem found, each with source, key and remedy
  Problem              one of them
Notice                 something accepted, changed or without effect, said once
"""

from collections.abc import Sequence

import msgspec


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Why a value cannot stand."""

    key: str
    """Dotted path of the key, empty where the whole source is meant."""
    where: str
    """The file, variable or flag it came from."""
    text: str
    """What is wrong and what to do."""

    def __str__(self) -> str:
        return _sentence(self.where, self.key, self.text)


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A sentence about a value that stands."""

    key: str
    """Dotted path of the key."""
    where: str
    """The file, variable or flag it came from; empty where nobody gave it."""
    text: str
    """What was done with it, and why."""

    def __str__(self) -> str:
        return _sentence(self.where, self.key, self.text)


class SettingsError(Exception):
    """The configuration cannot be used; nothing was started."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems:", *lines]))


def _sentence(where: str, key: str, text: str) -> str:
    """Source, key and text; a flag names its key already."""
    return ": ".join(part for part in (where, "" if where == f"flag --{key}" else key, text) if part)
