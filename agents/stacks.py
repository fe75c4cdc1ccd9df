"""Stack dumps of a process. SIGUSR2 makes faulthandler write all threads' stacks into stacks.txt, without ptrace, GIL held or not; a program
that does not handle the signal would be ended by it, and is read from outside by py-spy where that is installed and allowed.

py-spy never stops the process (`--nonblocking`): a stack that it catches half changed is not read. Reading a dump is pure.
"""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import msgspec

from agents.rules.hang import Frame
from agents.sensors.process import handles_signal

LIMIT_BYTES = 256 << 10
"""Of one dump; a member with a thousand threads is cut here."""
MOST_LINES = 200
SPY_TRIES = 3
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]+)\b.*most recent call first\):")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
FENCE_MARK = "Timeout ("
"""First word of the dump that the self-fence leaves."""


def parse_dump(text: str) -> dict[int, tuple[Frame, ...]]:
    """Stacks by thread, innermost frame first."""
    stacks: dict[int, list[Frame]] = {}
    current: list[Frame] | None = None
    for line in text.splitlines():
        if found := _THREAD.match(line):
            current = stacks.setdefault(int(found["ident"], 16), [])
        elif current is not None and (frame := _FRAME.match(line)):
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            current.append(Frame(frame["file"], number, frame["function"]))
    return {ident: tuple(frames) for ident, frames in stacks.items()}


def stack_of(text: str, thread: int) -> tuple[Frame, ...] | None:
    """The stack of this thread in a dump; of the only or last one (the main thread) where it is not named."""
    stacks = parse_dump(text)
    if thread in stacks:
        return stacks[thread]
    return next(reversed(stacks.values()), None) if thread == 0 else None


def read_from(path: Path, offset: int, limit_bytes: int = LIMIT_BYTES) -> str:
    """What was written to a file behind `offset`, bounded; empty where there is nothing."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(limit_bytes).decode(errors="replace")
    except OSError:
        return ""


async def dump(pid: int, path: Path, wait_seconds: float) -> str | None:
    """All stacks of a process as text; None where neither way gives any in time."""
    if handles_signal(pid, signal.SIGUSR2) and _has_open(pid, path):
        return await _ask(pid, path, wait_seconds)
    return await _spy(pid, wait_seconds)


def _has_open(pid: int, path: Path) -> bool:
    """Whether the process keeps this file open: one that handles the signal for a purpose of its own is not asked."""
    wanted = os.path.realpath(path)
    try:
        return any(os.path.realpath(f"/proc/{pid}/fd/{name}") == wanted for name in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


async def _spy(pid: int, wait_seconds: float) -> str | None:
    program = find_spy()
    if program is None:
        return None
    for _ in range(SPY_TRIES):
        try:
            process = await asyncio.create_subprocess_exec(
                program, "dump", "--nonblocking", "--full-filenames", "--json", "--pid", str(pid),
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        except OSError:
            return None
        try:
            output, _ = await asyncio.wait_for(process.communicate(), wait_seconds)
        except TimeoutError:
            process.kill()
            with contextlib.suppress(TimeoutError):  # stuck in the kernel: it dies when it comes out of there
                await asyncio.wait_for(process.wait(), wait_seconds)
            return None
        if process.returncode == 0 and (text := spy_text(output, pid)) is not None:
            return text
    return None


def find_spy() -> str | None:
    """py-spy beside this interpreter, else on the path."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def spy_text(output: bytes, pid: int) -> str | None:
    """py-spy's JSON in faulthandler's words, the main thread last; None for what is no dump."""
    try:
        threads = msgspec.json.decode(output, type=list[_SpyThread])
    except msgspec.MsgspecError:
        return None
    threads.sort(key=lambda one: one.os_thread_id == pid)
    blocks = []
    for one in threads:
        frames = "".join(f'  File "{frame.filename}", line {frame.line} in {frame.name}\n' for frame in one.frames)
        blocks.append(f"Thread 0x{one.thread_id:016x} (most recent call first):\n{frames}")
    return "\n".join(blocks)[:LIMIT_BYTES] if any(one.frames for one in threads) else None


class _SpyFrame(msgspec.Struct, frozen=True):
    name: str
    filename: str
    line: int


class _SpyThread(msgspec.Struct, frozen=True):
    thread_id: int
    os_thread_id: int | None
    frames: list[_SpyFrame]


async def _ask(pid: int, path: Path, wait_seconds: float) -> str | None:
    """Through the signal; None where nothing is written in time."""
    try:
        before = os.stat(path).st_size
        descriptor = os.pidfd_open(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGUSR2)
    except ProcessLookupError:
        return None
    finally:
        os.close(descriptor)
    deadline = time.monotonic() + wait_seconds
    seen = before
    while time.monotonic() < deadline:
        await asyncio.sleep(0.02)
        size = os.stat(path).st_size
        if size > before and size == seen:  # grown, and not growing any more
            break
        seen = size
    text = read_from(path, before)
    return text or None
