"""What a member writes to its log, line by line: rotation, truncation, lines of megabytes, progress bars, bytes that are no text.

Reads at most `BUDGET_BYTES` a call and holds at most `LINE_BYTES` of an unfinished line, so a flood costs time, never memory, and what
was not read yet is still in the file. Of a longer line the beginning is kept. A carriage return ends a line as a newline does.
"""

import os
import re
from collections import deque
from pathlib import Path

BUDGET_BYTES = 2 << 20
LINE_BYTES = 16 << 10
KEPT_LINES = 50
_ENDS = re.compile(rb"[\r\n]")


class Line:
    """One line and where it begins in its file."""

    __slots__ = ("offset", "text")

    def __init__(self, text: str, offset: int) -> None:
        self.text = text
        self.offset = offset


class Tail:
    """Follows one file from `offset` on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.lines_read = 0
        self.kept: deque[str] = deque(maxlen=KEPT_LINES)
        self._descriptor = -1
        self._inode = 0
        self._offset = offset
        self._start = offset
        self._part = bytearray()
        self._cut = 0

    def read(self, *, final: bool = False, budget_bytes: int = BUDGET_BYTES) -> list[Line]:
        """Lines that were finished since the last call; with `final` also the last, unfinished one."""
        lines: list[Line] = []
        while budget_bytes > 0:
            if self._descriptor < 0 and not self._open():
                break
            piece = self._next_piece(min(budget_bytes, 256 << 10))
            if not piece:
                if self._rotated():
                    self._end_line(lines, 0)
                    self.close()
                    self._offset = self._start = 0
                    continue
                break
            budget_bytes -= len(piece)
            self._take(piece, lines)
        if final:
            self._end_line(lines, 0)
        return lines

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> bool:
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        self._inode = os.fstat(self._descriptor).st_ino
        return True

    def _next_piece(self, limit_bytes: int) -> bytes:
        if os.fstat(self._descriptor).st_size < self._offset:  # truncated in place: begin again
            self._part.clear()
            self._cut = 0
            self._offset = self._start = 0
        piece = os.pread(self._descriptor, limit_bytes, self._offset)
        self._offset += len(piece)
        return piece

    def _rotated(self) -> bool:
        try:
            return os.stat(self.path).st_ino != self._inode
        except OSError:
            return False

    def _take(self, piece: bytes, lines: list[Line]) -> None:
        at = 0
        for found in _ENDS.finditer(piece):
            self._hold(piece[at : found.start()])
            self._end_line(lines, 1, kept=found.group() == b"\n")
            at = found.end()
        self._hold(piece[at:])

    def _hold(self, piece: bytes) -> None:
        room = LINE_BYTES - len(self._part)
        self._part += piece[:room]
        self._cut += max(0, len(piece) - room)

    def _end_line(self, lines: list[Line], end_bytes: int, *, kept: bool = True) -> None:
        """An empty line (the second half of a CRLF, too) is none. What a progress bar overwrites is read but not kept."""
        length = len(self._part) + self._cut
        if length:
            text = self._part.decode(errors="replace")
            if self._cut:
                text += f" … {self._cut} bytes cut"
            self.lines_read += 1
            if kept:
                self.kept.append(text)
            lines.append(Line(text, self._start))
        self._start += length + end_bytes
        self._part.clear()
        self._cut = 0
