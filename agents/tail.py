"""Follows one log file: pieces of new bytes and the last lines, through rotation and truncation, in bounded memory.

At most `budget_bytes` are read a call, so a flood costs time, never memory; what was not read yet is still in the file. Of the last lines
64 KiB are held. A carriage return overwrites its line, as progress bars do.
"""

import os
from collections.abc import Iterator
from pathlib import Path

BUDGET_BYTES = 4 << 20
PIECE_BYTES = 256 << 10
HELD_BYTES = 64 << 10
MOST_LINES = 50
BREAK = b"\n"
"""Stands between the end of one file and the beginning of the next."""


class Tail:
    """One file, from `offset` on."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.bytes_read = 0
        self._descriptor = -1
        self._inode = 0
        self._offset = offset
        self._held = b""

    def read(self, budget_bytes: int = BUDGET_BYTES) -> Iterator[bytes]:
        """What was written since the last call, piece by piece."""
        while budget_bytes > 0 and (self._descriptor >= 0 or self._open()):
            piece = self._next_piece(min(budget_bytes, PIECE_BYTES))
            if piece:
                budget_bytes -= len(piece)
                self.bytes_read += len(piece)
                self._held = (self._held + piece)[-HELD_BYTES:]
                yield piece
            elif self._rotated():
                self.close()
                self._offset = 0
                self._held += BREAK
                yield BREAK
            else:
                break

    def last_lines(self) -> list[str]:
        """The last lines, at most 50, as a terminal would show them."""
        lines = self._held.decode(errors="replace").split("\n")
        shown = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
        return [line for line in shown if line.strip()][-MOST_LINES:]

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
        try:
            if os.fstat(self._descriptor).st_size < self._offset:  # truncated in place: begin again
                self._offset = 0
                return BREAK
            piece = os.pread(self._descriptor, limit_bytes, self._offset)
        except OSError:  # a file server that lost the file: opened again at the next call
            self.close()
            return b""
        self._offset += len(piece)
        return piece

    def _rotated(self) -> bool:
        try:
            return os.stat(self.path).st_ino != self._inode
        except OSError:
            return False
