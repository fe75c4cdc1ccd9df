"""One slot as its writer holds it: memory that is allocated and touched once, then written over and over.

The order that makes a kill at any byte harmless: `claim` zeroes the seal before the first byte of a new write, the tensors and the header are
written, `seal` writes the eight bytes of the length last. A slot is never truncated or shrunk, since a reader may have it mapped: a layout
of another size gets a new file under the same name.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
from pathlib import Path

from easyckpt import layout, memory, shm
from easyckpt.errors import NoRoom, Pinned
from easyckpt.layout import SegmentHeader, TensorEntry, Version


class Slot:
    """A segment file open for writing. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prefix_bytes = 0
        self.data_bytes = 0
        self.version: Version | None = shm.peek(path)
        self.overwritten: Version | None = None
        """What the last claim took away."""
        self._fd = -1
        self._memory: mmap.mmap | None = None
        self._touched = False
        self._registered = False
        self.written: dict[str, TensorEntry] = {}
        """What this process sealed here last, by name: bytes that are still there when they need not be copied again."""

    @property
    def nbytes(self) -> int:
        return self.prefix_bytes + self.data_bytes

    @property
    def is_touched(self) -> bool:
        return self._touched

    def fits(self, prefix_bytes: int, data_bytes: int) -> bool:
        """Whether the open file holds that much and is still the one its name leads to."""
        return (
            self._memory is not None
            and self.data_bytes == data_bytes
            and self.prefix_bytes >= prefix_bytes
            and not self.is_lost()
        )

    def is_lost(self) -> bool:
        """Whether someone unlinked or replaced the file under us."""
        if self._fd < 0:
            return False
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def fit(self, prefix_bytes: int, data_bytes: int) -> None:
        """Makes the slot that large: adopts the file that is there, or a new one. Raises NoRoom; Pinned if it must not go."""
        if self.fits(prefix_bytes, data_bytes):
            return
        self.close()
        if not self._adopt(prefix_bytes, data_bytes):
            self._create(prefix_bytes, data_bytes)

    def warm(self, prefix_bytes: int, data_bytes: int) -> None:
        """Takes and touches the memory for a content of that size; a snapshot of another size is left alone. Raises NoRoom."""
        if self._memory is None and not self._adopt(prefix_bytes, data_bytes):
            if self.version is not None:
                return
            self._create(prefix_bytes, data_bytes)
        self.touch()

    def touch(self) -> None:
        """Maps every page now, outside the interpreter's lock, so that no save pays for a page fault."""
        if not self._touched:
            # Mapping for reading takes many pages at a time; making those writable then costs less than mapping for writing at once.
            memory.touch(self.address, self.nbytes, write=False)
            self._touched = memory.touch(self.address, self.nbytes, write=True)
            self._register()

    @property
    def address(self) -> int:
        """Of the first byte. Valid until `close` or the next `fit`."""
        if self._memory is None:
            raise ValueError(f"{self.path} is not open")
        return memory.address_of(memoryview(self._memory))

    @property
    def data_address(self) -> int:
        return self.address + self.prefix_bytes

    def view(self) -> memoryview:
        """The tensor bytes. Release it before `close`."""
        if self._memory is None:
            raise ValueError(f"{self.path} is not open")
        return memoryview(self._memory)[self.prefix_bytes :]

    def held(self, fd: int, prefix_bytes: int, data_bytes: int) -> memoryview | None:
        """All bytes of the file open as `fd`, if it is this slot's: mapped once, to be read now and written to by the next save."""
        if self._memory is None and not self._adopt(prefix_bytes, data_bytes):
            return None
        if self._memory is None or not os.path.samestat(os.fstat(fd), os.fstat(self._fd)):
            return None
        return memoryview(self._memory)

    def claim(self) -> None:
        """Zeroes the seal: from here on the old content is gone. Raises Pinned if it is being copied away, or was removed just now."""
        with shm.locked(self._fd, str(self.path)):
            shm.refuse_pinned(self.path)
            if self.is_lost():
                raise Pinned(f"{self.path} was removed or replaced just now: the next save takes a new one")
            os.pwrite(self._fd, layout.UNSEALED, 0)
        self.overwritten = self.version if self.version is not None else self.overwritten
        self.version = None

    def seal(self, header: SegmentHeader) -> None:
        """Writes the header behind the zero seal, then the seal. A system call each, so other processes see them in this order."""
        prefix = layout.encode(header, self.prefix_bytes)
        os.pwrite(self._fd, prefix[8:], 8)
        os.pwrite(self._fd, prefix[:8], 0)
        self.version = header.version
        self.written = {entry.name: entry for entry in header.tensors}

    def discard(self) -> None:
        """Removes a file that is open here and holds no snapshot: memory taken in advance, or a write that was given up."""
        if self._fd >= 0 and not self.is_lost() and os.pread(self._fd, 8, 0) in (b"", layout.UNSEALED):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of the file, which stays."""
        if self._memory is not None:
            if self._registered:
                from easyckpt import cuda

                cuda.unregister(self.address)
                self._registered = False
            # After an error its frames may still hold a view: the mapping then ends with them.
            with contextlib.suppress(BufferError):
                self._memory.close()
            self._memory = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _adopt(self, prefix_bytes: int, data_bytes: int) -> bool:
        """Takes the file of a predecessor if its size suits: its memory is there already."""
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):  # a link is replaced, never followed
                raise
            return False
        found = os.fstat(self._fd).st_size - data_bytes
        if prefix_bytes <= found <= 2 * prefix_bytes and found % layout.PAGE_BYTES == 0:
            self.prefix_bytes, self.data_bytes = found, data_bytes
            shm.allocate(self._fd, self.nbytes, str(self.path))
            self._map()
            return True
        os.close(self._fd)
        self._fd = -1
        return False

    def _create(self, prefix_bytes: int, data_bytes: int) -> None:
        shm.refuse_pinned(self.path)
        shm.open_folder(self.path.parent)  # a cleaner of /dev/shm takes folders as well
        self.version = None
        old = self._take_away()
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self.prefix_bytes, self.data_bytes = prefix_bytes, data_bytes
            self._allocate(old)
        except BaseException:
            self.path.unlink(missing_ok=True)
            self.close()
            raise
        finally:
            if old is not None:
                os.close(old)
        self._map()

    def _allocate(self, old: int | None) -> None:
        """Where memory is short, that of the file before is given back at once: who still reads it finds zeros, which no digest matches."""
        try:
            shm.allocate(self._fd, self.nbytes, str(self.path))
        except NoRoom:
            if old is None:
                raise
            memory.free(old)
            shm.allocate(self._fd, self.nbytes, str(self.path))

    def _take_away(self) -> int | None:
        """Unlinks a file of another size and returns it open, if there was one."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # nothing is there, or nothing of ours
            fd = None
        self.path.unlink(missing_ok=True)
        return fd

    def _register(self) -> None:
        """Where CUDA is in use: device copies go straight into these pages."""
        if "torch" in sys.modules and not self._registered:
            from easyckpt import cuda

            self._registered = cuda.register(self.address, self.nbytes)

    def _map(self) -> None:
        self.written = {}
        self._memory = mmap.mmap(self._fd, self.nbytes)
        self._touched = False
