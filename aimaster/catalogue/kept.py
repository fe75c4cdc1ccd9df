"""What the scan of one log has kept, as a record: it can be sent, and judged where the logs of all nodes are known, by the same code that
reads finished logs. Bounded: of each sign the first statements, in the order of the log; echoes fewer than roots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from aimaster.catalogue.blocks import AnyBlock, Block, Traceback
from aimaster.catalogue.hits import Hit, ProgressMark
from aimaster.catalogue.lines import Stamp, read_stamp, speaker_of_file
from aimaster.catalogue.scan import LOOK_BACK, LogScan
from aimaster.wire.health import Subject

MOST_OF_A_SIGN: Final = 40
MOST_OF_AN_ECHO: Final = 12
MOST_FACTS: Final = 400
"""Who is who: a Ray head log names a thousand nodes."""
MOST_BLOCKS: Final = 40


class Log(Protocol):
    """A log as far as it was read: a scan, or what one has kept."""

    @property
    def node(self) -> str | None: ...
    @property
    def file(self) -> str: ...
    @property
    def about(self) -> Subject: ...
    @property
    def hits(self) -> Sequence[Hit]: ...
    @property
    def blocks(self) -> Sequence[Block]: ...
    @property
    def hosts(self) -> Mapping[str, int]: ...
    @property
    def progress(self) -> Sequence[ProgressMark]: ...
    @property
    def first_stamp(self) -> Stamp | None: ...
    @property
    def end_stamp(self) -> Stamp | None: ...
    @property
    def bytes_read(self) -> int: ...
    def steps_after(self, offset: int) -> int: ...


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """How far a log has come: the part of what is kept that changes with every step."""

    progress: list[ProgressMark] = []
    newest_steps: list[tuple[int, float]] = []
    first_stamp: Stamp | None = None
    end_stamp: Stamp | None = None
    last_words: Traceback | None = None
    """An exception at the end that has no traceback; a line later it is none."""
    bytes_read: int = 0
    """How far the log was read."""


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One log; what `collect` asks of a scan."""

    node: str | None
    file: str
    hits: list[Hit] = []
    whole_blocks: list[AnyBlock] = []
    hosts: dict[str, int] = {}
    steps: Steps = Steps()

    @property
    def about(self) -> Subject:
        return speaker_of_file(self.file)

    @property
    def blocks(self) -> list[AnyBlock]:
        return self.whole_blocks + ([self.steps.last_words] if self.steps.last_words is not None else [])

    @property
    def progress(self) -> list[ProgressMark]:
        return self.steps.progress

    @property
    def first_stamp(self) -> Stamp | None:
        return self.steps.first_stamp

    @property
    def end_stamp(self) -> Stamp | None:
        return self.steps.end_stamp

    @property
    def bytes_read(self) -> int:
        return self.steps.bytes_read

    def steps_after(self, offset: int) -> int:
        """As `LogScan.steps_after`."""
        return len({number for at, number in self.steps.newest_steps if at > offset})


def keep_steps(scan: LogScan) -> Steps:
    """How far the scan has come; the log goes on."""
    scan.note_progress()
    last = (read_stamp(line) for line in reversed(scan.tail[-LOOK_BACK:].splitlines()[-60:]))
    end = next((stamp for stamp in last if stamp is not None), None)
    return Steps(
        progress=list(scan.progress),
        newest_steps=list(scan.newest_steps),
        first_stamp=scan.first_stamp or scan.last_stamp or end,
        end_stamp=end,
        last_words=scan.last_words(),
        bytes_read=scan.bytes_read,
    )


def keep(scan: LogScan) -> Kept:
    """What the scan has kept so far."""
    return Kept(
        node=scan.node,
        file=scan.file,
        hits=_bounded(scan.hits),
        whole_blocks=list(scan.blocks[:MOST_BLOCKS]),  # type: ignore[arg-type]  # all are made by OPENERS
        hosts=dict(scan.hosts),
        steps=keep_steps(scan),
    )


def join(earlier: Kept | None, later: Kept) -> Kept:
    """Two scans of one log, the second from where the first ended."""
    if earlier is None:
        return later
    steps = later.steps
    if not steps.progress:
        progress, newest = earlier.steps.progress, earlier.steps.newest_steps
        steps = msgspec.structs.replace(steps, progress=progress, newest_steps=newest)
    return msgspec.structs.replace(
        later,
        hits=_bounded([*earlier.hits, *later.hits]),
        whole_blocks=[*earlier.whole_blocks, *later.whole_blocks][:MOST_BLOCKS],
        hosts=earlier.hosts | later.hosts,
        steps=msgspec.structs.replace(steps, first_stamp=earlier.first_stamp or steps.first_stamp),
    )


def _bounded(hits: list[Hit]) -> list[Hit]:
    counted: dict[str, int] = {}
    kept = []
    for hit in hits:
        sign = hit.sign
        most = (
            MOST_FACTS
            if sign.kind != "sign"
            else MOST_OF_A_SIGN
            if sign.role in ("self", "accusation")
            else MOST_OF_AN_ECHO
        )
        counted[sign.id] = counted.get(sign.id, 0) + 1
        if counted[sign.id] <= most:
            bare = msgspec.structs.replace(sign, literal=(), pattern="", match=(), no_match=())
            kept.append(msgspec.structs.replace(hit, sign=bare))
    return kept
