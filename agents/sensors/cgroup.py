"""The control groups that members run in: memory and its out-of-memory kills, pressure, the count of processes. Version 2 and 1.

cgroup.memory   one for each different group: kills so far, use, limit, members in it       cgroup.pids   processes against the limit

A limit of none is left out. Read each second, since a kill is known from here where the kernel's log is hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from aimaster.wire.health import Reading, Scalar, Subject

ROOT: Final = Path("/sys/fs/cgroup")
UNLIMITED: Final = 1 << 60
"""Version 1 writes a huge number where there is no limit."""


class Group:
    """The files of one member's group."""

    def __init__(self, name: str, memory: Path, pids: Path, *, unified: bool) -> None:
        self.name = name
        self.memory = memory
        self.pids = pids
        self.unified = unified


class CgroupSensor:
    """All groups of the living members."""

    name = "cgroup"

    def __init__(
        self, node: str, pids: Callable[[], Mapping[str, int]], *, root: Path = ROOT, proc: Path = Path("/proc")
    ) -> None:
        self.interval_seconds = 1.0
        self._node = node
        self._pids = pids
        self._root = root
        self._proc = proc
        self._groups: dict[str, tuple[Group, tuple[str, ...]]] = {}
        """By name; those of members that just died are read once more."""

    def supported(self) -> str:
        return "" if self._root.is_dir() else f"no control groups under {self._root}"

    def read(self, now: float) -> list[Reading]:
        members: dict[str, tuple[Group, tuple[str, ...]]] = {}
        for member, pid in self._pids().items():
            group = find_group(pid, self._root, self._proc)
            if group is not None:
                members[group.name] = (group, (*members.get(group.name, (group, ()))[1], member))
        readings = []
        for group, names in {**self._groups, **members}.values():
            readings += self._read_group(now, group, names)
        self._groups = members
        return readings

    def _read_group(self, now: float, group: Group, members: tuple[str, ...]) -> list[Reading]:
        values: dict[str, Scalar] = {"group": group.name, "members": " ".join(members)}
        memory = _memory_of_two(group.memory) if group.unified else _memory_of_one(group.memory)
        counts = {
            name: number
            for name, file in (("pids", "pids.current"), ("limit", "pids.max"))
            if (number := _number(group.pids / file)) is not None
        }
        readings = []
        if memory:
            readings.append(self._reading(now, "cgroup.memory", values | memory))
        if counts:
            readings.append(self._reading(now, "cgroup.pids", values | counts))
        return readings

    def _reading(self, now: float, kind: str, values: dict[str, Scalar]) -> Reading:
        subject = Subject(node=self._node)
        return Reading(sensor=self.name, kind=kind, node=self._node, time_seconds=now, subject=subject, values=values)


def find_group(pid: int, root: Path, proc: Path) -> Group | None:
    """Where the group of a process lies; None when it is gone, or its hierarchy is not mounted here."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    paths: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path.lstrip("/")
    for mount in ("memory", ""):
        if mount == "memory" and mount in paths:
            memory, pids = root / "memory" / paths["memory"], root / "pids" / paths.get("pids", "")
            if memory.is_dir():
                return Group(paths["memory"] or "/", memory, pids, unified=False)
        if mount == "" and "" in paths:
            folder = root / paths[""]
            # Inside a container the path is often that of the host, and the own group is the mount's root.
            found = folder if (folder / "memory.events").exists() else root
            if (found / "memory.events").exists():
                return Group(paths[""] or "/", found, found, unified=True)
    return None


def _memory_of_two(folder: Path) -> dict[str, Scalar]:
    events = _table(folder / "memory.events")
    found: dict[str, Scalar] = {"oom_kills": events.get("oom_kill", 0), "oom": events.get("oom", 0)} if events else {}
    for name, file in (("used_bytes", "memory.current"), ("limit_bytes", "memory.max")):
        number = _number(folder / file)
        if number is not None:
            found[name] = number
    try:
        line = (folder / "memory.pressure").read_text(encoding="ascii").splitlines()[0]
        found["pressure_ratio"] = float(line.partition("avg10=")[2].split()[0]) / 100
    except (OSError, IndexError, ValueError):
        pass
    return found


def _memory_of_one(folder: Path) -> dict[str, Scalar]:
    control = _table(folder / "memory.oom_control")
    found: dict[str, Scalar] = {}
    if "oom_kill" in control:
        found = {"oom_kills": control["oom_kill"], "oom": control.get("under_oom", 0)}
    for name, file in (("used_bytes", "memory.usage_in_bytes"), ("limit_bytes", "memory.limit_in_bytes")):
        number = _number(folder / file)
        if number is not None and number < UNLIMITED:
            found[name] = number
    return found


def _table(path: Path) -> dict[str, int]:
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return {}
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    """The number in a file; None for `max`, for nothing and for a file that is not there."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdigit() else None
