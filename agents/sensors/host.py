"""Facts about the machine: memory, load, pressure, and the room left in the folders that a run lives in."""

import os
from collections.abc import Mapping
from pathlib import Path

from aimaster.wire.health import Reading, ReadingState, Scalar, Subject


class HostSensor:
    """Reads /proc and asks the file systems; a folder that is not there is unreadable, which is no fault."""

    name = "host"

    def __init__(self, node: str, folders: Mapping[str, Path], interval_seconds: float = 5.0) -> None:
        self.interval_seconds = interval_seconds
        self._node = node
        self._folders = folders

    def supported(self) -> str:
        return ""

    def read(self, now: float) -> list[Reading]:
        readings = [self._memory(now), self._load(now), *self._pressure(now)]
        readings += [self._room(now, name, folder) for name, folder in self._folders.items()]
        return readings

    def _reading(self, now: float, kind: str, values: dict[str, Scalar], state: ReadingState = "ok") -> Reading:
        return Reading(
            sensor=self.name, kind=kind, node=self._node, time_seconds=now,
            state=state, subject=Subject(node=self._node), values=values,
        )  # fmt: skip

    def _memory(self, now: float) -> Reading:
        wanted = {"MemTotal": "total_bytes", "MemAvailable": "available_bytes", "Shmem": "shared_bytes"}
        values: dict[str, Scalar] = {}
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if name in wanted:
                    values[wanted[name]] = int(rest.split()[0]) * 1024
        return self._reading(now, "host.memory", values)

    def _load(self, now: float) -> Reading:
        one, five, _ = os.getloadavg()
        return self._reading(now, "host.load", {"load_1m": one, "load_5m": five, "cpus": os.cpu_count() or 1})

    def _pressure(self, now: float) -> list[Reading]:
        """Share of the last ten seconds in which something waited for the resource (ratio 0-1)."""
        readings = []
        for resource in ("cpu", "memory", "io"):
            try:
                with open(f"/proc/pressure/{resource}", encoding="ascii") as file:
                    line = file.readline()
            except OSError:
                continue
            waited = line.partition("avg10=")[2].split()[0]
            readings.append(
                self._reading(now, "host.pressure", {"resource": resource, "some_ratio": float(waited) / 100})
            )
        return readings

    def _room(self, now: float, name: str, folder: Path) -> Reading:
        try:
            found = os.statvfs(folder)
        except OSError as error:
            return self._reading(
                now, "host.room", {"folder": name, "error": error.strerror or str(error)}, "unreadable"
            )
        return self._reading(
            now,
            "host.room",
            {
                "folder": name,
                "total_bytes": found.f_blocks * found.f_frsize,
                "free_bytes": found.f_bavail * found.f_frsize,
                "free_inodes": found.f_favail,
                "inodes": found.f_files,
                "read_only": bool(found.f_flag & os.ST_RDONLY),
            },
        )
