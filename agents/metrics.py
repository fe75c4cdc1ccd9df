"""What /metrics says of this node: one collector that reads the state when it is asked, in a registry of its own."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from agents import machine_metrics
from agents.machine_metrics import counter as _counter
from agents.machine_metrics import gauge as _gauge
from aimaster.wire.checkpoint import SnapshotPlace
from aimaster.wire.health import Reading
from aimaster.wire.messages import MemberPicture

V = TypeVar("V")


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the snapshots in this node's memory."""

    places: tuple[SnapshotPlace, ...]
    flushes: dict[str, int]
    """By outcome."""
    flush_seconds: float
    """Of the last one."""
    scrubbed_bytes: int
    """Read again, so far."""
    damaged: dict[str, int]
    """Segments that were found damaged, by tier."""


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """All that the metrics are made of, at one moment."""

    node: str
    connected: bool
    connections: int
    members: tuple[MemberPicture, ...]
    deaths: dict[tuple[str, bool], int]
    """By role, and whether they were expected."""
    suspected: dict[str, int]
    outbox_waiting: int
    outbox_refused: int
    orders_refused: int
    log_bytes: int
    kept: Kept
    copies: dict[str, int]
    readings: tuple[Reading, ...]
    unsupported: dict[str, str]
    active: tuple[str, ...]
    sensor_seconds: dict[str, float]
    found: dict[tuple[str, str], int]
    """Findings of the machine, by category and severity."""
    xids: dict[tuple[str, str], int]
    """By GPU and code."""
    log_events: dict[tuple[str, str], int]
    """Statements of signs in the members' logs, by category and role."""


_HOST_GAUGES = {
    ("host.memory", "available_bytes"): "aimaster_node_memory_available_bytes",
    ("host.memory", "total_bytes"): "aimaster_node_memory_total_bytes",
    ("host.load", "load_1m"): "aimaster_node_load1",
}
_ROOM_GAUGES = {"free_bytes": "aimaster_node_folder_free_bytes", "free_inodes": "aimaster_node_folder_free_inodes"}


