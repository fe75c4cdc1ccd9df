"""A node's segment folder, seen from outside the writer: list, read, prove, pin and reclaim. No torch, no numpy.

A file counts only if it is sealed, its header matches its digest and its length is what the header says. Nothing here trusts a name.
A pin is an empty file SEGMENT.pin.PID.START.DEADLINE beside the segment: it holds while that very process lives and the deadline (of the
monotonic clock, in milliseconds) is not reached. Pinning and claiming a slot exclude each other by a short lock on the segment's file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from easyckpt import layout
from easyckpt.digest import StreamCheck
from easyckpt.errors import BadSegment, Corrupt, EasyckptError, NoRoom, Pinned, Torn, Unsealed
from easyckpt.layout import SegmentHeader, SegmentName, Version
from easyckpt.retain import SlotState

SHM = Path("/dev/shm")  # noqa: S108 - memory of the node, made private below
LOCK_WAIT_SECONDS = 0.5
LEFT_OVER_SECONDS = 120.0
VERIFY_PIECE_BYTES = 4 << 20
_WRITER = re.compile(r"(?P<stem>.+)\.writer\.(?P<pid>\d+)\.(?P<start>\d+)")
_PIN = re.compile(r"(?P<segment>.+\.safetensors)\.pin\.(?P<pid>\d+)\.(?P<start>\d+)\.(?P<deadline_ms>\d+)")


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed segment found in a folder."""

    path: Path
    """The file."""
    header: SegmentHeader
    """What it says of itself, proven by its digest."""
    tier: Literal["shm", "peer", "storage"]
    """Where it lies: written here, held for another node, or on storage."""
    nbytes: int
    """Length of the file."""
    opening: bytes
    """Its first bytes: the seal, and the digest over all bytes before the tensors."""

    @property
    def prefix_bytes(self) -> int:
        return self.nbytes - self.header.data_bytes


def default_folder(key: str | os.PathLike[str]) -> Path:
    """The folder of a stand-alone engine: one for each user and storage path or name."""
    text = os.fspath(key)
    if "://" not in text:
        text = os.path.abspath(text)
    root = SHM if SHM.is_dir() else Path(os.environ.get("TMPDIR", "/tmp"))  # noqa: S108 - private folder below
    return root / f"easyckpt-{os.getuid()}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def open_folder(folder: Path) -> Path:
    """Makes the folder, mode 0700; refuses one that is a link or belongs to someone else."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise EasyckptError(f"{folder} is not a folder of this user: name another one with folder=")
    return folder


def read_header(path: str | os.PathLike[str]) -> SegmentHeader:
    """The header of one sealed segment. Raises BadSegment or FileNotFoundError."""
    return read_segment(Path(path)).header


def read_segment(path: Path) -> Segment:
    """One sealed segment with its length. Raises BadSegment or FileNotFoundError."""
    fd = os.open(
        path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    )  # a pipe under that name holds nobody up
    try:
        return segment_of(fd, path)
    finally:
        os.close(fd)


def segment_of(fd: int, path: Path) -> Segment:
    file_bytes = os.fstat(fd).st_size
    prefix_bytes = layout.prefix_length(os.pread(fd, 8, 0), file_bytes=file_bytes, where=str(path))
    prefix = os.pread(fd, prefix_bytes, 0)
    header = layout.decode(prefix, where=str(path))
    if prefix_bytes + header.data_bytes != file_bytes:
        raise Corrupt(
            f"{path} has {file_bytes} bytes, its header says {prefix_bytes + header.data_bytes}; it is ignored"
        )
    name = layout.parse_name(path.name)
    tier: Literal["shm", "peer"] = "peer" if name and name.peer else "shm"
    return Segment(path=path, header=header, tier=tier, nbytes=file_bytes, opening=prefix[: layout.PEEK_BYTES])


def scan(folder: str | os.PathLike[str]) -> list[Segment]:
    """All sealed segments of a folder, newest first. What is torn, foreign or gone meanwhile is left out."""
    found = []
    for name in segment_names(Path(folder)):
        with contextlib.suppress(BadSegment, OSError):
            found.append(read_segment(Path(folder) / str(name)))
    return sorted(found, key=lambda segment: (segment.header.version, segment.tier == "shm"), reverse=True)


def segment_names(folder: Path) -> list[SegmentName]:
    return [parsed for name, parsed in _entries(folder) if parsed is not None]


def strangers(folder: Path) -> list[str]:
    """Names in a folder of segments that are neither a segment nor a mark of ours."""
    marks = (_WRITER.fullmatch, _PIN.fullmatch)
    return [name for name, parsed in _entries(folder) if parsed is None and not any(known(name) for known in marks)]


def _entries(folder: Path) -> list[tuple[str, SegmentName | None]]:
    """What lies in a folder, by name, and as a segment where it may be one: a folder under such a name is none."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    return [
        (entry.name, None if entry.is_dir(follow_symlinks=False) else layout.parse_name(entry.name))
        for entry in entries
    ]


