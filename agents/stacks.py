"""Stack dumps of a member, without ptrace: SIGUSR2 makes faulthandler write all threads' stacks into stacks.txt, GIL held or not.

Reading a dump is pure; taking one signals the member, but only one that handles the signal: others would be ended by it.
"""

import asyncio
import os
import re
import signal
import time
from pathlib import Path

from agents.rules.hang import Frame
from agents.sensors.process import handles_signal

LIMIT_BYTES = 256 << 10
"""Of one dump; a member with a thousand threads is cut here."""
MOST_LINES = 200
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
    """Ask the process for a dump and return its text; None where it does not handle the signal or wrote nothing in time."""
    if not handles_signal(pid, signal.SIGUSR2):
        return None
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
