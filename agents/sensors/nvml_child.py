"""The program that talks to NVML, apart from the agent because NVML may hang for minutes. Standard library and pynvml only.

Run as `python -I nvml_child.py SLOT INTERVAL [once]`. Before each call its name goes into the slot (see child.py). It writes one JSON
object a line: {"kind": "poll", ...} at each interval, {"kind": "xid", ...} the moment the driver reports one, {"kind": "error", ...}
when NVML cannot be used. A value that is missing here is "unsupported" (by the hardware) or "unreadable", never zero.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import pynvml as nvml

SLOT = struct.Struct("<d48s")
SLOW_EVERY = 6
"""Each so-many-th poll asks for what takes many calls (NVLink)."""
WAIT_MILLISECONDS = 1000
UNSUPPORTED = (3, 13)
"""NOT_SUPPORTED, FUNCTION_NOT_FOUND."""
LOST = 15
RESET_REQUIRED = 16
DEAD = (1, 9, 18)
"""UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH: nothing works any more."""
RECOVERY_ACTION = 230
MOST_LINKS = 18
LINK_ERRORS = {0: "replay", 1: "recovery", 2: "crc_flit", 3: "crc_data"}
EVENT_XID = 0x8


class Ended(Exception):  # noqa: N818 - an end, not an error of ours
    """NVML cannot be used any more; carries the code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"NVML error {code}")
        self.code = code


class Driver:
    """NVML, each call of it under the parent's eyes: `driver.nvmlDeviceGetCount()`."""

    def __init__(self, descriptor: int) -> None:
        self.gpu = -1
        """Whom the next calls are about."""
        self._slot = mmap.mmap(descriptor, 4096)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(nvml, name)

        def call(*words: Any) -> Any:
            SLOT.pack_into(self._slot, 0, time.monotonic(), f"{name}({self.gpu})".encode()[:48])
            try:
                return function(*words)
            finally:
                SLOT.pack_into(self._slot, 0, 0.0, b"")

        setattr(self, name, call)
        return call


def memory(ask: Driver, h: Any) -> dict[str, Any]:
    found = ask.nvmlDeviceGetMemoryInfo(h)
    return {"memory_total_bytes": int(found.total), "memory_used_bytes": int(found.used)}


def utilization(ask: Driver, h: Any) -> dict[str, Any]:
    return {"utilization_ratio": ask.nvmlDeviceGetUtilizationRates(h).gpu / 100}


def temperature(ask: Driver, h: Any) -> dict[str, Any]:
    return {"temperature_celsius": int(ask.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU))}


def power(ask: Driver, h: Any) -> dict[str, Any]:
    return {"power_watts": ask.nvmlDeviceGetPowerUsage(h) / 1000}


def clock(ask: Driver, h: Any) -> dict[str, Any]:
    return {"sm_clock_hertz": ask.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM) * 1_000_000}


def throttle(ask: Driver, h: Any) -> dict[str, Any]:
    return {"throttle_bits": int(ask.nvmlDeviceGetCurrentClocksEventReasons(h))}


def ecc(ask: Driver, h: Any) -> dict[str, Any]:
    return {
        f"ecc_{word}_{scope}": int(ask.nvmlDeviceGetTotalEccErrors(h, kind, counter))
        for kind, word in ((0, "corrected"), (1, "uncorrected"))
        for counter, scope in ((0, "volatile"), (1, "aggregate"))
    }


def remapped(ask: Driver, h: Any) -> dict[str, Any]:
    corrected, uncorrected, pending, failure = ask.nvmlDeviceGetRemappedRows(h)
    return {
        "remapped_corrected": int(corrected),
        "remapped_uncorrected": int(uncorrected),
        "remap_pending": bool(pending),
        "remap_failure": bool(failure),
    }


