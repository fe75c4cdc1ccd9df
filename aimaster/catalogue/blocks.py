"""Signs that take several lines: Python tracebacks, torchrun's failure report, the flight recorder's table, faulthandler dumps.

A block is opened by a sign's line and fed the lines that follow until it says that it is complete; then it tells what it has read. Blocks are
records, so that what a scan has kept can be sent and judged elsewhere.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import msgspec

from aimaster.catalogue.lines import Stamp

MAX_LINES: Final = 400
"""A block that has not ended by then ends."""
KEPT_LINES: Final = 60
"""Lines of a traceback that are kept: the first few and the last."""

_RANK_PREFIX = re.compile(rb"^\[(?:rank|default)\d+\]:? ?")
_EXCEPTION = re.compile(rb"^([A-Za-z_][\w.]*(?:\([\w.]+\))?)(?:: (.*))?$")
_NAMES_AN_EXCEPTION = re.compile(
    rb"(?:Error|Exception|Exit|Interrupt|Warning|Iteration|Timeout|Empty|Full|Abort\w*|Died|Failed|Failure|Fault)(?:\([\w.]+\))?$"
)
_REMOTE: Final = b"ray.exceptions.RayTaskError("
_CLOCK = re.compile(rb"(?:\d{4}(?:\\-|/)\d\d(?:\\-|/)\d\d|\d\d\\-\d\d|\d\d:\d\d:\d\d(?:(?:,|\\\.)\d+)?)")
_ENTRY = re.compile(rb"^\s*(time|host|rank|exitcode|error_file|traceback)\s*: ?(.*)$")
_RANK_VALUE = re.compile(rb"(\d+) \(local_rank: (\d+)\)")
_EXIT_VALUE = re.compile(rb"(-?\d+) \(pid: (\d+)\)")


class Entry(msgspec.Struct, kw_only=True):
    """One process of torchrun's failure report."""

    host: str = ""
    rank: int = -1
    local_rank: int = -1
    exit_code: int = 0
    pid: int = 0
    when: str = ""
    first: bool = False
    """It stands under "Root Cause (first observed failure)": first on its own node only."""
    offset: int = 0
    line: int = 0
    text: str = ""


class Block(msgspec.Struct, eq=False):
    """Common to all: where it began and whether it is complete."""

    offset: int
    line: int
    opening: bytes
    stamp: Stamp | None = None
    """When the line that began it was written, as far as that line or those before it tell."""
    end_offset: int = 0
    lines: int = 0

    def __post_init__(self) -> None:
        self.end_offset = self.end_offset or self.offset

    def feed(self, line: bytes, offset: int, number: int) -> bool:
        """Takes one line (without its newline); True when the block is complete."""
        self.lines += 1
        self.end_offset = offset
        return self._take(line, offset, number) or self.lines >= MAX_LINES

    def _take(self, line: bytes, offset: int, number: int) -> bool:
        raise NotImplementedError


