"""What processes cost: CPU seconds, memory, files made durable, files pushed out of the page cache."""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

SAMPLE_SECONDS = 0.1


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def everyone(side: int) -> list[int]:
    """This process, its descendants, and the side process with its own."""
    return [os.getpid(), *descendants(os.getpid()), *([side, *descendants(side)] if side else [])]


def others_cpu_seconds(side: int) -> float:
    """Of everyone but this process, ended children included."""
    times = os.times()
    return sum(map(_cpu_seconds, everyone(side)[1:])) + times.children_user + times.children_system


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def memory_bytes(pids: Iterable[int]) -> int:
    """Resident memory, what is shared among them counted once.

    The trainer, who holds the most, is looked at last: what another one maps meanwhile is then not counted twice.
    """
    total = 0
    for pid in reversed(list(pids)):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
    return total


def file_bytes(pattern: str) -> int:
    """Pages of files in memory that nobody maps, by a pattern below /dev/shm; "" for none."""
    found = Path("/dev/shm").glob(pattern) if pattern else []
    return sum(path.stat().st_blocks * 512 for path in found if path.is_file())


@contextlib.contextmanager
def peak_memory(side: int, pattern: str) -> Iterator[list[int]]:
    """The most that two samples in a row show while the block runs, as the list's only element.

    Two, since processes are looked at one after the other: what passes from one to another meanwhile would count twice.
    """
    peak, over = [0], threading.Event()

    def sample() -> None:
        before = 0
        while True:
            now = memory_bytes(everyone(side)) + file_bytes(pattern)
            peak[0] = max(peak[0], min(before, now))
            before = now
            if over.wait(SAMPLE_SECONDS):
                break

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
        time.sleep(3 * SAMPLE_SECONDS)
    finally:
        over.set()
        thread.join()


def sync_tree(folder: str) -> None:
    for path in _files(folder):
        with opened(path) as fd:
            os.fsync(fd)


def drop_cache(folder: str) -> None:
    """Evicts these files, which were synced, not the machine's whole cache."""
    for path in _files(folder):
        with opened(path) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _files(folder: str) -> list[Path]:
    return [path for path in Path(folder).rglob("*") if path.is_file()]