def retired(ask: Driver, h: Any) -> dict[str, Any]:
    pages = [len(ask.nvmlDeviceGetRetiredPages(h, cause)) for cause in (0, 1)]
    return {"retired_pages": sum(pages), "retired_pending": bool(ask.nvmlDeviceGetRetiredPagesPendingStatus(h))}


def pcie(ask: Driver, h: Any) -> dict[str, Any]:
    return {
        "pcie_replays": int(ask.nvmlDeviceGetPcieReplayCounter(h)),
        "pcie_width": int(ask.nvmlDeviceGetCurrPcieLinkWidth(h)),
        "pcie_width_most": int(ask.nvmlDeviceGetMaxPcieLinkWidth(h)),
        "pcie_generation": int(ask.nvmlDeviceGetCurrPcieLinkGeneration(h)),
    }


def recovery(ask: Driver, h: Any) -> dict[str, Any]:
    field = ask.nvmlDeviceGetFieldValues(h, [RECOVERY_ACTION])[0]
    if field.nvmlReturn:
        raise nvml.NVMLError(field.nvmlReturn)
    return {"recovery_action": int(field.value.uiVal)}


def processes(ask: Driver, h: Any) -> dict[str, Any]:
    found = ask.nvmlDeviceGetComputeRunningProcesses(h)
    return {"processes": [[int(one.pid), int(one.usedGpuMemory or 0)] for one in found[:256]]}


def links(ask: Driver, h: Any) -> dict[str, Any]:
    """NVLink: links that are up, and errors of all links by kind. The first link that does not exist ends the count."""
    up = down = 0
    errors = dict.fromkeys(LINK_ERRORS.values(), 0)
    for link in range(MOST_LINKS):
        try:
            active = ask.nvmlDeviceGetNvLinkState(h, link)
        except nvml.NVMLError as error:
            if link == 0:
                raise
            if error.value == LOST:
                raise
            break
        up, down = (up + 1, down) if active else (up, down + 1)
        for counter, word in LINK_ERRORS.items():
            try:
                errors[word] += int(ask.nvmlDeviceGetNvLinkErrorCounter(h, link, counter))
            except nvml.NVMLError as error:
                if error.value == LOST:
                    raise
    return {"nvlink_up": up, "nvlink_down": down} | {f"nvlink_{word}_errors": count for word, count in errors.items()}


QUESTIONS = {
    one.__name__: one
    for one in (
        memory, utilization, temperature, power, clock, throttle, ecc, remapped, retired, pcie, recovery, processes, links,
    )
}  # fmt: skip


class Gpu:
    """One GPU, opened once; known by UUID and PCI address, since an index may come to mean another."""

    def __init__(self, ask: Driver, index: int) -> None:
        ask.gpu = self.index = index
        self.handle = ask.nvmlDeviceGetHandleByIndex(index)
        self.uuid = str(ask.nvmlDeviceGetUUID(self.handle))
        self.pci = ""
        try:
            self.pci = str(ask.nvmlDeviceGetPciInfo(self.handle).busId)
        except nvml.NVMLError as error:
            if error.value not in UNSUPPORTED:
                raise
        self.missing: dict[str, str] = {}
        self.slow: dict[str, Any] = {}

    def read(self, ask: Driver, number: int) -> dict[str, Any]:
        """All that can be read of it; raises Ended when NVML is gone."""
        values: dict[str, Any] = {}
        state = ""
        ask.gpu = self.index
        for name, question in QUESTIONS.items():
            if self.missing.get(name) == "unsupported":
                continue
            if name == "links" and number % SLOW_EVERY:
                values |= self.slow
                continue
            try:
                found = question(ask, self.handle)
            except nvml.NVMLError as error:
                if error.value in DEAD:
                    raise Ended(error.value) from error
                if error.value in (LOST, RESET_REQUIRED):
                    state = "lost" if error.value == LOST else "reset_required"
                    break
                self.missing[name] = "unsupported" if error.value in UNSUPPORTED else f"unreadable: {error}"
                continue
            self.missing.pop(name, None)
            values |= found
            if name == "links":
                self.slow = found
        return {
            "gpu": self.index, "uuid": self.uuid, "pci": self.pci, "state": state, "values": values, "missing": self.missing,
        }  # fmt: skip


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps({"at": time.time(), **fields}) + "\n")
    sys.stdout.flush()


