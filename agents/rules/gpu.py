"""What the GPUs' readings mean. Pure: time comes with the readings; what must be compared is remembered here.

A feature that is absent, a value that cannot be read and a GPU that was never there are no faults. Counters count from the first
reading on: what happened before this agent is history. One hang of NVML is a warning, three in a row are a sick driver.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from agents.rules.base import WARNS, conclude, number
from aimaster.catalogue.findings import normal_gpu
from aimaster.catalogue.xid import APPLICATION_FIRST, XidTable
from aimaster.wire.health import Action, Finding, Reading

POLLS_TO_MISS: Final = 3
HANGS_TO_BLAME: Final = 3
SLOWDOWN_SECONDS: Final = 60.0
SLOWDOWN_BITS: Final = {0x8: "hw_slowdown", 0x40: "hw_thermal", 0x80: "hw_power_brake"}
"""The others (idle, power cap of the software) are everyday."""
RECOVERY: Final[dict[int, tuple[str, Action]]] = {
    1: ("gpu_reset", "replace_node"),
    2: ("node_reboot", "replace_node"),
    3: ("drain_p2p", "replace_node"),
    4: ("drain_and_reset", "replace_node"),
    5: ("recover_imex_domain", "replace_node"),
    6: ("bus_reset", "replace_node"),
    7: ("system_reboot", "replace_node"),
}
HELD_BYTES: Final = 1 << 30
REPLAYS_PER_MINUTE: Final = 8.0
"""What DCGM's health check bears of a PCIe link."""
RATE_SECONDS: Final = 60.0
TEXT_DECIDES: Final = frozenset({94, 95, *range(144, 151)})
"""Xids whose meaning stands in the kernel's line: from NVML alone they are known by their code only."""
DRIVER_GONE: Final = {9: "the driver is not loaded any more", 999: "NVML answers Unknown Error"}