class Traceback(Block, eq=False, tag="traceback"):
    """A Python traceback up to the line that names the exception."""

    exception: str = ""
    message: str = ""
    exception_offset: int = -1
    known: bool = False
    """A sign speaks of the exception already."""
    harmless: bool = False
    """Its heading says that the program goes on without what failed."""
    exception_line: int = 0
    prefix: bytes = b""
    """What stands before each of its lines."""
    kept: list[bytes] = msgspec.field(default_factory=lambda: [b"Traceback (most recent call last):"])
    strange: int = 0
    """Lines after it that are none of its own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix = self.opening[: self.opening.find(b"Traceback (most recent call last)")].removesuffix(b"Original ")
        if prefix.strip():
            self.prefix = prefix

    def _take(self, line: bytes, offset: int, number: int) -> bool:
        if self.prefix:
            found = _like(self.prefix).match(line)
            if found is not None:
                line = line[found.end() :]
            elif self.lines == 1 and line.startswith(b"  File "):
                self.prefix = b""  # only the heading was put behind a logger's prefix
            elif (
                self.lines == 1 and (own := _RANK_PREFIX.match(line)) and self.prefix.rstrip().endswith(own[0].rstrip())
            ):
                self.prefix = own[0]  # only the heading was stamped
                line = line[own.end() :]
            else:
                return False  # another rank's line between ours
        elif _RANK_PREFIX.match(line):
            return False
        if not line or line[:1] in b" \t":
            self._keep(line)
            return False
        found = _EXCEPTION.match(line)
        if found and (_NAMES_AN_EXCEPTION.search(found[1]) or (found[2] is not None and b"." in found[1])):
            self._keep(line)
            if found[1].startswith(_REMOTE):
                self.strange = 0
                self._note(found, offset, number)
                return False  # the remote traceback and its exception follow
            self._note(found, offset, number)
            return True
        self.strange += 1
        return self.strange > 6

    def _note(self, found: re.Match[bytes], offset: int, number: int) -> None:
        self.exception = found[1].decode(errors="replace")
        self.message = (found[2] or b"").decode(errors="replace")
        self.exception_offset, self.exception_line = offset, number

    def _keep(self, line: bytes) -> None:
        self.kept.append(line[:500])
        if len(self.kept) > KEPT_LINES:
            del self.kept[8]

    def text(self) -> str:
        """The traceback, bounded: its head and its tail."""
        return b"\n".join(self.kept).decode(errors="replace")


_SPEAKER = re.compile(rb"^(?:\[(?:rank|default)\d+\]:? ?|\(\w[^()]*\) ?)*")


def last_words(line: bytes, offset: int) -> Traceback | None:
    """A line that names an exception without its traceback: what a log may end with when only the end was printed or kept."""
    found = _EXCEPTION.match(_SPEAKER.sub(b"", line, count=1).rstrip())
    if (
        found is None
        or not found[2]
        or not _NAMES_AN_EXCEPTION.search(found[1])
        or found[1].endswith((b"Warning", b"Exit"))
    ):
        return None
    block = Traceback(offset=offset, line=0, opening=line)
    block.exception = found[1].decode(errors="replace")
    block.message = found[2].decode(errors="replace")
    block.exception_offset = offset
    block.kept = [line[:500]]
    return block


@lru_cache(maxsize=64)
def _like(prefix: bytes) -> re.Pattern[bytes]:
    """What the other lines of a traceback begin with: the same words, at another time."""
    escaped = re.escape(prefix.rstrip(b" ")).replace(rb"\ ", b" ")
    return re.compile(_CLOCK.sub(rb"[\\d:.,/-]+", escaped) + b" ?")


class TorchrunReport(Block, eq=False, tag="torchrun"):
    """The table that ends a torchrun agent: one entry per failed process of its own node."""

    entries: list[Entry] = []
    first: bool = False
    """The next entry stands under "Root Cause"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.first = self.first or b"Root Cause" in self.opening

    def _take(self, line: bytes, offset: int, number: int) -> bool:
        if b"Root Cause (first observed failure)" in line:
            self.first = True
            return False
        if line.startswith(b"=====") or line.lstrip().startswith(b"====="):
            return bool(self.entries)
        found = _ENTRY.match(_RANK_PREFIX.sub(b"", line))
        if not found:
            return False
        name, value = found[1], found[2].strip()
        if name == b"time":
            self.entries.append(
                Entry(when=value.decode(errors="replace"), first=self.first, offset=offset, line=number)
            )
            return False
        if not self.entries:
            return False
        entry = self.entries[-1]
        if name == b"host":
            entry.host = value.decode(errors="replace")
        elif name == b"rank" and (ranks := _RANK_VALUE.match(value)):
            entry.rank, entry.local_rank = int(ranks[1]), int(ranks[2])
        elif name == b"exitcode" and (code := _EXIT_VALUE.match(value)):
            entry.exit_code, entry.pid = int(code[1]), int(code[2])
            entry.offset, entry.line, entry.text = offset, number, line.decode(errors="replace")
        return False


class FlightTable(Block, eq=False, tag="flight"):
    """The flight recorder's table; its last column names the ranks that never came."""

    rows: list[tuple[list[int], int, int, str]] = []

    def _take(self, line: bytes, offset: int, number: int) -> bool:
        if line.count(b"|") < 3:
            return True
        ranks = [int(word) for word in re.findall(rb"\d+", line.rsplit(b"|", 1)[1])]
        if ranks:
            self.rows.append((ranks, offset, number, line.decode(errors="replace")))
        return False


class HangDump(Block, eq=False, tag="faulthandler"):
    """faulthandler's stacks after "Timeout (…)!"; they end with the first line that is none."""

    kept: list[bytes] = []

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept = self.kept or [self.opening]

    def _take(self, line: bytes, offset: int, number: int) -> bool:  # noqa: ARG002 - the block's common shape
        bare = _RANK_PREFIX.sub(b"", line)
        if bare.startswith((b"Thread 0x", b"Current thread", b"  File ", b"  ...", b"  <")) or not bare.strip():
            if len(self.kept) < KEPT_LINES:
                self.kept.append(bare[:500])
            return False
        return True

    def text(self) -> str:
        return b"\n".join(self.kept).decode(errors="replace")


AnyBlock = Traceback | TorchrunReport | FlightTable | HangDump
OPENERS: Final[dict[str, type[Block]]] = {
    "traceback": Traceback,
    "torchrun": TorchrunReport,
    "flight": FlightTable,
    "faulthandler": HangDump,
}
