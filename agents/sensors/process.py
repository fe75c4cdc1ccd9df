"""Facts about processes out of /proc: who one is beyond doubt, its state, its processor time and memory, the signals it handles."""

import os
from collections.abc import Callable, Mapping

import msgspec

from agents.shim import boot_id, start_ticks, stat_fields
from aimaster.wire.health import Reading, Subject
from aimaster.wire.topology import ProcessId

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One process as /proc tells it."""

    state: str
    """R running, S sleeping, D uninterruptible, T stopped, t traced, Z zombie."""
    cpu_seconds: float
    """User and system time of all its threads."""
    resident_bytes: int
    threads: int


def identify(pid: int) -> ProcessId | None:
    """The full name of a living process."""
    ticks = start_ticks(pid)
    return None if ticks is None else ProcessId(boot_id=boot_id(), pid=pid, start_ticks=ticks)


def read_process(pid: int) -> ProcessFacts | None:
    """Facts of a process; None when there is none of this pid."""
    fields = stat_fields(pid)
    if fields is None:
        return None
    return ProcessFacts(
        state=fields[0],
        cpu_seconds=(int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND,
        resident_bytes=int(fields[21]) * PAGE_BYTES,
        threads=int(fields[17]),
    )


def handles_signal(pid: int, number: int) -> bool:
    """Whether the process catches this signal; one that does not would be ended by it."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            caught = next((line for line in file if line.startswith("SigCgt:")), "SigCgt:\t0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


class ProcessSensor:
    """State, processor time, memory and threads of each member's main process."""

    name = "process"

    def __init__(self, node: str, pids: Callable[[], Mapping[str, int]], interval_seconds: float = 5.0) -> None:
        self.interval_seconds = interval_seconds
        self._node = node
        self._pids = pids

    def supported(self) -> str:
        return ""

    def read(self, now: float) -> list[Reading]:
        readings = []
        for member, pid in self._pids().items():
            facts = read_process(pid)
            if facts is None:
                continue
            readings.append(
                Reading(
                    sensor=self.name,
                    kind="process.usage",
                    node=self._node,
                    time_seconds=now,
                    subject=Subject(node=self._node, pid=pid),
                    values={
                        "member": member,
                        "state": facts.state,
                        "cpu_seconds": facts.cpu_seconds,
                        "resident_bytes": facts.resident_bytes,
                        "threads": facts.threads,
                    },
                )
            )
        return readings
