"""Reads all sensors at their own pace in a thread of its own, so that a file system that does not answer stops nothing else.

A sensor that has a descriptor (`fileno`) is read the moment that becomes readable as well. Whatever was read is handed on at once.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import structlog

from agents.sensors.base import Sensor
from aimaster.wire.health import Reading

SHORTEST_PAUSE_SECONDS = 0.05
"""A descriptor that is always readable must not make a busy loop."""
PROMPT = frozenset({"kernel", "cgroup"})
"""What may tell at once why a process was killed."""
log = structlog.get_logger()


class SensorReader:
    """The newest readings of each sensor; a daemon thread, since a read that hangs in the kernel cannot be ended."""

    def __init__(self, sensors: Sequence[Sensor], hand_on: Callable[[Sequence[Reading]], None] | None = None) -> None:
        self.unsupported = {sensor.name: reason for sensor in sensors if (reason := sensor.supported())}
        self.seconds: dict[str, float] = {}
        """Processor time that each sensor has taken."""
        self.failed: set[str] = set()
        """Sensors that broke down; they are not read again."""
        self._sensors = [sensor for sensor in sensors if sensor.name not in self.unsupported]
        self._hand_on = hand_on
        self._newest: dict[str, tuple[Reading, ...]] = {}
        self._asked: deque[Callable[[], None]] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._read_forever, name="sensors", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, wait_seconds: float = 0.5) -> None:
        """End the thread; one that hangs in a read is left."""
        self._ending.set()
        os.eventfd_write(self._bell, 1)
        if self._thread.is_alive():
            self._thread.join(wait_seconds)

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the sensors that can read here."""
        return tuple(sensor.name for sensor in self._sensors if sensor.name not in self.failed)

    def newest(self) -> tuple[Reading, ...]:
        """The last readings of all sensors; their times tell how old they are. Lines of text are handed on once and not kept."""
        return tuple(reading for readings in list(self._newest.values()) for reading in readings if not reading.text)

    def read_once(self) -> tuple[Reading, ...]:
        """Read all sensors here and now."""
        for sensor in self._sensors:
            self._read(sensor)
        return self.newest()

    def _read(self, sensor: Sensor) -> None:
        since = time.thread_time()
        try:
            readings = tuple(sensor.read(time.time()))
        except Exception:  # one broken sensor must blind the agent for its own kind of fact alone
            log.exception("sensor_failed", sensor=sensor.name)
            self.failed.add(sensor.name)
            self._newest.pop(sensor.name, None)
            return
        self.seconds[sensor.name] = self.seconds.get(sensor.name, 0.0) + time.thread_time() - since
        self._newest[sensor.name] = readings
        if self._hand_on is not None and readings:
            self._hand_on(readings)

    def look_now(self, done: Callable[[], None]) -> None:
        """Read those that may explain a death at once; `done` is called in this thread when their readings are handed on."""
        self._asked.append(done)
        os.eventfd_write(self._bell, 1)

    def _read_forever(self) -> None:
        due = {sensor.name: 0.0 for sensor in self._sensors}
        ready: set[str] = set()
        while not self._ending.is_set():
            asked = [self._asked.popleft() for _ in range(len(self._asked))]
            now = time.monotonic()
            for sensor in self._sensors:
                if sensor.name in self.failed:
                    due.pop(sensor.name, None)
                elif sensor.name in ready or now >= due[sensor.name] or (asked and sensor.name in PROMPT):
                    if now >= due[sensor.name]:
                        due[sensor.name] = now + sensor.interval_seconds
                    self._read(sensor)
            for done in asked:
                done()
            if ready:
                self._ending.wait(SHORTEST_PAUSE_SECONDS)
            ready = self._wait(min(due.values(), default=now + 60.0) - time.monotonic())

    def _wait(self, seconds: float) -> set[str]:
        """Until the time is over, a sensor has something to say, or somebody asks; returns who has."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        speakers: dict[int, str] = {}
        for sensor in self._sensors:
            descriptor = getattr(sensor, "fileno", _none)()
            if descriptor >= 0 and sensor.name not in self.failed:
                speakers[descriptor] = sensor.name
                poll.register(descriptor, select.POLLIN)
        found = {descriptor for descriptor, _ in poll.poll(1000 * max(0.0, seconds))}
        if self._bell in found:
            os.eventfd_read(self._bell)
        return {speakers[descriptor] for descriptor in found & speakers.keys()}


def _none() -> int:
    return -1
