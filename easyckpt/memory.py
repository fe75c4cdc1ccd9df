"""Raw host memory: addresses, copies and page touching through libc, all outside the interpreter's lock. No torch, no numpy."""

from __future__ import annotations

import ctypes
import mmap
import os

_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1
_MADV_POPULATE_READ = 22  # Linux 5.14
_MADV_POPULATE_WRITE = 23
_TOUCH_PIECE_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.restype = ctypes.c_void_p
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_KEEP_SIZE_PUNCH_HOLE = 1 | 2

_libc_locked = ctypes.PyDLL(None)
"""Calls that keep the interpreter's lock: giving it away and taking it back costs more than copying a few kilobytes."""
_libc_locked.memcpy.argtypes = _libc.memcpy.argtypes
_libc_locked.memcpy.restype = ctypes.c_void_p


_WRITABLE = 0x200
_memoryview = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_memoryview.restype = ctypes.py_object


class _Buffer(ctypes.Structure):
    """CPython's Py_buffer: ctypes itself takes only writable memory."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


def address_of(block: memoryview) -> int:
    """Where a block lies; valid while its owner lives."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(block), ctypes.byref(buffer), 0)
    try:
        return buffer.buf or 0
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def block_at(address: int, nbytes: int) -> memoryview:
    """A block of memory that something else keeps alive."""
    return _memoryview(address, nbytes, _WRITABLE) if nbytes else memoryview(bytearray())


def copy(target: int, source: int, nbytes: int) -> None:
    _libc.memcpy(target, source, nbytes)


def copy_small(target: int, source: int, nbytes: int) -> None:
    _libc_locked.memcpy(target, source, nbytes)


def touch(address: int, nbytes: int, *, write: bool) -> bool:
    """Maps every page of a mapping now (page-aligned address); False where the kernel cannot, and pages come one by one later."""
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    for at in range(0, nbytes, _TOUCH_PIECE_BYTES):
        if _libc.madvise(address + at, min(_TOUCH_PIECE_BYTES, nbytes - at), advice) != 0:
            return False
    return True


def make_huge(address: int, nbytes: int) -> None:
    """Asks for huge pages under memory that is there already; where the kernel has none to give, nothing changes."""
    _libc.madvise(address, nbytes, _MADV_HUGEPAGE)
    _libc.madvise(address, nbytes, _MADV_COLLAPSE)


def free(fd: int) -> None:
    """Gives a file's pages back now, whoever has them mapped: they read zeros. Where the file system cannot, they go with the last mapping."""
    pages = -(-os.fstat(fd).st_size // mmap.PAGESIZE)
    _libc.fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, 0, pages * mmap.PAGESIZE)
