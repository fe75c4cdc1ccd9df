"""Facts about the machine as a whole: memory, load, pressure, processes the kernel killed for want of memory."""

import os

from aimaster.wire.health import Reading, Scalar, Subject


class HostSensor:
    """Reads /proc; what a kernel does not tell is left out."""

    name = "host"

    def __init__(self, node: str, interval_seconds: float = 5.0) -> None:
        self.interval_seconds = interval_seconds
        self._node = node

    def supported(self) -> str:
        return ""

    def read(self, now: float) -> list[Reading]:
        return [self._memory(now), self._load(now), *self._pressure(now), *self._kills(now)]

    def _reading(self, now: float, kind: str, values: dict[str, Scalar]) -> Reading:
        return Reading(
            sensor=self.name, kind=kind, node=self._node, time_seconds=now,
            subject=Subject(node=self._node), values=values,
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
        with open("/proc/loadavg", encoding="ascii") as file:
            one, five, _, tasks, _ = file.read().split()
        values: dict[str, Scalar] = {"load_1m": float(one), "load_5m": float(five), "cpus": os.cpu_count() or 1}
        values["threads"] = int(tasks.partition("/")[2])
        limits = [limit for name in ("threads-max", "pid_max") if (limit := _limit(name)) is not None]
        if limits:
            values["threads_limit"] = min(limits)
        return self._reading(now, "host.load", values)

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

    def _kills(self, now: float) -> list[Reading]:
        try:
            with open("/proc/vmstat", encoding="ascii") as file:
                line = next((line for line in file if line.startswith("oom_kill ")), None)
        except OSError:
            return []
        return [] if line is None else [self._reading(now, "host.oom", {"kills": int(line.split()[1])})]


def _limit(name: str) -> int | None:
    """A number of the kernel's settings; None where it is hidden."""
    try:
        with open(f"/proc/sys/kernel/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None
