"""Segments that stay mapped from one flush to the next. No torch, no numpy."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from easyckpt.shm import Segment


class Mappings:
    """Views of files that are kept from one reading to the next: mapping pages and letting them go costs as much as copying them.

    One is let go when its file has lost its name. Until then it holds up no memory that its writer needs (see `Slot`). For one thread.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[Path, int], mmap.mmap] = {}

    @contextlib.contextmanager
    def mapped(self, fd: int, segment: Segment) -> Iterator[memoryview]:
        """A read-only view of a segment that is open as `fd`."""
        self.tidy()
        key = (segment.path, os.fstat(fd).st_ino)
        if key not in self._held:
            self._held[key] = mmap.mmap(fd, segment.nbytes, prot=mmap.PROT_READ)
        with memoryview(self._held[key]) as view:
            yield view

    def tidy(self) -> None:
        for key in list(self._held):
            path, inode = key
            try:
                is_there = os.stat(path).st_ino == inode
            except FileNotFoundError:
                is_there = False
            if not is_there:
                memory = self._held.pop(key)
                with contextlib.suppress(BufferError):  # an error's frames may still hold a piece: it ends with them
                    memory.close()