def verify(path: str | os.PathLike[str]) -> Segment:
    """Reads every byte of a segment against its digests. Raises Corrupt, Unsealed, Foreign, or Torn if its writer came meanwhile."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        segment = segment_of(fd, Path(path))
        check = StreamCheck(segment.header, where=str(path))
        try:
            with mapped(fd, segment.nbytes) as view:
                for at in range(segment.prefix_bytes, segment.nbytes, VERIFY_PIECE_BYTES):
                    check.feed(view[at : at + VERIFY_PIECE_BYTES])
            check.finish()
        except Corrupt as error:
            if is_same(fd, segment):
                raise
            raise Torn(f"{path} was written to while it was verified; read it again") from error
        return segment
    finally:
        os.close(fd)


def is_same(fd: int, segment: Segment) -> bool:
    """Whether the open file still holds the snapshot that was read from it before."""
    return os.pread(fd, len(segment.opening), 0) == segment.opening


@contextlib.contextmanager
def mapped(fd: int, nbytes: int) -> Iterator[memoryview]:
    """A read-only view of a file. A file of no bytes cannot be mapped and is no segment."""
    memory = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    view = memoryview(memory)
    try:
        yield view
    finally:
        view.release()
        # While an error travels, its frames hold pieces of the view: the mapping then ends with them.
        with contextlib.suppress(BufferError):
            memory.close()


# ------------------------------------------------------------------------------------------------------------ pins


def pin(path: str | os.PathLike[str], pid: int | None = None, deadline: float = 60.0) -> Path:
    """Keeps a sealed segment from being overwritten for at most `deadline` seconds, while process `pid` (default: this one) lives.

    Returns the pin, for `unpin`. Raises Unsealed if the segment is not sealed any more, FileNotFoundError if it is gone.
    """
    path = Path(path)
    pid = os.getpid() if pid is None else pid
    started = start_time(pid)
    if started is None:
        raise EasyckptError(f"process {pid} is not running: it cannot pin {path}")
    deadline_ms = int((time.monotonic() + deadline) * 1000)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with locked(fd, str(path)):
            if os.pread(fd, 8, 0) in (b"", layout.UNSEALED):
                raise Unsealed(f"{path} is being written: it cannot be pinned now")
            mark = path.with_name(f"{path.name}.pin.{pid}.{started}.{deadline_ms}")
            os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
            return mark
    finally:
        os.close(fd)


def unpin(mark: Path) -> None:
    """Ends a pin; one that is gone already is no error."""
    with contextlib.suppress(FileNotFoundError):
        mark.unlink()


@contextlib.contextmanager
def pinned(path: Path, deadline: float) -> Iterator[None]:
    mark = pin(path, deadline=deadline)
    try:
        yield
    finally:
        unpin(mark)


def pinned_names(folder: Path) -> set[str]:
    """Names of segments with a pin that holds now; pins that ended are removed."""
    held = set()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            found = _PIN.fullmatch(name)
            if found is None:
                continue
            if time.monotonic() * 1000 < int(found["deadline_ms"]) and start_time(int(found["pid"])) == int(
                found["start"]
            ):
                held.add(found["segment"])
            else:
                unpin(folder / name)
    return held


def refuse_pinned(path: Path) -> None:
    """Raises Pinned while the segment is being copied away."""
    if path.name in pinned_names(path.parent):
        raise Pinned(f"{path} is being copied away: it is left alone, the next write is taken")


def start_time(pid: int) -> int | None:
    """Clock ticks since boot at which the process started; None when it is gone. With the pid it names one process for ever."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@contextlib.contextmanager
def locked(fd: int, where: str) -> Iterator[None]:
    """A short exclusive lock on an open file. Held for microseconds by everyone; a holder that was stopped makes this end in Pinned."""
    give_up_at = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() > give_up_at:
                raise Pinned(f"{where} is locked by a process that does not go on; it is left alone") from error
            time.sleep(0.001)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


# ----------------------------------------------------------------------------------------------------------- slots


