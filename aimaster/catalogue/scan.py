"""Reads one log, of any size, in one pass and with bounded memory, and keeps what the signs in it say.

Chunks are searched for literals; only lines that hold one are looked at. Repeats of the same statement are counted, not kept. What may be kept of
one sign is bounded (`CAP`); statements beyond it are counted in `dropped`, never silently lost, and the bound is far higher for roots than for echoes.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from typing import Final

from aimaster.catalogue.blocks import OPENERS, Block, TorchrunReport, Traceback, last_words
from aimaster.catalogue.hits import CAP, Hit, ProgressMark, most_of
from aimaster.catalogue.lines import (
    WRAPPED,
    Progress,
    Stamp,
    may_hold_progress,
    read_progress,
    read_speaker,
    read_stamp,
    speaker_of_file,
    unwrap,
)
from aimaster.catalogue.matcher import Catalogue, Compiled, read_groups
from aimaster.catalogue.sign import Sign
from aimaster.wire.health import Subject

CHUNK_BYTES: Final = 1024 * 1024
LONGEST_LINE: Final = 16 * 1024
"""A longer line is looked at around the literal only."""
KEPT_TEXT: Final = 1500
"""Characters of a line that are kept as evidence."""
LOOK_BACK: Final = 4096
"""How far back a time is sought for a line that tells none."""
PROGRESS_TAIL: Final = 4096
"""Bytes at the end of each chunk, and before each root, that are searched for progress."""
HEAD_SAMPLE: Final = 16 * 1024
"""Bytes of the beginning that are kept, to tell what is new at the end."""
LAST_LINES: Final = 12
"""Lines at the end of a log that may tell of an exception without its traceback."""


_HARMLESS = re.compile(
    rb"(?:^|\n)[^\n]*(?:Exception ignored in|--- Logging error ---|An exception occurred while starting the metrics server"
    rb"|The agent will stay alive|failed to bind after \d+ attempts)[^\n]*\n(?:[^\n]*<[^\n]*\n)?$"
)
"""Headings of tracebacks of things that a program goes on without."""


class LogScan:
    """One log file (or one tailed log): feed chunks, then finish; the results are plain attributes."""

    def __init__(self, catalogue: Catalogue, *, node: str | None, file: str, count_lines: bool = True) -> None:
        self.catalogue = catalogue
        self.node = node
        self.file = file
        self.count_lines = count_lines
        """Counting newlines costs as much as searching for signs; for a huge file the few numbers needed are counted afterwards."""
        self.about = speaker_of_file(file)
        self.hits: list[Hit] = []
        self.blocks: list[Block] = []
        self.progress: list[ProgressMark] = []
        self.newest_steps: list[tuple[int, float]] = []
        self.hosts: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.bytes_read = 0
        self.first_stamp: Stamp | None = None
        self.last_stamp: Stamp | None = None
        self.end_stamp: Stamp | None = None
        self.lines_read = 0
        self._seen: dict[tuple[object, ...], Hit] = {}
        self._kept: dict[int, int] = {}
        self._open: list[Block] = []
        self._pieces: deque[tuple[int, bytes]] = deque(maxlen=8)
        self.head = b""
        self._before = b""
        self._rest = b""
        self._counted_to = 0
        self._context: tuple[Subject, int] | None = None
        self._bus = ""
        self._harmless: set[int] = set()
        """Where exceptions stand that a program went on without."""

    # ------------------------------------------------------------------------------------------------------- feeding

    def feed(self, data: bytes) -> None:
        """Takes the next bytes; complete lines are read at once, the last incomplete one waits."""
        data = self._rest + data if self._rest else data
        cut = data.rfind(b"\n") + 1
        if cut == 0:
            cut = data.rfind(b"\r") + 1
        if cut == 0 and len(data) < 4 * CHUNK_BYTES:
            self._rest = data
            return
        if cut == 0:  # no end of line in megabytes: read on, and the seam once more
            self._read(data)
            self._rest = data[-LOOK_BACK:]
            self.bytes_read -= LOOK_BACK
            return
        self._rest = data[cut:]
        self._read(data[:cut])

    @property
    def between_statements(self) -> bool:
        """Whether no line and no block of lines is half read."""
        return not self._rest and not self._open

    def settle(self) -> None:
        """Reads a last line without an end, which nobody goes on with."""
        if self._rest:
            rest, self._rest = self._rest, b""
            self._read(rest)

    def finish(self) -> None:
        """Reads the last line even if it has no newline, and closes open blocks."""
        self.settle()
        self._open.clear()
        self.note_progress()
        for line in reversed(self._before[-LOOK_BACK:].splitlines()[-60:]):
            self.end_stamp = read_stamp(line)
            if self.end_stamp is not None:
                break
        if self.first_stamp is None:
            self.first_stamp = self.last_stamp or self.end_stamp
        words = self.last_words()
        if words is not None:
            self.blocks.append(words)

    def last_words(self) -> Traceback | None:
        """An exception among the last lines whose traceback was not printed, and that no sign knows; steps must be noted before."""
        at = self.bytes_read
        told = max((block.end_offset for block in self.blocks if isinstance(block, Traceback)), default=-1)
        for line in reversed(self._before.splitlines(keepends=True)[-LAST_LINES:]):
            at -= len(line)
            words = last_words(unwrap(line.rstrip()), at) if at > told and not self.steps_after(at) else None
            if words is not None and self.count_lines:
                words.exception_line = (
                    self.lines_read + 1 - self._before.count(b"\n", at - self.bytes_read + len(self._before))
                )
            if words is not None and not self.catalogue.match(unwrap(line.rstrip())):
                return words
        return None

    def _read(self, chunk: bytes) -> None:
        if self.bytes_read == 0:
            self.head = chunk[:HEAD_SAMPLE]
        if self.first_stamp is None and self.bytes_read < LOOK_BACK:
            self._note_first_stamp(chunk[: LOOK_BACK - self.bytes_read])
        self._counted_to = 0
        if self._open:
            self._feed_blocks(chunk, 0)
        hits = self.catalogue.find_literals(chunk)
        if hits:
            hits = sorted(hits)
            self._look(chunk, hits)
        keep = max(LOOK_BACK, PROGRESS_TAIL)
        self._before = chunk[-keep:] if len(chunk) >= keep else (self._before + chunk)[-keep:]
        if may_hold_progress(self._before):
            self._pieces.append((self.bytes_read + len(chunk) - len(self._before), self._before))
        if self.count_lines:
            self.lines_read += chunk.count(b"\n", self._counted_to)
        self.bytes_read += len(chunk)

    @property
    def tail(self) -> bytes:
        """The last few kilobytes."""
        return self._before

    def _note_first_stamp(self, chunk: bytes) -> None:
        for line in chunk.splitlines():
            stamp = read_stamp(line)
            if stamp is not None:
                self.first_stamp = stamp
                return

    # ----------------------------------------------------------------------------------------------- lines with literals

    def _look(self, chunk: bytes, hits: list[tuple[int, int]]) -> None:
        index, total = 0, len(hits)
        while index < total:
            end, number = hits[index]
            stop = chunk.find(b"\n", end - 1)
            stop = len(chunk) if stop < 0 else stop
            numbers = [number]
            index += 1
            while index < total and hits[index][0] <= stop:
                numbers.append(hits[index][1])
                index += 1
            start = chunk.rfind(b"\n", max(0, end - LONGEST_LINE), end - 1) + 1
            if start == 0 and end > LONGEST_LINE:
                start = end - LONGEST_LINE
            if stop - start > LONGEST_LINE or b"\r" in chunk[start:stop]:
                self._look_long(chunk, start, stop, hits[index - len(numbers) : index])
            else:
                self._confirm(chunk, start, stop, numbers)

    def _look_long(self, chunk: bytes, start: int, stop: int, hits: list[tuple[int, int]]) -> None:
        """A line with carriage returns, or a very long one: each part that holds a literal is looked at by itself."""
        done = start
        for end, number in hits:
            if end <= done:
                continue
            left = max(chunk.rfind(b"\r", start, end - 1) + 1, start, end - LONGEST_LINE)
            right = chunk.find(b"\r", end - 1, stop)
            right = min(stop if right < 0 else right, end + LONGEST_LINE)
            numbers = [other for at, other in hits if end <= at <= right]
            self._confirm(chunk, left, right, numbers or [number])
            done = right

    def _confirm(self, chunk: bytes, start: int, stop: int, numbers: Iterable[int]) -> None:
        if self._harmless and self.bytes_read + start in self._harmless:
            return
        line = chunk[start:stop]
        if line and line[0] in WRAPPED:
            line = unwrap(line)
        for compiled, found in self.catalogue.confirm(line, numbers):
            key: tuple[object, ...] = (compiled.number, *found.groups())
            if compiled.sign.role == "self":
                key = (*key, read_speaker(line))  # the same words of another rank or node are another statement
            known = self._seen.get(key)
            if known is not None and not compiled.sign.opens:
                known.count += 1
                known.last_line = chunk[start:stop]
                known.last_offset = self.bytes_read + start
                continue
            cap = most_of(compiled.sign)
            if known is None and self._kept.get(compiled.number, 0) >= cap and not compiled.sign.opens:
                self.dropped[compiled.sign.id] = self.dropped.get(compiled.sign.id, 0) + 1
                continue
            self._keep(chunk, start, stop, line, compiled, found, key)

    def _keep(
        self,
        chunk: bytes,
        start: int,
        stop: int,
        line: bytes,
        compiled: Compiled,
        found: re.Match[bytes],
        key: tuple[object, ...],
    ) -> None:
        sign = compiled.sign
        number = self._line_number(chunk, start)
        offset = self.bytes_read + start
        if sign.opens in OPENERS:
            stamp = self._stamp_near(chunk, start, chunk[start:stop])
            block = OPENERS[sign.opens](offset, number, line, stamp)
            if isinstance(block, Traceback) and _HARMLESS.search(self._window(chunk, start, 600)):
                block.harmless = True
            self._open_block(chunk, stop, block)
            if sign.kind == "fact":
                return
        self._kept[compiled.number] = self._kept.get(compiled.number, 0) + 1
        speaker = read_speaker(line)
        if speaker.host:
            self.hosts[speaker.host] = self.hosts.get(speaker.host, 0) + 1
        groups = read_groups(found)
        self._learn_context(sign, groups, offset)
        stamp = self._stamp_near(chunk, start, chunk[start:stop])
        hit = Hit(
            sign=sign,
            groups=groups,
            speaker=speaker,
            context=self._current_context(offset),
            stamp=stamp,
            offset=offset,
            line=number,
            text=chunk[start:stop][:KEPT_TEXT].decode(errors="replace").strip("\r\n"),
        )
        self._seen[key] = hit
        self.hits.append(hit)

    def _learn_context(self, sign: Sign, groups: dict[str, str], offset: int) -> None:
        if sign.opens == "context":
            pid, rank = groups.get("pid", ""), groups.get("rank", "")
            subject = Subject(
                node=groups.get("node"),
                rank=int(rank) if rank.isdigit() else None,
                pid=int(pid) if pid.isdigit() else None,
            )
            self._context = (subject, offset)
        elif sign.id == "nvidia.off-the-bus-first-line":
            self._bus = groups.get("bus", "")
        elif sign.id == "nvidia.off-the-bus-last-line" and self._bus:
            groups.setdefault("gpu", self._bus)

    def _current_context(self, offset: int) -> Subject | None:
        if self._context is None or offset - self._context[1] > LOOK_BACK:
            return None
        return self._context[0]

    # --------------------------------------------------------------------------------------------- numbers, times, blocks

    def _line_number(self, chunk: bytes, start: int) -> int:
        if not self.count_lines:
            return 0
        if start >= self._counted_to:
            self.lines_read += chunk.count(b"\n", self._counted_to, start)
            self._counted_to = start
            return self.lines_read + 1
        return self.lines_read + 1 - chunk.count(b"\n", start, self._counted_to)

    def _window(self, chunk: bytes, start: int, size: int) -> bytes:
        if start >= size:
            return chunk[start - size : start]
        return self._before[max(0, len(self._before) - (size - start)) :] + chunk[:start]

    def _stamp_near(self, chunk: bytes, start: int, line: bytes) -> Stamp | None:
        stamp = read_stamp(line)
        if stamp is None:
            for earlier in reversed(self._window(chunk, start, LOOK_BACK).splitlines()[-60:]):
                stamp = read_stamp(earlier)
                if stamp is not None:
                    break
        if stamp is not None:
            self.last_stamp = stamp
            return stamp
        return self.last_stamp

    def _open_block(self, chunk: bytes, stop: int, block: Block) -> None:
        if isinstance(block, TorchrunReport) and any(
            isinstance(one, TorchrunReport) and one.offset <= block.offset <= one.end_offset for one in self.blocks[-4:]
        ):
            return  # the report's own headings
        if len(self.blocks) >= CAP["root"]:
            self.dropped["block"] = self.dropped.get("block", 0) + 1
            return
        self.blocks.append(block)
        self._open.append(block)
        self._feed_blocks(chunk, stop + 1, only=block)

    def _feed_blocks(self, chunk: bytes, start: int, *, only: Block | None = None) -> None:
        number = self._line_number(chunk, start) if start < len(chunk) else 0
        pending = [only] if only is not None else list(self._open)
        at = start
        while pending and at < len(chunk):
            end = chunk.find(b"\n", at)
            end = len(chunk) if end < 0 else end
            line = unwrap(chunk[at : min(end, at + LONGEST_LINE)].rstrip(b"\r"))
            for block in tuple(pending):
                if block.feed(line, self.bytes_read + at, number):
                    if isinstance(block, Traceback) and block.harmless:
                        self._harmless.add(block.exception_offset)
                    if isinstance(block, Traceback):
                        block.known = any(one.sign.kind == "sign" for one in self.catalogue.match(line))
                    pending.remove(block)
                    self._open.remove(block)
            at = end + 1
            number += 1

    def note_progress(self) -> None:
        """Reads the newest progress from the ends of the last chunks; only the newest is of interest."""
        for start, piece in reversed(self._pieces):
            steps = read_progress(piece)
            if not steps:
                continue
            found = steps[-1]
            self.newest_steps = [(start + step.at, step.number) for step in steps]
            mark = ProgressMark(
                stamp=self._progress_stamp(piece, found),
                offset=start + found.at,
                number=found.number,
                text=found.line[:KEPT_TEXT].decode(errors="replace"),
            )
            self.progress = [mark]
            return

    def steps_after(self, offset: int) -> int:
        """How many different steps this log reports after a place, as far as its newest progress shows."""
        return len({number for at, number in self.newest_steps if at > offset})

    def _progress_stamp(self, piece: bytes, found: Progress) -> Stamp | None:
        stamp = read_stamp(found.line)
        if stamp is not None:
            return stamp
        for earlier in reversed(piece[: found.at].splitlines()[-20:]):
            stamp = read_stamp(earlier)
            if stamp is not None:
                return stamp
        return None