def register_events(ask: Driver, gpus: list[Gpu]) -> Any | None:
    """The set that wakes at an Xid; None where the driver has none."""
    try:
        events = ask.nvmlEventSetCreate()
        for gpu in gpus:
            ask.gpu = gpu.index
            ask.nvmlDeviceRegisterEvents(gpu.handle, EVENT_XID, events)
    except nvml.NVMLError:
        return None
    return events


def wait(ask: Driver, events: Any | None, gpus: list[Gpu], milliseconds: int) -> None:
    """Until an Xid comes, which is said at once, or the time is over."""
    if events is None:
        time.sleep(milliseconds / 1000)
        return
    ask.gpu = -1
    try:
        event = ask.nvmlEventSetWait_v2(events, milliseconds)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_TIMEOUT:
            time.sleep(milliseconds / 1000)  # a set that fails at once must not make a busy loop
        return
    if event.eventType & EVENT_XID:
        address = ctypes.cast(event.device, ctypes.c_void_p).value
        found = [one for one in gpus if ctypes.cast(one.handle, ctypes.c_void_p).value == address]
        index, pci, uuid = (found[0].index, found[0].pci, found[0].uuid) if found else (-1, "", "")
        say(kind="xid", xid=int(event.eventData), gpu=index, pci=pci, uuid=uuid)


class Gpus:
    """All GPUs; one that cannot be opened is tried again now and then."""

    def __init__(self, ask: Driver) -> None:
        self.opened: dict[int, Gpu] = {}
        self.closed: dict[int, tuple[int, str]] = {}
        """By index: code and words of the error."""
        self._ask = ask

    def open(self, count: int) -> None:
        """Open those that are not; raises Ended when NVML is gone."""
        for index in sorted(set(range(count)) - set(self.opened)):
            try:
                self.opened[index] = Gpu(self._ask, index)
            except nvml.NVMLError as error:
                if error.value in DEAD:
                    raise Ended(error.value) from error
                self.closed[index] = (int(error.value), str(error))
            else:
                self.closed.pop(index, None)


def run(ask: Driver, interval_seconds: float, *, once: bool) -> None:
    ask.nvmlInit()
    driver = str(ask.nvmlSystemGetDriverVersion())
    gpus = Gpus(ask)
    gpus.open(ask.nvmlDeviceGetCount())
    events = None if once else register_events(ask, list(gpus.opened.values()))
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # what importing has left free
    parent = os.getppid()
    number = 0
    due = 0.0
    while os.getppid() == parent:
        if time.monotonic() >= due:
            due = time.monotonic() + interval_seconds
            ask.gpu = -1
            count = ask.nvmlDeviceGetCount()
            if gpus.closed and number % SLOW_EVERY == 0:
                gpus.open(count)
            seen = [gpu.read(ask, number) for gpu in gpus.opened.values()]
            closed = [[index, *why] for index, why in gpus.closed.items()]
            say(kind="poll", driver=driver, count=count, events=events is not None, gpus=seen, closed=closed)
            number += 1
        if once:
            return
        pause = max(0.01, min(due - time.monotonic(), WAIT_MILLISECONDS / 1000))
        wait(ask, events, list(gpus.opened.values()), int(1000 * pause))


def main() -> int:
    try:
        run(Driver(int(sys.argv[1])), float(sys.argv[2]), once=sys.argv[3:] == ["once"])
    except nvml.NVMLError as error:
        say(kind="error", code=int(error.value), text=str(error))
        return 1
    except Ended as end:
        say(kind="error", code=end.code, text=str(nvml.NVMLError(end.code)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
