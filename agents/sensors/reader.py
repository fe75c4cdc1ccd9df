"""Reads all sensors at their own pace in a thread of its own, so that a file system that does not answer stops nothing else."""

import threading
import time
from collections.abc import Sequence

from agents.sensors.base import Sensor
from aimaster.wire.health import Reading


class SensorReader:
    """The newest readings of each sensor; a daemon thread, since a read that hangs in the kernel cannot be ended."""

    def __init__(self, sensors: Sequence[Sensor]) -> None:
        self.unsupported = {sensor.name: reason for sensor in sensors if (reason := sensor.supported())}
        self._sensors = [sensor for sensor in sensors if sensor.name not in self.unsupported]
        self._newest: dict[str, tuple[Reading, ...]] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read_forever, name="sensors", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ending.set()

    def newest(self) -> tuple[Reading, ...]:
        """The last readings of all sensors; their times tell how old they are."""
        return tuple(reading for readings in list(self._newest.values()) for reading in readings)

    def read_once(self) -> tuple[Reading, ...]:
        """Read all sensors here and now."""
        for sensor in self._sensors:
            self._newest[sensor.name] = tuple(sensor.read(time.time()))
        return self.newest()

    def _read_forever(self) -> None:
        due = {sensor.name: 0.0 for sensor in self._sensors}
        while not self._ending.is_set():
            now = time.monotonic()
            for sensor in self._sensors:
                if now >= due[sensor.name]:
                    due[sensor.name] = now + sensor.interval_seconds
                    self._newest[sensor.name] = tuple(sensor.read(time.time()))
            self._ending.wait(max(0.05, min(due.values(), default=now + 60.0) - time.monotonic()))
