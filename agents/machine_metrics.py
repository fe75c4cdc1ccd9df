"""The machine's part of /metrics, made of the newest readings when it is asked: GPUs, network ports, groups, mounts, clock, and the
sensors themselves. Values that could not be read are left out, never zero; labels are of closed sets.

With 8 GPUs this is about 400 series: ports and folders are bounded by their sensors, Xids by the table (others count as `other`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from agents.rules.base import number
from agents.rules.gpu import SLOWDOWN_BITS
from agents.sensors.fabric import COUNTERS, HARDWARE_COUNTERS
from aimaster.wire.health import Reading

Values = Iterable[tuple[tuple[str, ...], float]]

GPU_GAUGES: Final = {
    "temperature_celsius": ("aimaster_node_gpu_temperature_celsius", "Temperature."),
    "power_watts": ("aimaster_node_gpu_power_watts", "Power drawn."),
    "sm_clock_hertz": ("aimaster_node_gpu_sm_clock_hertz", "Clock of the multiprocessors."),
    "memory_used_bytes": ("aimaster_node_gpu_memory_used_bytes", "Memory in use."),
    "memory_total_bytes": ("aimaster_node_gpu_memory_total_bytes", "Memory there is."),
    "utilization_ratio": ("aimaster_node_gpu_utilization_ratio", "Share of time in which a kernel ran."),
    "recovery_action": ("aimaster_node_gpu_recovery_action", "What the driver asks for; 0: nothing."),
    "retired_pages": ("aimaster_node_gpu_retired_pages", "Memory pages taken out of use."),
    "nvlink_up": ("aimaster_node_nvlink_up", "NVLinks that are up."),
    "pcie_width": ("aimaster_node_pcie_width", "Lanes of the PCIe link."),
}
GPU_COUNTERS: Final = {
    "pcie_replays": ("aimaster_node_pcie_replays", "Packets sent again over PCIe."),
    "nvlink_replay_errors": ("aimaster_node_nvlink_replays", "Packets sent again over NVLink."),
    "nvlink_recovery_errors": ("aimaster_node_nvlink_recoveries", "Times an NVLink was trained anew."),
    "nvlink_crc_flit_errors": ("aimaster_node_nvlink_flit_errors", "Checksum errors of flits."),
    "nvlink_crc_data_errors": ("aimaster_node_nvlink_data_errors", "Checksum errors of data."),
}
_LISTED_XIDS: Final = 200
"""Codes of the driver lie below; any other is counted as `other`."""


def gpus(readings: Sequence[Reading], xids: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    """All of NVML."""
    head = next((one for one in readings if one.kind == "gpu.nvml"), None)
    if head is not None:
        yield gauge("aimaster_node_gpus", "GPUs that the driver counts.", (), [((), number(head, "count"))])
    devices = [one for one in readings if one.kind == "gpu.device"]
    closed = [one for one in readings if one.kind == "gpu.unopened"]
    if not devices and not closed:
        return
    yield gauge(
        "aimaster_node_gpu_info",
        "Names of a GPU; always 1.",
        ("gpu", "uuid", "pci_bus_id"),
        [((_gpu(one), str(one.values["uuid"]), str(one.values["pci"])), 1.0) for one in devices],
    )
    yield gauge(
        "aimaster_node_gpu_up",
        "1 while it answers.",
        ("gpu",),
        [((_gpu(one),), float(one.state == "ok")) for one in devices + closed],
    )
    for field, (name, text) in GPU_GAUGES.items():
        yield gauge(name, text, ("gpu",), _of(devices, field))
    for field, (name, text) in GPU_COUNTERS.items():
        yield counter(name, text, ("gpu",), _of(devices, field))
    yield from _troubles(devices)
    counted: Counter[tuple[str, str]] = Counter()
    for (gpu, code), count in xids.items():
        counted[gpu, code if int(code) < _LISTED_XIDS else "other"] += count
    yield counter("aimaster_node_gpu_xid", "Xids that the driver reported.", ("gpu", "xid"), counted.items())


def _troubles(devices: Sequence[Reading]) -> Iterator[Metric]:
    """Slowdowns, memory errors and what was done about them."""
    yield gauge(
        "aimaster_node_gpu_clocks_event_active",
        "1 while the hardware slows it down.",
        ("gpu", "state"),
        [
            ((_gpu(one), word), float(bool(int(number(one, "throttle_bits")) & bit)))
            for one in devices
            if "throttle_bits" in one.values
            for bit, word in SLOWDOWN_BITS.items()
        ],
    )
    yield counter(
        "aimaster_node_gpu_ecc_errors",
        "ECC errors.",
        ("gpu", "severity", "state"),
        [
            ((_gpu(one), severity, scope), number(one, f"ecc_{severity}_{scope}"))
            for one in devices
            for severity in ("corrected", "uncorrected")
            for scope in ("volatile", "aggregate")
            if f"ecc_{severity}_{scope}" in one.values
        ],
    )
    yield gauge(
        "aimaster_node_gpu_remapped_rows",
        "Rows remapped, and 1 where one is pending or failed.",
        ("gpu", "state"),
        [
            ((_gpu(one), state), number(one, field))
            for one in devices
            for state, field in (
                ("corrected", "remapped_corrected"),
                ("uncorrected", "remapped_uncorrected"),
                ("pending", "remap_pending"),
                ("failure", "remap_failure"),
            )
            if field in one.values
        ],
    )


def ports(readings: Sequence[Reading]) -> Iterator[Metric]:
    """InfiniBand, RoCE and network cards."""
    found = [one for one in readings if one.kind == "fabric.port" and one.state == "ok"]
    labels = ("device", "port")
    if found:
        names = [(str(one.values["device"]), str(one.values["port"])) for one in found]
        up = [(name, float(one.values["link"] == "ACTIVE")) for name, one in zip(names, found, strict=True)]
        yield gauge("aimaster_node_ib_port_up", "1 while the port is active.", labels, up)
        for field in ("rate_bits_per_second",):
            yield gauge(
                f"aimaster_node_ib_port_{field}",
                "Rate of the link.",
                labels,
                [(name, number(one, field)) for name, one in zip(names, found, strict=True) if field in one.values],
            )
        for field in COUNTERS + HARDWARE_COUNTERS:
            yield counter(
                f"aimaster_node_ib_{field}",
                "As the port counts it.",
                labels,
                [(name, number(one, field)) for name, one in zip(names, found, strict=True) if field in one.values],
            )
    cards = [one for one in readings if one.kind == "fabric.nic"]
    yield gauge(
        "aimaster_node_nic_up",
        "1 while the card has a link.",
        ("device",),
        [((str(one.values["device"]),), float(one.values["link"] in ("up", "unknown"))) for one in cards],
    )
    yield counter(
        "aimaster_node_nic_carrier_changes",
        "Times a card's carrier came or went.",
        ("device",),
        [
            ((str(one.values["device"]),), number(one, "carrier_changes"))
            for one in cards
            if "carrier_changes" in one.values
        ],
    )


def host(readings: Sequence[Reading]) -> Iterator[Metric]:
    """Kernel, groups, processes, folders, clock."""
    zombies = blocked = processes = 0.0
    groups: Counter[str] = Counter()
    read_only: dict[tuple[str, ...], float] = {}
    for one in readings:
        match one.kind:
            case "process.usage":
                zombies += number(one, "zombies")
                blocked += number(one, "blocked")
                processes += number(one, "processes")
            case "cgroup.memory":
                groups["kills"] += int(number(one, "oom_kills"))
            case "host.oom":
                yield counter(
                    "aimaster_node_host_oom_kills",
                    "Processes that the kernel killed for memory since boot.",
                    (),
                    [((), number(one, "kills"))],
                )
            case "host.clock":
                yield gauge(
                    "aimaster_node_clock_offset_seconds",
                    "This clock less the master's.",
                    (),
                    [((), number(one, "offset_seconds"))],
                )
            case "kernel.source":
                yield counter(
                    "aimaster_node_kernel_lines",
                    "Lines of the kernel's log that were read.",
                    ("source",),
                    [((str(one.values["source"]),), number(one, "lines"))],
                )
                yield counter(
                    "aimaster_node_kernel_gaps", "Times its buffer went round unread.", (), [((), number(one, "lost"))]
                )
            case "host.mount":
                read_only[str(one.values["device"]),] = float(bool(one.values["read_only"]))
    yield counter(
        "aimaster_node_oom_kills", "Kills in the members' control groups.", (), [((), float(groups["kills"]))]
    )
    yield gauge("aimaster_node_zombie_processes", "Of the members.", (), [((), zombies)])
    yield gauge("aimaster_node_blocked_processes", "Members' processes in state D.", (), [((), blocked)])
    yield gauge("aimaster_node_processes", "Processes of the members.", (), [((), processes)])
    yield gauge("aimaster_node_disk_read_only", "1 for a disk that cannot be written.", ("device",), read_only.items())


def limits(readings: Sequence[Reading]) -> Iterator[Metric]:
    """How near the members are to what they may have: the fullest group or member counts."""
    for kind, have, limit, name, text in (
        (
            "cgroup.memory",
            "used_bytes",
            "limit_bytes",
            "aimaster_node_memory_limit_used_ratio",
            "Memory against the limit.",
        ),
        ("cgroup.pids", "pids", "limit", "aimaster_node_pids_used_ratio", "Processes against the limit."),
        ("process.usage", "files", "files_limit", "aimaster_node_files_used_ratio", "Open files against the limit."),
        (
            "cgroup.memory",
            "pressure_ratio",
            "",
            "aimaster_node_memory_stall_ratio",
            "Share of 10 s in which memory was waited for.",
        ),
    ):
        ratios = [
            number(one, have) / (number(one, limit, 1.0) or 1.0)
            for one in readings
            if one.kind == kind and have in one.values and (not limit or limit in one.values)
        ]
        if ratios:
            yield gauge(name, text, (), [((), max(ratios))])


def sensors(
    readings: Sequence[Reading], active: Iterable[str], unsupported: Iterable[str], seconds: Mapping[str, float]
) -> Iterator[Metric]:
    """What the eyes themselves are like."""
    names = dict.fromkeys(active, 1.0) | dict.fromkeys(unsupported, 0.0)
    yield gauge(
        "aimaster_node_sensor_up",
        "1 for a sensor that can read here.",
        ("sensor",),
        [((name,), value) for name, value in names.items()],
    )
    yield counter(
        "aimaster_node_sensor_cpu_seconds",
        "Processor time of each sensor.",
        ("sensor",),
        [((name,), value) for name, value in seconds.items()],
    )
    states: Counter[tuple[str, ...]] = Counter((one.sensor, one.state) for one in readings)
    yield gauge("aimaster_node_readings", "Newest readings by state.", ("sensor", "state"), states.items())
    source = next((str(one.values["source"]) for one in readings if one.kind == "kernel.source"), "none")
    known = ("kmsg", "file", "journal", "none")
    yield gauge(
        "aimaster_node_source_active",
        "1 for the source of kernel lines that is read.",
        ("source",),
        [((name,), float(name == source)) for name in known],
    )


def gauge(name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
    """A family of gauges."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in sorted(values):
        family.add_metric(key, value)
    return family


def counter(name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
    """A family of counters; `_total` is added to the name."""
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in sorted(values):
        family.add_metric(key, value)
    return family


def _gpu(reading: Reading) -> str:
    return reading.subject.gpu or ""


def _of(devices: Sequence[Reading], field: str) -> Values:
    return [((_gpu(one),), number(one, field)) for one in devices if field in one.values]
