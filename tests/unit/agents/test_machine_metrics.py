import re

from prometheus_client import CollectorRegistry, generate_latest

from agents import machine_metrics
from aimaster.wire.health import Reading, Subject

CLOSED = {"gpu", "uuid", "pci_bus_id", "role", "tier", "sensor", "source", "xid", "device", "port", "severity", "category", "action", "outcome", "state"}  # fmt: skip


class Page:
    """What a full node shows."""

    def __init__(self, readings, xids=()):
        self.readings, self.xids = readings, dict(xids)

    def collect(self):
        yield from machine_metrics.gpus(self.readings, self.xids)
        yield from machine_metrics.ports(self.readings)
        yield from machine_metrics.host(self.readings)
        yield from machine_metrics.limits(self.readings)
        yield from machine_metrics.sensors(self.readings, ["gpu", "host"], ["kernel"], {"gpu": 0.5})

    def describe(self):
        return []


def page(readings, xids=()):
    registry = CollectorRegistry()
    registry.register(Page(readings, xids))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def reading(sensor, kind, gpu=None, state="ok", **values):
    return Reading(
        sensor=sensor, kind=kind, node="n", time_seconds=1.0, state=state, subject=Subject(gpu=gpu), values=values
    )


def full_node():
    gpu_values = dict.fromkeys([*machine_metrics.GPU_GAUGES, *machine_metrics.GPU_COUNTERS, "throttle_bits", "remap_pending", "remap_failure", "remapped_corrected", "remapped_uncorrected"], 1)  # fmt: skip
    gpu_values |= {
        f"ecc_{one}_{other}": 2 for one in ("corrected", "uncorrected") for other in ("volatile", "aggregate")
    }
    port_values = dict.fromkeys(
        [*machine_metrics.COUNTERS, *machine_metrics.HARDWARE_COUNTERS, "rate_bits_per_second"], 3
    )
    readings = [reading("gpu", "gpu.nvml", count=8)]
    for number in range(8):
        readings.append(
            reading("gpu", "gpu.device", str(number), uuid=f"GPU-{number}", pci=f"0000:1{number}:00.0", **gpu_values)
        )
        readings.append(
            reading("fabric", "fabric.port", device=f"mlx5_{number}", port="1", link="ACTIVE", **port_values)
        )
        readings.append(
            reading(
                "process",
                "process.usage",
                member=f"m-{number}",
                zombies=1,
                blocked=0,
                processes=25,
                files=10,
                files_limit=100,
            )
        )
    return readings


def test_a_full_node_stays_within_its_series():
    """8 GPUs, 8 ports and a burst of strange Xids: under 2,000 series, and every label from a closed set."""
    lines = page(full_node(), {(str(gpu), str(code)): 1 for gpu in range(8) for code in range(100, 400)})
    assert 200 < len(lines) < 2000
    labels = {name for line in lines for name in re.findall(r'(\w+)="', line)}
    assert labels <= CLOSED


def test_what_was_not_read_is_not_shown():
    """No zero stands for a value that is missing; a GPU that cannot be opened is down."""
    lines = page([reading("gpu", "gpu.nvml", count=2), reading("gpu", "gpu.device", "0", uuid="u", pci="p"), reading("gpu", "gpu.unopened", "1", state="unreadable", code=15)])  # fmt: skip
    text = "\n".join(lines)
    assert "temperature" not in text
    assert 'aimaster_node_gpu_up{gpu="0"} 1.0' in text
    assert 'aimaster_node_gpu_up{gpu="1"} 0.0' in text
    assert 'aimaster_node_sensor_up{sensor="kernel"} 0.0' in text
    assert "ratio" not in text


def test_the_fullest_counts():
    """Of several groups the one nearest to its limit is shown; one without a limit is none."""
    groups = [reading("cgroup", "cgroup.memory", used_bytes=used, **limit) for used, limit in ((50, {"limit_bytes": 100}), (90, {"limit_bytes": 100}), (10**12, {}))]  # fmt: skip
    assert "aimaster_node_memory_limit_used_ratio 0.9" in page(groups)