class GpuRules:
    """Judges one node's GPUs, reading by reading."""

    def __init__(self, xids: XidTable) -> None:
        self._xids = xids
        self._most = 0
        """GPUs that were there at best."""
        self._missed = 0
        self._answered = False
        self._first: dict[str, Reading] = {}
        """By UUID: what it was like when first seen."""
        self._best_links: dict[str, float] = {}
        self._best_width: dict[str, float] = {}
        self._slow_since: dict[str, float] = {}
        self._held: dict[str, int] = {}
        self._counted: dict[str, tuple[Reading, Reading]] = {}
        """By UUID: readings a minute and two minutes old at most, to take rates from."""

    def judge(self, readings: Sequence[Reading]) -> list[Finding]:
        """The conditions that hold now. An Xid is no condition: see `xid`."""
        found: list[Finding] = []
        for reading in readings:
            if reading.kind == "gpu.nvml":
                found += self._nvml(reading)
            elif reading.kind == "gpu.hang":
                found += _hang(reading)
            elif reading.kind == "gpu.unopened" and reading.values.get("code") == 15:
                text = f"NVML cannot open GPU {reading.subject.gpu}: {reading.values['error']}"
                found.append(
                    conclude(
                        reading,
                        "nvml.lost",
                        "gpu.lost",
                        text,
                        about=str(reading.subject.gpu),
                        weight=92,
                        severity="critical",
                        gpu=reading.subject.gpu,
                    )
                )
            elif reading.kind == "gpu.device":
                found += self._device(reading)
        return found

    def xid(self, reading: Reading) -> Finding:
        """One Xid that the driver reported through NVML."""
        code = int(number(reading, "xid"))
        meaning = self._xids.read(code, "")
        gpu = normal_gpu(_short(str(reading.values.get("pci") or ""))) or reading.subject.gpu
        weight = 10 if meaning.follower else 62 if code in APPLICATION_FIRST else 60 if code in TEXT_DECIDES else 88
        text = f"NVML reports Xid {code} on GPU {reading.subject.gpu} ({gpu}): {meaning.why or meaning.category}"
        found = conclude(
            reading,
            "nvml.xid",
            meaning.category,
            text,
            about=f"{gpu}:{code}",
            weight=weight,
            severity=meaning.severity,
            gpu=gpu,
            fault_of=meaning.fault_of,
            action=meaning.action,
            event=True,
            xid=code,
            index=reading.subject.gpu,
        )
        return msgspec.structs.replace(found, role="follower") if meaning.follower else found

    def _nvml(self, reading: Reading) -> list[Finding]:
        code = int(number(reading, "code"))
        if reading.state == "ok":
            self._answered = True
            count = int(number(reading, "count"))
            self._most = max(self._most, count)
            self._missed = self._missed + 1 if count < self._most else 0
            if self._missed < POLLS_TO_MISS:
                return []
            text = f"expected {self._most} GPUs, NVML reports {count}"
            return [
                conclude(
                    reading,
                    "nvml.count",
                    "gpu.lost",
                    text,
                    weight=80,
                    severity="critical",
                    expected=self._most,
                    seen=count,
                )
            ]
        if reading.state == "bad":
            text = f"NVML library and driver do not match: {reading.values.get('error')}"
            return [conclude(reading, "nvml.mismatch", "gpu.driver_mismatch", text, weight=85, severity="critical")]
        if self._answered and code in DRIVER_GONE:
            text = f"{DRIVER_GONE[code]}, though it answered before"
            return [
                conclude(reading, "nvml.access", "gpu.access_lost", text, weight=75, severity="critical", code=code)
            ]
        return []

    def _device(self, reading: Reading) -> list[Finding]:
        uuid = str(reading.values.get("uuid"))
        status = reading.values.get("status")
        gpu = normal_gpu(_short(str(reading.values.get("pci") or ""))) or reading.subject.gpu
        name = f"GPU {reading.subject.gpu} ({gpu})"
        if status == "lost":
            return [
                conclude(
                    reading,
                    "nvml.lost",
                    "gpu.lost",
                    f"NVML says that {name} is lost",
                    about=uuid,
                    weight=92,
                    severity="critical",
                    gpu=gpu,
                )
            ]
        if status == "reset_required":
            return [
                conclude(
                    reading,
                    "nvml.reset",
                    "gpu.firmware",
                    f"NVML says that {name} requires a reset",
                    about=uuid,
                    weight=75,
                    severity="critical",
                    gpu=gpu,
                )
            ]
        first = self._first.setdefault(uuid, reading)
        found = _memory_faults(reading, first, uuid, gpu, name)
        found += self._slowdown(reading, uuid, gpu, name)
        found += self._links(reading, uuid, gpu, name)
        found += self._link_errors(reading, uuid, gpu, name)
        action = int(number(reading, "recovery_action"))
        if action in RECOVERY:
            word, remedy = RECOVERY[action]
            text = f"the driver asks for {word} of {name}"
            found.append(
                conclude(
                    reading,
                    "nvml.recovery",
                    "gpu.firmware",
                    text,
                    about=uuid,
                    weight=75,
                    severity="critical",
                    gpu=gpu,
                    action=remedy,
                    asks=word,
                )
            )
        return found

    def _slowdown(self, reading: Reading, uuid: str, gpu: str | None, name: str) -> list[Finding]:
        bits = int(number(reading, "throttle_bits"))
        words = [word for bit, word in SLOWDOWN_BITS.items() if bits & bit]
        if not words:
            self._slow_since.pop(uuid, None)
            return []
        since = self._slow_since.setdefault(uuid, reading.time_seconds)
        lasted = reading.time_seconds - since
        if lasted < SLOWDOWN_SECONDS:
            return []
        text = f"{name} is slowed down by its hardware ({', '.join(words)}) for {lasted:.0f} s"
        return [
            conclude(
                reading,
                "nvml.slowdown",
                "gpu.slowdown",
                text,
                about=uuid,
                weight=WARNS,
                severity="warning",
                gpu=gpu,
                reasons=" ".join(words),
            )
        ]

    def _links(self, reading: Reading, uuid: str, gpu: str | None, name: str) -> list[Finding]:
        found = []
        up, width = number(reading, "nvlink_up"), number(reading, "pcie_width")
        best = self._best_links[uuid] = max(self._best_links.get(uuid, 0.0), up)
        if "nvlink_up" in reading.values and up < best:
            text = f"{best - up:.0f} of {best:.0f} NVLinks of {name} went down"
            found.append(
                conclude(
                    reading,
                    "nvml.nvlink",
                    "gpu.nvlink",
                    text,
                    about=uuid,
                    weight=60,
                    gpu=gpu,
                    up=int(up),
                    before=int(best),
                )
            )
        best = self._best_width[uuid] = max(self._best_width.get(uuid, 0.0), width)
        if 0 < width < best:
            text = f"the PCIe link of {name} fell from x{best:.0f} to x{width:.0f}"
            found.append(
                conclude(
                    reading,
                    "nvml.pcie",
                    "gpu.pcie",
                    text,
                    about=uuid,
                    weight=55,
                    gpu=gpu,
                    width=int(width),
                    before=int(best),
                )
            )
        return found

    def _link_errors(self, reading: Reading, uuid: str, gpu: str | None, name: str) -> list[Finding]:
        """Packets sent again over PCIe, by the minute; NVLinks that had to be trained anew, each."""
        older, newer = self._counted.setdefault(uuid, (reading, reading))
        if reading.time_seconds - newer.time_seconds >= RATE_SECONDS:
            older, newer = self._counted[uuid] = newer, reading
        seconds = reading.time_seconds - older.time_seconds
        found = []
        replays = number(reading, "pcie_replays") - number(older, "pcie_replays")
        if seconds >= RATE_SECONDS and replays * 60 / seconds > REPLAYS_PER_MINUTE:
            text = f"{replays:.0f} PCIe replays of {name} in {seconds:.0f} s"
            found.append(
                conclude(
                    reading, "nvml.pcie_replays", "gpu.pcie", text, about=uuid, weight=WARNS, severity="warning", gpu=gpu,
                    count=int(replays),
                )
            )  # fmt: skip
        recoveries = number(reading, "nvlink_recovery_errors") - number(self._first[uuid], "nvlink_recovery_errors")
        if recoveries > 0:
            text = f"NVLinks of {name} were trained anew {recoveries:.0f} times"
            found.append(
                conclude(
                    reading, "nvml.nvlink_errors", "gpu.nvlink", text, about=uuid, weight=WARNS, severity="warning", gpu=gpu,
                    count=int(recoveries),
                )
            )  # fmt: skip
        return found

    def held(self, readings: Sequence[Reading], job: frozenset[int], alive: frozenset[int]) -> list[Finding]:
        """Memory that nobody of the job holds, in two readings. `alive`: the pids named by NVML that exist here; others may be the
        host's names for processes of ours, so nothing is concluded from them.
        """
        found = []
        for reading in readings:
            if reading.kind != "gpu.device" or "pids" not in reading.values:
                continue
            uuid = str(reading.values["uuid"])
            pids = frozenset(map(int, str(reading.values["pids"]).split()))
            foreign = number(reading, "memory_used_bytes") > HELD_BYTES and not pids & job and pids <= alive
            self._held[uuid] = self._held.get(uuid, 0) + 1 if foreign else 0
            if self._held[uuid] < 2:
                continue
            used = int(number(reading, "memory_used_bytes"))
            by = f"by process {min(pids)}" if pids else "by no process that is left"
            text = f"{used >> 20} MiB of GPU {reading.subject.gpu} are held {by}, none of this job's"
            found.append(
                conclude(
                    reading,
                    "nvml.memory_held",
                    "gpu.memory_held",
                    text,
                    about=uuid,
                    weight=WARNS,
                    severity="warning",
                    gpu=normal_gpu(_short(str(reading.values.get("pci") or ""))),
                    pid=min(pids, default=None),
                    used_bytes=used,
                )
            )
        return found


