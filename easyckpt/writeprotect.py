"""Saving by write protection: the trainer runs on at once and may change everything; who writes where the copy has not been waits for that piece.

With huge pages, protecting a gibibyte takes a fraction of a millisecond. What cannot be protected (small, strided, shared between processes,
mapped from a file, on a device) is left to the saver, which copies it at once. A helper that died is started again, a few times; where that
does not help, every save copies at once: what a caller may do after `save` never depends on what the kernel allows.
"""

from __future__ import annotations

import bisect
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from easyckpt import memory
from easyckpt.errors import Refused, SaveFailed
from easyckpt.writeprotect_guard import BRIDGE_BYTES, Guard, Region
from easyckpt.writeprotect_helper import BLOCK_BYTES, spans_of

if TYPE_CHECKING:
    from easyckpt.slot import Slot
    from easyckpt.snapshot import Leaf

LEAST_BYTES = 256 << 10
"""Smaller tensors are copied at once: together they are small, and each would cost its own system calls."""
STARTS = 3
_PRIVATE = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...p \S+ \S+ 0(?=\s)", re.MULTILINE)
HUGE_STEP_BYTES = 32 << 20
HUGE_SECONDS = 0.05
"""Spent after a save on asking for huge pages; the rest is asked for after the next one."""


class Shield:
    """Write protection for one saver."""

    def __init__(self, refused: Callable[[str], None]) -> None:
        """`refused` hears, in words, why saves are copied at once instead. Raises Refused where this machine cannot do it at all."""
        self._refused = refused
        self._guard = Guard.open()
        self._starts = 1
        self._huge: set[int] = set()
        self._unprotectable: set[str] = set()

    def take(self, slot: Slot, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Those of the leaves that are copied behind our back from here on, until `finish`. The others are the caller's to copy."""
        chosen = self._eligible(leaves)
        if not chosen or not self._is_ready():
            return []
        try:
            left = self._guard.begin(
                slot.path, slot.address, [_place(leaf, slot.prefix_bytes + leaf.entry.offsets[0]) for leaf in chosen]
            )
        except (OSError, Refused) as error:
            self._refused(f"{error}; this save copies at once")
            return []
        self._unprotectable.update(chosen[index].entry.name for index in left)
        return [leaf.held() for index, leaf in enumerate(chosen) if index not in set(left)]

    def finish(self) -> None:
        """Until all that was taken is copied. Raises SaveFailed if it is not whole: the trainer ran on, the snapshot cannot."""
        try:
            self._guard.finish()
        except OSError as error:
            raise SaveFailed(
                f"memory that was write-protected is not copied whole ({error}); nothing was held up"
            ) from error

    def prepare(self, slots: Iterable[Slot], leaves: Iterable[Leaf]) -> None:
        """What makes later saves cheap: the helper maps the segments, large tensors get huge pages."""
        try:
            for slot in slots if self._is_ready() else ():
                self._guard.map(slot.path)
        except (OSError, Refused) as error:
            self._refused(f"{error}; the first save pays for it")
        self.settle(leaves, sys.float_info.max)

    def settle(self, leaves: Iterable[Leaf], seconds: float = HUGE_SECONDS) -> None:
        """Asks for huge pages under the leaves, once each, for about so long. What the kernel refuses stays as it is."""
        give_up_at = time.monotonic() + seconds
        for span in spans_of([_place(leaf) for leaf in self._eligible(leaves)], BRIDGE_BYTES):
            begin = -(-span[0][0] // BLOCK_BYTES) * BLOCK_BYTES
            end = (span[-1][0] + span[-1][1]) // BLOCK_BYTES * BLOCK_BYTES
            for at in range(begin, end, HUGE_STEP_BYTES):
                if at not in self._huge and time.monotonic() < give_up_at:
                    self._huge.add(at)
                    memory.make_huge(at, min(HUGE_STEP_BYTES, end - at))

    def close(self) -> None:
        self._guard.close()

    def _is_ready(self) -> bool:
        if self._guard.is_alive:
            return True
        if self._starts >= STARTS:
            return False
        self._starts += 1
        try:
            self._guard.close()
            self._guard = Guard.open()
        except Refused as error:
            self._refused(f"{error}; this save copies at once")
            return False
        return True

    def _eligible(self, leaves: Iterable[Leaf]) -> list[Leaf]:
        """Large, in the order of the file, and in memory that only this process can write to."""
        own = private_memory()
        return [
            leaf
            for leaf in leaves
            if leaf.address
            and leaf.entry.nbytes >= LEAST_BYTES
            and leaf.entry.name not in self._unprotectable
            and is_within(_place(leaf), own)
        ]


def _place(leaf: Leaf, offset: int = 0) -> Region:
    return Region(leaf.address, leaf.entry.nbytes, offset)


def private_memory() -> list[tuple[int, int]]:
    """(begin, end) of this process's own anonymous memory, as the kernel lists it now: no file, shared with nobody."""
    found: list[tuple[int, int]] = []
    with open("/proc/self/maps", "rb") as file:
        listed = file.read()
    for begin, end in ((int(one[1], 16), int(one[2], 16)) for one in _PRIVATE.finditer(listed)):
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def is_within(region: Region, memory_ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether one of the ranges, in ascending order, holds all of the region."""
    index = bisect.bisect_right(memory_ranges, (region.address, sys.maxsize)) - 1
    return index >= 0 and region.address + region.nbytes <= memory_ranges[index][1]