def slot_states(folder: Path, member: str, *, peer: bool = False) -> dict[int, list[SlotState]]:
    """The slots of a member by rank, from the first bytes of each file: cheap, for the choice of a slot."""
    held = pinned_names(folder)
    ranks: dict[int, list[SlotState]] = {}
    for name in segment_names(folder):
        if name.member == member and name.peer == peer:
            state = SlotState(slot=name.slot, version=peek(folder / str(name)), pinned=str(name) in held)
            ranks.setdefault(name.rank, []).append(state)
    return ranks


def peek(path: Path) -> Version | None:
    """(lineage, step) of a sealed segment, unproven."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
            return layout.peek(file.read(layout.PEEK_BYTES))
    except OSError:
        return None


def allocate(fd: int, nbytes: int, where: str) -> None:
    """Takes the memory now, so that a lack of it is an error here and never a SIGBUS later."""
    have = os.fstat(fd).st_blocks * 512
    if have >= nbytes:
        return
    free = free_bytes(fd)
    if nbytes - have > free:
        raise _no_room(where, nbytes - have, free)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG):
            raise
        raise _no_room(where, nbytes - have, free_bytes(fd)) from error


def free_bytes(fd: int) -> int:
    """What may still be taken: the file system's room, the machine's memory and the control group's limit, whichever is least."""
    room = os.fstatvfs(fd)
    limits = [room.f_bavail * room.f_frsize]
    with open("/proc/meminfo", encoding="ascii") as file:
        limits += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            ceiling = file.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as file:
            limits += [] if ceiling == "max" else [int(ceiling) - int(file.read())]
    except OSError:
        pass  # no control group of our own: the machine's figures hold
    return max(0, min(limits))


def _no_room(where: str, needed: int, free: int) -> NoRoom:
    return NoRoom(
        f"{where} needs {needed} bytes more ({needed / 2**20:.0f} MiB) and only {free} ({free / 2**20:.0f} MiB) are free; nothing was"
        " written. Give /dev/shm and the memory limit that much (docker: --shm-size; Kubernetes: an emptyDir of medium Memory on"
        " /dev/shm), or save with slots=1, or name a roomier folder with folder=",
        needed_bytes=needed,
        free_bytes=free,
    )


def reclaim(folder: str | os.PathLike[str], *, keep_sealed: bool = True) -> list[Path]:
    """Removes what nobody can use: unsealed segments that no living process writes, and marks of processes that ended.

    A copy that was arriving just now, when its receiver was killed, stays for LEFT_OVER_SECONDS: its sender comes back with the rest.
    With `keep_sealed=False` sealed segments go too. Those that are pinned, or whose writer lives, stay.
    """
    folder = Path(folder)
    held = pinned_names(folder)
    removed = []
    for name in segment_names(folder):
        path = folder / str(name)
        if str(name) in held or (keep_sealed and peek(path) is not None):
            continue
        if name.peer and _age_seconds(path) < LEFT_OVER_SECONDS:
            continue
        if living_writer(folder, name.stem) is not None or living_writer(folder, str(name)) is not None:
            continue
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed.append(path)
    return removed


def _age_seconds(path: Path) -> float:
    """Since it was last written to."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


# ---------------------------------------------------------------------------------------------------------- writers


def claim_writer(folder: Path, stem: str, *, wait_seconds: float = 5.0) -> Path:
    """Says that this process writes the segments of `stem` (MEMBER.rRANK, with ".peer" for copies), for as long as it lives.

    A predecessor that is just being killed is waited for. Raises Pinned while another process, or another engine of this one, writes them.
    """
    give_up_at = time.monotonic() + wait_seconds
    while True:
        with _folder_locked(folder):  # who looks at the same moment does not claim as well
            other = living_writer(folder, stem)
            if other is None:
                mark = folder / f"{stem}.writer.{os.getpid()}.{start_time(os.getpid())}"
                os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
                return mark
        if other == os.getpid() or time.monotonic() > give_up_at:
            who, mend = (
                ("another engine of this process", "close") if other == os.getpid() else (f"process {other}", "end")
            )
            raise Pinned(f"{who} writes {stem} in {folder}: {mend} it, or give this one another member or folder")
        time.sleep(0.02)


@contextlib.contextmanager
def _folder_locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        with locked(fd, str(folder)):
            yield
    finally:
        os.close(fd)


def living_writer(folder: Path, stem: str) -> int | None:
    """The process that writes the segments of `stem`; marks of ended ones are removed."""
    for name in os.listdir(folder):
        found = _WRITER.fullmatch(name)
        if found is None or found["stem"] != stem:
            continue
        if start_time(int(found["pid"])) == int(found["start"]):
            return int(found["pid"])
        unpin(folder / name)
    return None
