"""Write protection by the kernel's userfaultfd, as plain calls: open, register, protect, read the writes that wait. No torch.

A protected page can be read; the first write to it waits until whoever holds the descriptor lets the page go. Closing the last descriptor lets
everything go, so a holder that dies holds nobody up. Nothing is assumed of the kernel: what it refuses is Refused, with the reason in words.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct

from easyckpt.errors import Refused

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

DEVICE = "/dev/userfaultfd"
_SYSCALLS = {"x86_64": 323, "aarch64": 282}
_API_VERSION = 0xAA
# WP_UNPOPULATED (Linux 6.4): without it a first write to a page that was never touched would go unnoticed.
_FEATURES = (1 << 0) | (1 << 13)
_IOCTL_NEW, _IOCTL_API, _IOCTL_REGISTER, _IOCTL_PROTECT = 0xAA00, 0xC018AA3F, 0xC020AA00, 0xC018AA06
_REGISTER_PROTECT, _PROTECT, _LET_GO = 2, 1, 0
_RANGE_AND_MODE = struct.Struct("=QQQ")
_REGISTER = struct.Struct("=QQQQ")
_MESSAGE = struct.Struct("=B7xQQQ")
_PAGE_FAULT = 0x12
_MESSAGES = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def open_userfault() -> int:
    """A descriptor for this process's memory, under which writes by system calls and devices wait as any other.

    What an unprivileged process gets holds up its own instructions only; a receive or a device's copy into protected memory would fail there,
    so that is refused.
    """
    fd = _by_device() if os.access(DEVICE, os.R_OK | os.W_OK) else _by_system_call()
    try:
        fcntl.ioctl(fd, _IOCTL_API, _RANGE_AND_MODE.pack(_API_VERSION, _FEATURES, 0))
    except OSError as error:
        os.close(fd)
        raise Refused(
            f"this kernel's userfaultfd cannot protect pages against writes ({error}); Linux 6.4 can"
        ) from error
    return fd


def _by_system_call() -> int:
    number = _SYSCALLS.get(platform.machine())
    if number is None:
        raise Refused(f"userfaultfd is not known on {platform.machine()}")
    fd = int(_libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK))
    if fd < 0:
        reason = os.strerror(ctypes.get_errno())
        raise Refused(
            f"userfaultfd is refused ({reason}) by the kernel or the container's profile: CAP_SYS_PTRACE,"
            f" vm.unprivileged_userfaultfd=1 or access to {DEVICE} allow it"
        )
    return fd


def _by_device() -> int:
    device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    try:
        return int(fcntl.ioctl(device, _IOCTL_NEW, os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError as error:
        raise Refused(f"{DEVICE} gives no userfaultfd ({error})") from error
    finally:
        os.close(device)


def register(fd: int, begin: int, nbytes: int) -> None:
    """Raises OSError for memory that cannot be protected (mapped from a file, for one)."""
    fcntl.ioctl(fd, _IOCTL_REGISTER, _REGISTER.pack(begin, nbytes, _REGISTER_PROTECT, 0))


def protect(fd: int, begin: int, nbytes: int) -> None:
    _set(fd, begin, nbytes, _PROTECT)


def let_go(fd: int, begin: int, nbytes: int) -> None:
    """From here on the pages may be written; who waited goes on."""
    _set(fd, begin, nbytes, _LET_GO)


def waiting_writes(fd: int) -> list[int]:
    """Addresses that threads wait to write to."""
    try:
        found = os.read(fd, _MESSAGES * _MESSAGE.size)
    except BlockingIOError:
        return []
    return [address for event, _, address, _ in _MESSAGE.iter_unpack(found) if event == _PAGE_FAULT]


def _set(fd: int, begin: int, nbytes: int, mode: int) -> None:
    while True:
        try:
            fcntl.ioctl(fd, _IOCTL_PROTECT, _RANGE_AND_MODE.pack(begin, nbytes, mode))
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:  # the mapping is being changed just now: it ends by itself
                raise
