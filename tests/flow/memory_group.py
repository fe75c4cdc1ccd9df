"""A memory control group of our own, where this machine lets us make one (version 1 or 2), for real out-of-memory kills."""

import contextlib
import os
import secrets
import time
from pathlib import Path

import pytest

ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))


class MemoryGroup:
    """Members that are put in may use `limit_bytes` together."""

    def __init__(self, limit_bytes: int) -> None:
        for root in ROOTS:
            self.folder = root / f"aimaster-test-{secrets.token_hex(4)}"
            with contextlib.suppress(OSError):
                self.folder.mkdir()
                for name in ("memory.limit_in_bytes", "memory.max"):
                    if (self.folder / name).exists():
                        (self.folder / name).write_text(str(limit_bytes))
                        with contextlib.suppress(OSError):  # swap may not be counted here
                            (self.folder / "memory.memsw.limit_in_bytes").write_text(str(limit_bytes))
                        return
                self.folder.rmdir()
        pytest.skip("no memory control group can be made here")

    def put(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        deadline = time.monotonic() + 5
        while self.folder.exists() and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)
            time.sleep(0.02)


EATING = """
import time
print("ready", flush=True)
while not __import__("os").path.exists({go!r}):
    time.sleep(0.01)
held = []
while True:
    held.append(b"x" * (1 << 20))
"""
"""Waits for a file, then takes memory until it is stopped."""
