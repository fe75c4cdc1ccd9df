"""For failures that no sign knows: lines of this attempt whose like did not occur before. An offer to a reader, never a verdict.

Lines are put into templates as Drain does (He et al. 2017, the algorithm of drain3): numbers, addresses, paths and ids are masked, lines of one
length and beginning are compared word by word, and what differs becomes a gap. The package drain3 itself is not used: it pins two libraries of
2021 exactly, which the environments of training jobs cannot bear.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from aimaster.telemetry.scrub import scrub
from aimaster.wire.health import NEW_LINE, Evidence

MOST: Final = 10
"""Lines that are offered."""
ALIKE: Final = 0.6
"""Share of words that two lines of one template have in common."""
MOST_WORDS: Final = 40
MOST_IN_LEAF: Final = 100
"""Templates compared with one line; where more begin alike, the rest of them is one."""

_MASKS: Final = (
    (re.compile(rb"\b0x[0-9a-fA-F]+\b|\b[0-9a-f]{8,}\b"), b"<hex>"),
    (re.compile(rb"(?:/[\w.+-]+){2,}"), b"<path>"),
    (re.compile(rb"\d+(?:\.\d+)*"), b"<n>"),
    (re.compile(rb"\s+"), b" "),
)
_GAP: Final = b"<*>"
_ALARMING = re.compile(
    rb"(?i)error|fail|fatal|exception|abort|cannot|unable|denied|invalid|corrupt|kill|lost|refused|panic|critical|assert|unexpected|mismatch|overflow"
    rb"|timed? ?out|unreachable|not responding|dead|died"
)


def template(line: bytes) -> bytes:
    """The line with everything masked that changes from one occurrence to the next."""
    for pattern, mask in _MASKS:
        line = pattern.sub(mask, line)
    return line.strip()[:300]


class Templates:
    """The kinds of lines that were seen: a tree of fixed depth, by the number of words and the first word."""

    def __init__(self) -> None:
        self._leaves: dict[tuple[int, bytes], list[list[bytes]]] = {}
        self._seen: set[bytes] = set()

    def learn(self, line: bytes) -> None:
        """Takes a line as known."""
        mask = template(line)
        if mask in self._seen:
            return
        self._seen.add(mask)
        words = mask.split(b" ")[:MOST_WORDS]
        leaf = self._leaves.setdefault(_place(words), [])
        best = _most_alike(words, leaf)
        if best is not None:
            best[:] = [one if one == two else _GAP for one, two in zip(best, words, strict=True)]
        elif len(leaf) < MOST_IN_LEAF:
            leaf.append(words)

    def knows(self, line: bytes) -> bool:
        """Whether a line of this kind was learnt."""
        mask = template(line)
        if mask in self._seen:
            return True
        words = mask.split(b" ")[:MOST_WORDS]
        leaf = self._leaves.get(_place(words), [])
        return len(leaf) >= MOST_IN_LEAF or _most_alike(words, leaf) is not None


def _place(words: Sequence[bytes]) -> tuple[int, bytes]:
    return len(words), _GAP if b"<" in words[0] else words[0]


def _most_alike(words: Sequence[bytes], leaf: Iterable[list[bytes]]) -> list[bytes] | None:
    """The template of most common words, if there are enough of them."""
    best, most = None, ALIKE * len(words)
    for known in leaf:
        common = sum(one in (two, _GAP) for one, two in zip(known, words, strict=True))
        if common >= most:
            best, most = known, common
    return best


class Piece(NamedTuple):
    """One log, cut in two."""

    node: str | None
    file: str
    before: Iterable[bytes]
    """Lines of earlier attempts, or of the time in which all was well."""
    now: Sequence[tuple[int, bytes]]
    """Offset and text of the lines among which something may be new."""


def new_lines(pieces: Iterable[Piece]) -> list[Evidence]:
    """At most a few alarming lines that are unlike all that was seen before, in any of the logs; the latest of each log first."""
    pieces = list(pieces)
    known = Templates()
    for piece in pieces:
        for line in piece.before:
            known.learn(line)
    found: list[list[Evidence]] = []
    for piece in pieces:
        fresh = []
        for offset, line in piece.now:
            if _ALARMING.search(line) and not known.knows(line):
                known.learn(line)
                fresh.append(_evidence(piece, offset, line))
        found.append(fresh[::-1])
    return [log[at] for at in range(MOST) for log in found if at < len(log)][:MOST]


def _evidence(piece: Piece, offset: int, line: bytes) -> Evidence:
    text = scrub(line[:500].decode(errors="replace").strip())
    return Evidence(node=piece.node, file=piece.file, offset=offset, text=text, role="benign", sign=NEW_LINE)
