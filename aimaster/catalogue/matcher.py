"""Finds signs in lines and in chunks of logs.

All literals of all signs are searched at once (Hyperscan where it is installed, plain `bytes.find` otherwise); the pattern of a sign is tried only
on lines that hold one of its literals. A line that a benign sign explains says nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aimaster.catalogue.sign import SUBJECT_GROUPS, Sign
from aimaster.wire.health import Evidence, Finding, Subject

if TYPE_CHECKING:
    from aimaster.catalogue.xid import XidTable

hyperscan: Any
try:
    hyperscan = import_module("hyperscan")
except ImportError:  # no wheel for this machine: the slower search gives the same answers
    hyperscan = None

KERNEL_LINE = re.compile(
    rb"kernel: |^\s*\[\s*\d+\.\d+\]|^\[\w{3} \w{3} +\d+ [\d:]+ \d{4}\]|^<\d+>|^\d+,\d+,\d+,|NVRM: |nvidia-nvswitch"
)


class Literals(Protocol):
    """Searches one chunk for all literals."""

    def find(self, chunk: bytes) -> list[tuple[int, int]]:
        """(end of the literal in the chunk, number of the literal), overlapping ones too, in order of the end."""
        ...


class Match(NamedTuple):
    """One sign confirmed in one line."""

    sign: Sign
    groups: dict[str, str]
    line: str

    def finding(
        self,
        *,
        node: str | None,
        time_seconds: float | None = None,
        evidence: Evidence | None = None,
        about: Subject | None = None,
    ) -> Finding:
        """What this line says when it stands in a log of `node`; `about` fills what the line itself does not name."""
        sign, groups, about = self.sign, self.groups, about or Subject()
        subject = Subject(
            node=groups.get("node") or (about.node if about.node is not None else node),
            rank=_number(groups.get("rank"), about.rank),
            gpu=groups.get("gpu") or about.gpu,
            pid=_number(groups.get("pid"), about.pid),
        )
        proof = evidence or Evidence(node=node, time_seconds=time_seconds, text=self.line, role=sign.role, sign=sign.id)
        return Finding(
            sign=sign.id,
            category=sign.category,
            role=sign.role,
            kind=sign.kind,
            severity=sign.severity,
            subject=subject,
            node=node,
            time_seconds=time_seconds,
            fault_of=sign.fault_of,
            action=sign.action,
            weight=sign.weight,
            details={name: value for name, value in groups.items() if name not in SUBJECT_GROUPS},
            evidence=(proof,),
        )


def _number(text: str | None, otherwise: int | None) -> int | None:
    return int(text) if text and text.isdigit() else otherwise


class _HyperscanLiterals:
    def __init__(self, literals: Sequence[bytes]) -> None:
        flags = [0] * len(literals)
        self._database = hyperscan.Database()
        self._database.compile(
            expressions=[_quoted(literal) for literal in literals],
            ids=list(range(len(literals))),
            elements=len(literals),
            flags=flags,
        )
        self._found: list[tuple[int, int]] = []
        found = self._found

        def note(number: int, _start: int, end: int, _flags: int, _context: Any) -> None:
            found.append((end, number))

        self._note = note

    def find(self, chunk: bytes) -> list[tuple[int, int]]:
        self._found.clear()
        self._database.scan(chunk, match_event_handler=self._note)
        return self._found


def _quoted(literal: bytes) -> bytes:
    return b"".join(b"\\x%02x" % byte if not chr(byte).isalnum() else bytes((byte,)) for byte in literal)


class _PlainLiterals:
    def __init__(self, literals: Sequence[bytes]) -> None:
        self._literals = list(literals)

    def find(self, chunk: bytes) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for number, literal in enumerate(self._literals):
            start = chunk.find(literal)
            while start >= 0:
                found.append((start + len(literal), number))
                start = chunk.find(literal, start + 1)
        found.sort()
        return found


def search_literals(literals: Sequence[bytes], *, plain: bool = False) -> Literals:
    """The fastest search this machine has; `plain` asks for the one without a library."""
    if hyperscan is None or plain or not literals:
        return _PlainLiterals(literals)
    return _HyperscanLiterals(literals)


class _Pattern:
    """A pattern that is compiled when it is first needed: most signs never are."""

    __slots__ = ("_text", "search")

    search: Callable[[bytes], re.Match[bytes] | None]

    def __init__(self, text: str) -> None:
        self._text = text

    def __getattr__(self, name: str) -> Any:
        if name != "search":
            raise AttributeError(name)
        self.search = re.compile(self._text.encode()).search
        return self.search


class Compiled(NamedTuple):
    """A sign made ready for searching."""

    number: int
    sign: Sign
    pattern: _Pattern
    kernel_only: bool
    order: int
    """0 for signs that silence a line; they are tried first."""


class Catalogue:
    """All signs in force, ready to be matched."""

    def __init__(self, signs: Iterable[Sign], xids: XidTable, *, plain: bool = False) -> None:
        self.signs: tuple[Sign, ...] = tuple(signs)
        self.xids = xids
        by_literal: dict[bytes, list[Compiled]] = {}
        for number, sign in enumerate(self.signs):
            silences = sign.role == "benign" and sign.kind == "sign"
            compiled = Compiled(number, sign, _Pattern(sign.pattern), sign.where == "kernel", 0 if silences else 1)
            for literal in sign.literal:
                by_literal.setdefault(literal.encode(), []).append(compiled)
        self.literals: tuple[bytes, ...] = tuple(by_literal)
        self._by_number: list[tuple[Compiled, ...]] = [
            tuple(sorted(group, key=lambda one: one.order)) for group in by_literal.values()
        ]
        self._search = search_literals(self.literals, plain=plain)

    def __len__(self) -> int:
        return len(self.signs)

    def find_literals(self, chunk: bytes) -> list[tuple[int, int]]:
        """Where literals end in a chunk; the list is reused by the next call."""
        return self._search.find(chunk)

    def confirm(self, line: bytes, numbers: Iterable[int]) -> list[tuple[Compiled, re.Match[bytes]]]:
        """The signs, of those with these literals, that a line really shows."""
        found: list[tuple[Compiled, re.Match[bytes]]] = []
        tried: list[int] = []
        kernel: bool | None = None
        silenced = False
        by_number = self._by_number
        for number in numbers:
            for compiled in by_number[number]:
                if compiled.number in tried:
                    continue
                tried.append(compiled.number)
                if compiled.kernel_only:
                    if kernel is None:
                        kernel = KERNEL_LINE.search(line) is not None
                    if not kernel:
                        continue
                hit = compiled.pattern.search(line)
                if hit is not None:
                    found.append((compiled, hit))
                    silenced = silenced or compiled.order == 0
        return [pair for pair in found if pair[0].order == 0] if silenced else found

    def match(self, line: str | bytes, source: str = "") -> list[Match]:
        """The signs one line shows; `source` keeps only those of one source, for example `kernel`."""
        raw = line.encode(errors="replace") if isinstance(line, str) else line
        hits = self._search.find(raw)
        if not hits:
            return []
        found = self.confirm(raw, [number for _, number in hits])
        text = raw.decode(errors="replace")
        return [
            Match(compiled.sign, read_groups(hit), text)
            for compiled, hit in found
            if not source or compiled.sign.source == source
        ]


def read_groups(hit: re.Match[bytes]) -> dict[str, str]:
    """Named groups that took part, as text; `node2` is a second place for `node`."""
    groups: dict[str, str] = {}
    for name, value in hit.groupdict().items():
        if value is not None:
            groups[name.rstrip("2")] = value.decode(errors="replace")
    return groups
