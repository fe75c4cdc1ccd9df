"""All sensors of a node, made in one place for the daemon and for `--once`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from agents.config import Sight
from agents.sensors.base import Sensor
from agents.sensors.cgroup import CgroupSensor
from agents.sensors.clock import ClockSensor
from agents.sensors.fabric import FabricSensor
from agents.sensors.gpu import GpuSensor
from agents.sensors.host import HostSensor
from agents.sensors.kernel import KernelSensor
from agents.sensors.mounts import MountSensor
from agents.sensors.process import ProcessSensor
from aimaster.wire.places import MEMORY_ROOT


class Sensors:
    """Those that others need by name, and all of them in a row."""

    def __init__(
        self,
        node: str,
        folders: Mapping[str, Path],
        pids: Callable[[], Mapping[str, int]],
        *,
        sight: Sight,
        interval_seconds: float,
    ) -> None:
        self.gpu = GpuSensor(node, interval_seconds=interval_seconds, limit_seconds=sight.call_seconds)
        self.process = ProcessSensor(node, pids, interval_seconds)
        self.mounts = MountSensor(
            node,
            {"shm": MEMORY_ROOT, **folders},
            interval_seconds=interval_seconds,
            limit_seconds=sight.call_seconds,
        )
        self.clock = ClockSensor(node, interval_seconds)
        self.kernel = KernelSensor(node, source=sight.kernel_log)
        self.row: tuple[Sensor, ...] = (
            self.kernel,
            CgroupSensor(node, pids, root=Path(sight.cgroup_root)),
            self.gpu,
            self.process,
            HostSensor(node, interval_seconds),
            self.mounts,
            FabricSensor(node, root=Path(sight.sys_root), interval_seconds=interval_seconds),
            self.clock,
        )

    def close(self) -> None:
        """End the helpers."""
        self.gpu.close()
        self.mounts.close()
        self.kernel.close()
