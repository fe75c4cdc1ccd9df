"""The master's metrics, read from its state when they are asked for. Labels come from closed sets; nothing is registered on import."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from aimaster.brain.picture import job_state
from aimaster.brain.state import State
from aimaster.journal import Journal
from aimaster.master.executor import Executor
from aimaster.master.intake import Intake
from aimaster.master.mind import Mind

JOB_STATES: Final = ("starting", "running", "degraded", "stopping", "finished", "failed")
NODE_STATES: Final = ("waiting", "connected", "silent", "lost", "stopped")
MEMBER_STATES: Final = ("planned", "starting", "running", "suspected", "dead", "stopped", "finished")


class MasterCollector(Collector):
    """Reads mind, lines and journal at scrape time."""

    def __init__(self, mind: Mind, intake: Intake, executor: Executor, journal: Journal) -> None:
        self._mind = mind
        self._intake = intake
        self._executor = executor
        self._journal = journal

    def describe(self) -> Iterable[Metric]:
        """Nothing at registration: there may be no state yet."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._of_hops()
        if self._mind.ready:
            state = self._mind.state
            yield from self._of_job(state)
            yield from _of_parts(state)
            yield from _of_incidents(state)

    def _of_hops(self) -> Iterator[Metric]:
        """One counter in and one out for each hop, so that a loss shows as a difference."""
        yield _counter("aimaster_reports_received", "Reports that came in from agents.", self._intake.reports)
        yield _counter(
            "aimaster_reports_acknowledged",
            "Reports acknowledged, after they were journaled.",
            self._intake.acknowledged,
        )
        yield _counter("aimaster_pulses_received", "Pictures of nodes that came in.", self._intake.pulses)
        yield _counter("aimaster_events_believed", "Events journaled and believed.", self._mind.believed)
        yield _counter(
            "aimaster_orders_sent", "Orders put on an agent's line, repeats included.", self._executor.orders_sent
        )
        yield _counter(
            "aimaster_proposals_sent",
            "Epochs proposed to the controller, repeats included.",
            self._executor.proposals_sent,
        )
        yield _gauge("aimaster_journal_bytes", "Size of the journal's open segment.", self._journal.size_bytes)
        yield _gauge("aimaster_journal_sequence", "Sequence of the newest durable record.", self._journal.last_sequence)
        yield _gauge("aimaster_storage_full", "1 while nothing can be journaled.", float(bool(self._mind.not_durable)))

    def _of_job(self, state: State) -> Iterator[Metric]:
        yield InfoMetricFamily("aimaster_job", "The job.", {"name": state.plan.name, "kind": state.plan.kind})
        states = GaugeMetricFamily("aimaster_job_state", "1 for the state the job is in.", labels=["state"])
        now = job_state(state, findings_block=bool(self._mind.not_durable))
        for name in JOB_STATES:
            states.add_metric([name], float(name == now))
        yield states
        yield _gauge("aimaster_term", "Term of this master.", state.term)
        yield _gauge("aimaster_orders_open", "Orders given and not yet done.", len(state.orders))
        view = self._mind.view
        if view.controller is not None:
            pulse = view.controller
            yield _gauge("aimaster_epoch", "Number of the current epoch.", pulse.epoch)
            yield _gauge("aimaster_lineage", "Current lineage.", pulse.lineage)
            yield _gauge("aimaster_step", "Newest committed step.", pulse.step)
            yield _gauge("aimaster_committed_timestamp_seconds", "When it was committed.", pulse.committed_at)
            age = self._mind.clock() - view.controller_at
            yield _gauge("aimaster_controller_silent_seconds", "Since the controller's last word.", age)


def _of_parts(state: State) -> Iterator[Metric]:
    nodes = GaugeMetricFamily("aimaster_nodes", "Nodes by state.", labels=["state"])
    count = Counter(node.state for node in state.nodes.values())
    for name in NODE_STATES:
        nodes.add_metric([name], count.get(name, 0))
    yield nodes
    members = GaugeMetricFamily("aimaster_members", "Members by role and state.", labels=["role", "state"])
    restarts = CounterMetricFamily("aimaster_member_restarts", "Restarts of members of this attempt.", labels=["role"])
    for role in sorted({member.role for member in state.members.values()}):
        of_role = [member for member in state.members.values() if member.role == role]
        for name in MEMBER_STATES:
            members.add_metric([role, name], sum(member.state == name for member in of_role))
        restarts.add_metric([role], sum(member.restarts for member in of_role))
    yield members
    yield restarts


def _of_incidents(state: State) -> Iterator[Metric]:
    incidents = CounterMetricFamily(
        "aimaster_incidents", "Incidents by category and what was done.", labels=["category", "action"]
    )
    kinds = Counter((incident.verdict.category, incident.action or "none") for incident in state.incidents.values())
    for (category, action), count in sorted(kinds.items()):
        incidents.add_metric([category, action], count)
    yield incidents
    open_now = sum(incident.healed_at is None for incident in state.incidents.values())
    yield _gauge("aimaster_incidents_open", "Incidents that are not healed.", open_now)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def make_registry(mind: Mind, intake: Intake, executor: Executor, journal: Journal) -> CollectorRegistry:
    """A registry of this program's own."""
    registry = CollectorRegistry()
    registry.register(MasterCollector(mind, intake, executor, journal))
    return registry