def _memory_faults(reading: Reading, first: Reading, uuid: str, gpu: str | None, name: str) -> list[Finding]:
    found = []
    more = number(reading, "ecc_uncorrected_volatile") - number(first, "ecc_uncorrected_volatile")
    if more > 0:
        text = f"{more:.0f} new uncorrected ECC errors on {name}"
        found.append(
            conclude(
                reading,
                "nvml.ecc",
                "gpu.ecc",
                text,
                about=uuid,
                weight=55,
                severity="critical",
                gpu=gpu,
                count=int(more),
            )
        )
    if reading.values.get("remap_failure"):
        text = f"{name} has no spare rows left: remapping failed"
        found.append(
            conclude(
                reading,
                "nvml.remap_failure",
                "gpu.row_remap_failure",
                text,
                about=uuid,
                weight=85,
                severity="critical",
                gpu=gpu,
            )
        )
    elif reading.values.get("remap_pending") or reading.values.get("retired_pending"):
        text = f"{name} waits for a reset to take bad memory out of use"
        found.append(
            conclude(
                reading,
                "nvml.remap_pending",
                "gpu.row_remap_pending",
                text,
                about=uuid,
                weight=30,
                severity="warning",
                gpu=gpu,
            )
        )
    return found


def _hang(reading: Reading) -> list[Finding]:
    often = int(number(reading, "in_a_row"))
    text = (
        f"NVML call {reading.values['call']} did not return within {number(reading, 'seconds'):.0f} s, {often} in a row"
    )
    blamed = often >= HANGS_TO_BLAME
    return [
        conclude(
            reading,
            "nvml.hang",
            "gpu.firmware",
            text,
            about="again" if blamed else "",
            weight=70 if blamed else WARNS,
            severity="critical" if blamed else "warning",
            call=reading.values["call"],
        )
    ]


def _short(pci: str) -> str:
    """NVML writes the domain with eight digits."""
    return pci[4:] if len(pci) > 4 and pci.startswith("0000") and pci[8:9] == ":" else pci