class _Collector:
    def __init__(self, state: Callable[[], NodeState]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        yield from _members(state)
        yield from _flow(state)
        yield from _snapshots(state)
        yield from _host(state)
        yield from machine_metrics.gpus(state.readings, state.xids)
        yield from machine_metrics.ports(state.readings)
        yield from machine_metrics.host(state.readings)
        yield from machine_metrics.limits(state.readings)
        yield from machine_metrics.sensors(state.readings, state.active, state.unsupported, state.sensor_seconds)
        yield _counter("aimaster_node_findings", "Findings told.", ("category", "severity"), state.found.items())
        yield _counter("aimaster_node_log_events", "Signs in logs.", ("category", "role"), state.log_events.items())

    def describe(self) -> Iterable[Metric]:
        return []


def registry(state: Callable[[], NodeState]) -> CollectorRegistry:
    """A registry that holds the collector alone."""
    made = CollectorRegistry(auto_describe=False)
    made.register(_Collector(state))
    return made


def _members(state: NodeState) -> Iterator[Metric]:
    counts = Counter((picture.role, "running" if picture.alive else "ended") for picture in state.members)
    cpu: Counter[str] = Counter()
    resident: Counter[str] = Counter()
    oldest: dict[str, float] = {}
    for picture in state.members:
        if picture.alive:
            cpu[picture.role] += picture.cpu_seconds  # type: ignore[assignment]  # a Counter adds floats as well
            resident[picture.role] += picture.resident_bytes
            oldest[picture.role] = max(oldest.get(picture.role, 0.0), picture.progress.age_seconds)
    yield _gauge("aimaster_node_members", "Members of this node.", ("role", "state"), counts.items())
    yield _gauge("aimaster_node_member_cpu_seconds", "Processor time of living members.", ("role",), _keyed(cpu))
    yield _gauge(
        "aimaster_node_member_resident_bytes", "Resident memory of living members.", ("role",), _keyed(resident)
    )
    yield _gauge("aimaster_node_progress_age_seconds", "Longest present silence.", ("role",), _keyed(oldest))
    deaths = {(role, "stopped" if expected else "died"): count for (role, expected), count in state.deaths.items()}
    yield _counter("aimaster_node_member_exits", "Ends of members.", ("role", "outcome"), deaths.items())
    yield _counter(
        "aimaster_node_hangs_suspected", "Broken progress leases reported.", ("role",), _keyed(state.suspected)
    )


def _flow(state: NodeState) -> Iterator[Metric]:
    yield _gauge("aimaster_node_master_connected", "1 while connected to a master.", (), [((), int(state.connected))])
    yield _counter("aimaster_node_master_connections", "Times a master was found.", (), [((), state.connections)])
    yield _gauge("aimaster_node_outbox_reports", "Reports not acknowledged yet.", (), [((), state.outbox_waiting)])
    yield _counter(
        "aimaster_node_outbox_refused", "Findings dropped, the outbox being full.", (), [((), state.outbox_refused)]
    )
    yield _counter("aimaster_node_orders_refused", "Orders of a past term.", (), [((), state.orders_refused)])
    yield _counter("aimaster_node_log_bytes", "Log bytes read.", (), [((), state.log_bytes)])


def _snapshots(state: NodeState) -> Iterator[Metric]:
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[tuple[str, str]] = Counter()
    newest: dict[tuple[str, str], int] = {}
    for place in state.kept.places:
        key = (place.role, place.tier)
        count[key] += 1
        size[key] += place.size_bytes
        newest[key] = max(newest.get(key, 0), place.version.step)
    yield _gauge("easyckpt_segments", "Sealed segments in this node's memory.", ("role", "tier"), count.items())
    yield _gauge("easyckpt_segment_bytes", "Their size.", ("role", "tier"), size.items())
    yield _gauge("easyckpt_newest_step", "Step of the newest one.", ("role", "tier"), newest.items())
    yield _counter("easyckpt_flushes", "Snapshots written to storage.", ("outcome",), _keyed(state.kept.flushes))
    yield _gauge("easyckpt_last_flush_seconds", "Time the last flush took.", (), [((), state.kept.flush_seconds)])
    yield _counter("easyckpt_scrubbed_bytes", "Snapshot memory read again.", (), [((), state.kept.scrubbed_bytes)])
    yield _counter(
        "easyckpt_segments_damaged", "Snapshots found damaged in memory.", ("tier",), _keyed(state.kept.damaged)
    )
    yield _counter("easyckpt_copies", "Segments between nodes.", ("outcome",), _keyed(state.copies))


def _host(state: NodeState) -> Iterator[Metric]:
    rooms: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in _ROOM_GAUGES.values()}
    pressure: dict[tuple[str, ...], float] = {}
    for reading in state.readings:
        for (kind, field), name in _HOST_GAUGES.items():
            if reading.kind == kind and field in reading.values:
                yield _gauge(name, "Of the machine.", (), [((), float(reading.values[field] or 0))])
        if reading.kind == "host.room" and reading.state == "ok":
            for field, name in _ROOM_GAUGES.items():
                rooms[name][str(reading.values["folder"]),] = float(reading.values[field] or 0)
        elif reading.kind == "host.pressure":
            pressure[str(reading.values["resource"]),] = float(reading.values["some_ratio"] or 0)
    for name, values in rooms.items():
        yield _gauge(name, "Room left where the run lives.", ("folder",), values.items())
    yield _gauge(
        "aimaster_node_pressure_ratio", "Share of 10 s in which work waited for it.", ("resource",), pressure.items()
    )


def _keyed(values: Mapping[str, V]) -> Iterable[tuple[tuple[str, ...], V]]:
    return [((key,), value) for key, value in values.items()]
