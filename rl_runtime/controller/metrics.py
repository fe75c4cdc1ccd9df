"""The controller's metrics, read from its state at scrape time. Base units; no label holds a rank, a step or a path."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rl_runtime.controller.desk import Desk

GAUGES: Final = {
    "reward_mean": ("rlruntime_reward_mean", "Mean reward of the newest dealt batch"),
    "staleness_mean": (
        "rlruntime_staleness_steps_mean",
        "Steps between the weights that made a token and those it trains, newest batch",
    ),
    "tokens_per_second": ("rlruntime_tokens_per_second", "Completion tokens admitted a second, over half a minute"),
    "buffered_groups": ("rlruntime_buffered_groups", "Complete groups that wait to be dealt"),
    "leased": ("rlruntime_open_samples", "Samples leased or to be leased again"),
    "ledger_bytes": ("rlruntime_ledger_bytes", "Size of the ledger on disk"),
    "ledger_fsync_seconds": ("rlruntime_ledger_fsync_seconds", "Duration of the newest durable write"),
    "policy_members": ("rlruntime_policy_members", "Policy members in the current epoch"),
}
COUNTERS: Final = {
    "admitted": ("rlruntime_samples_admitted", "Samples admitted"),
    "dealt": ("rlruntime_samples_dealt", "Samples dealt to a step"),
    "trained": ("rlruntime_samples_trained", "Samples trained on the live lineage"),
    "filtered": ("rlruntime_samples_filtered", "Samples of groups without spread"),
    "duplicates_refused": ("rlruntime_duplicates_refused", "Completions whose sample was admitted before"),
    "stale_refused": ("rlruntime_stale_refused", "Completions too old to train"),
    "leases_released": ("rlruntime_leases_released", "Leases taken from a worker that died or was late"),
}


class DeskCollector(Collector):
    """Reads the desk whenever somebody asks."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def collect(self) -> Iterator[Metric]:
        desk = self._desk
        numbers = desk.numbers()
        for name, (metric, text) in GAUGES.items():
            if name in numbers:
                yield GaugeMetricFamily(metric, text, value=numbers[name])
        for name, (metric, text) in COUNTERS.items():
            yield CounterMetricFamily(metric, text, value=numbers[name])
        account = desk.ledger.account
        yield GaugeMetricFamily("rlruntime_step", "Newest committed step", value=account.head.step)
        yield GaugeMetricFamily("rlruntime_lineage", "Live lineage", value=account.head.lineage)
        yield GaugeMetricFamily("rlruntime_epoch", "Number of the current epoch", value=account.epoch.number)
        yield GaugeMetricFamily(
            "rlruntime_committed_timestamp_seconds", "Time of the newest commit", value=desk.committed_at
        )
        yield GaugeMetricFamily(
            "rlruntime_disk_trouble",
            "1 while the ledger cannot be written",
            value=float(desk.ledger.trouble is not None),
        )


def make_registry(desk: Desk) -> CollectorRegistry:
    """Return a registry of its own for this desk."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DeskCollector(desk))
    return registry
