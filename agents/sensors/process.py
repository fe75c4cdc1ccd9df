"""Facts about processes out of /proc: who one is beyond doubt, its state, its processor time and memory, the signals it handles, and
what all the processes of a member use together.
"""

import os
from collections.abc import Callable, Mapping

import msgspec

from agents.shim import boot_id, start_ticks, stat_fields
from aimaster.wire.health import Reading, Scalar, Subject
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


def context_switches(pid: int) -> int:
    """How often its main thread was scheduled; 0 where that cannot be read."""
    return _sum_of(f"/proc/{pid}/task/{pid}/status", ("voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"))


def io_calls(pid: int) -> int:
    """Reads and writes it has made; 0 where that is not ours to see."""
    return _sum_of(f"/proc/{pid}/io", ("syscr:", "syscw:"))


def _sum_of(path: str, names: tuple[str, ...]) -> int:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(names))
    except (OSError, IndexError, ValueError):
        return 0


class ProcessSensor:
    """Each member with all processes it has started: state, processor time, memory, threads, descriptors; who is blocked or a zombie."""

    name = "process"

    def __init__(self, node: str, pids: Callable[[], Mapping[str, int]], interval_seconds: float = 5.0) -> None:
        self.interval_seconds = interval_seconds
        self.trees: dict[str, frozenset[int]] = {}
        """All processes of each member as last read."""
        self._node = node
        self._pids = pids

    def supported(self) -> str:
        return ""

    def read(self, now: float) -> list[Reading]:
        leaders = self._pids()
        table = read_table() if leaders else {}
        self.trees = {member: frozenset(members_of(pid, table)) for member, pid in leaders.items()}
        return [
            self._usage(now, member, pid, [table[one] for one in self.trees[member]])
            for member, pid in leaders.items()
            if pid in table
        ]

    def _usage(self, now: float, member: str, pid: int, family: list[list[str]]) -> Reading:
        main = read_process(pid)
        values: dict[str, Scalar] = {
            "member": member,
            "state": main.state if main is not None else "X",
            "cpu_seconds": sum(int(one[11]) + int(one[12]) for one in family) / TICKS_PER_SECOND,
            "resident_bytes": sum(int(one[21]) for one in family) * PAGE_BYTES,
            "threads": sum(int(one[17]) for one in family),
            "processes": len(family),
            "zombies": sum(one[0] == "Z" for one in family),
            "blocked": sum(one[0] == "D" for one in family),
        }
        return Reading(
            sensor=self.name,
            kind="process.usage",
            node=self._node,
            time_seconds=now,
            subject=Subject(node=self._node, pid=pid),
            values=values | _descriptors(pid),
        )


def read_table() -> dict[int, list[str]]:
    """Every process of the machine: /proc/PID/stat from the state on."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := stat_fields(int(name))) is not None:
            table[int(name)] = fields
    return table


def members_of(leader: int, table: Mapping[int, list[str]]) -> set[int]:
    """The processes of a leader's session and all their descendants."""
    children: dict[int, list[int]] = {}
    for pid, fields in table.items():
        children.setdefault(int(fields[1]), []).append(pid)
    waiting = [pid for pid, fields in table.items() if pid == leader or int(fields[3]) == leader]
    found: set[int] = set()
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, ())
    return found


def _descriptors(pid: int) -> dict[str, Scalar]:
    """Open files against the limit; empty where that is not ours to see."""
    try:
        count = len(os.listdir(f"/proc/{pid}/fd"))
        with open(f"/proc/{pid}/limits", encoding="ascii", errors="replace") as file:
            line = next(line for line in file if line.startswith("Max open files"))
    except (OSError, StopIteration):
        return {}
    limit = line.split()[3]
    values: dict[str, Scalar] = {"files": count}
    if limit.isdigit():
        values["files_limit"] = int(limit)
    return values
