"""GPUs through NVML, asked by a helper process with a time limit on each call: a call that hangs is a reading too.

gpu.nvml      whether NVML answers, how many GPUs it counts       gpu.device   one GPU: values, and what is missing here and why
gpu.xid       the driver reported an Xid just now (no privilege)  gpu.hang     a call that did not return in time
gpu.unopened  a GPU that the driver counts and does not open

A machine without the driver's library is "not supported here", which is an answer.
"""

from __future__ import annotations

import _ctypes
import os
import time
from typing import Any, Final

from agents.sensors import child
from aimaster.wire.health import Reading, ReadingState, Scalar, Subject

LIBRARY: Final = "libnvidia-ml.so.1"
PROGRAM: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nvml_child.py")
MISMATCH: Final = 18
MOST_EVENTS: Final = 200
"""Xids of one reading; a flood beyond is counted by the driver and the kernel log."""


class GpuSensor:
    """The newest picture of all GPUs, and the events since the last reading."""

    name = "gpu"

    def __init__(self, node: str, *, interval_seconds: float = 5.0, limit_seconds: float = 10.0) -> None:
        self.interval_seconds = 1.0
        """Looked at each second for a call that hangs; the helper asks the GPUs at its own pace and wakes us at an event."""
        self._node = node
        self._child = child.Child(
            lambda slot: child.isolated_python(PROGRAM, str(slot), str(interval_seconds)), limit_seconds=limit_seconds
        )
        self._state: list[Reading] = []

    @property
    def pids(self) -> list[int]:
        """The helper, for who measures what watching costs."""
        return [] if self._child.pid is None else [self._child.pid]

    def supported(self) -> str:
        try:
            handle = _ctypes.dlopen(LIBRARY, os.RTLD_LAZY)
        except OSError:
            return f"no NVIDIA driver library ({LIBRARY}) on this machine"
        _ctypes.dlclose(handle)
        return ""

    def fileno(self) -> int:
        return self._child.fileno()

    def read(self, now: float) -> list[Reading]:
        self._child.ensure()
        events: list[Reading] = []
        for message in self._child.messages():
            self._take(message, events)
        hang = self._child.check()
        if hang is not None:
            self._state = [
                self._reading(
                    now,
                    "gpu.hang",
                    {"call": hang.call, "seconds": round(hang.seconds, 3), "in_a_row": self._child.hangs},
                    state="bad",
                )
            ]
        return self._state + events[:MOST_EVENTS]

    def read_fresh(self, now: float, seconds: float = 15.0) -> list[Reading]:
        """One whole picture, waited for; for a look that is made once."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = self.read(now)
            if found:
                return found
            time.sleep(0.02)
        return [self._reading(now, "gpu.nvml", {"error": "NVML gave no answer in time"}, state="unreadable")]

    def close(self) -> None:
        self._child.close()

    def _reading(
        self, at: float, kind: str, values: dict[str, Scalar], *, gpu: int | None = None, state: ReadingState = "ok"
    ) -> Reading:
        subject = Subject(node=self._node, gpu=None if gpu is None else str(gpu))
        return Reading(
            sensor=self.name, kind=kind, node=self._node, time_seconds=at, state=state, subject=subject, values=values
        )

    def _take(self, message: dict[str, Any], events: list[Reading]) -> None:
        at = float(message["at"])
        match message["kind"]:
            case "poll":
                self._child.well()
                self._state = self._picture(at, message)
            case "xid":
                values = {name: message[name] for name in ("xid", "pci", "uuid")}
                events.append(self._reading(at, "gpu.xid", values, gpu=message["gpu"]))
            case "error":
                values = {"code": message["code"], "error": message["text"]}
                state: ReadingState = "bad" if message["code"] == MISMATCH else "unreadable"
                self._state = [self._reading(at, "gpu.nvml", values, state=state)]

    def _picture(self, at: float, message: dict[str, Any]) -> list[Reading]:
        gpus = message["gpus"]
        head = {"count": message["count"], "driver": message["driver"], "events": message["events"]}
        readings = [self._reading(at, "gpu.nvml", head)]
        for one in gpus:
            values: dict[str, Scalar] = {"uuid": one["uuid"], "pci": one["pci"], "status": one["state"]}
            values |= {name: value for name, value in one["values"].items() if not isinstance(value, list)}
            held = one["values"].get("processes")
            if held is not None:
                values["pids"] = " ".join(str(pid) for pid, _ in held)
                values["process_bytes"] = sum(size for _, size in held)
            values |= {f"missing_{name}": why for name, why in one["missing"].items()}
            readings.append(
                self._reading(at, "gpu.device", values, gpu=one["gpu"], state="bad" if one["state"] else "ok")
            )
        for index, code, text in message["closed"]:
            values = {"code": code, "error": text}
            readings.append(self._reading(at, "gpu.unopened", values, gpu=index, state="unreadable"))
        return readings
