"""From readings to findings: every reading of the machine goes past its rules here, and what is news is reported.

A condition is told once for as long as it lasts; one that comes back within a minute had not gone. An event is told once, whichever
sensor saw it first. What was told lately about a process or its control group goes with the report of that process's end.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import structlog

from agents.rules.fabric import FabricRules
from agents.rules.gpu import TEXT_DECIDES, GpuRules
from agents.rules.host import HostRules, MountRules, clock_findings, room_findings
from agents.rules.kernel import Collapse, KernelRules
from agents.rules.process import ProcessRules
from aimaster.catalogue import Catalogue
from aimaster.wire.health import Finding, Reading
from aimaster.wire.ids import NodeId
from aimaster.wire.messages import AgentEvent, Found

RECENT_SECONDS = 60.0
MOST_RECENT = 256
BACK_SECONDS = 60.0
log = structlog.get_logger()


class MachineWatch:
    """Used by the event loop alone."""

    def __init__(
        self,
        node: NodeId,
        catalogue: Catalogue,
        *,
        report: Callable[[AgentEvent, float], None],
        trees: Callable[[], Mapping[str, frozenset[int]]],
    ) -> None:
        self.told: dict[tuple[str, str], int] = {}
        """Findings reported, by category and severity."""
        self.xids: dict[tuple[str, str], int] = {}
        """Xids, by GPU and code."""
        self._report = report
        self._trees = trees
        self._gpu = GpuRules(catalogue.xids)
        self._fabric = FabricRules()
        self._host = HostRules()
        self._mounts = MountRules()
        self._process = ProcessRules()
        self._kernel = KernelRules(catalogue, node)
        self._collapse = Collapse(TEXT_DECIDES)
        self._lasting: dict[str, dict[str, float]] = {}
        """By sensor: id of a condition and when it was last seen to hold."""
        self._judged: dict[str, float] = {}
        self._recent: deque[Finding] = deque(maxlen=MOST_RECENT)

    def take(self, readings: Sequence[Reading]) -> None:
        """All that one sensor read at one time."""
        if not readings:
            return
        sensor = readings[0].sensor
        self._tell_events(self._events(readings))
        if self._judged.get(sensor) == readings[0].time_seconds:
            return  # the same picture again
        self._judged[sensor] = readings[0].time_seconds
        self._tell_conditions(sensor, self._conditions(sensor, readings))

    def explain(self, member: str, pids: frozenset[int], at: float) -> list[Finding]:
        """What was told lately that speaks of these processes, or of the group that the member is in."""
        return [
            one
            for one in self._recent
            if (one.time_seconds is None or abs(at - one.time_seconds) <= RECENT_SECONDS)
            and (
                one.subject.pid in pids
                if one.subject.pid is not None
                else member in one.details.get("members", "").split()
            )
        ]

    def _events(self, readings: Sequence[Reading]) -> list[Finding]:
        found: list[Finding] = []
        for reading in readings:
            if reading.kind == "gpu.xid":
                key = (reading.subject.gpu or "", str(reading.values["xid"]))
                self.xids[key] = self.xids.get(key, 0) + 1
                found.append(self._gpu.xid(reading))
            elif reading.kind == "kernel.lines":
                found += self._kernel.judge(reading.text, reading.time_seconds)
        return found + self._process.kills(readings)

    def _conditions(self, sensor: str, readings: Sequence[Reading]) -> list[Finding]:
        match sensor:
            case "gpu":
                trees = self._trees()
                job = frozenset[int]().union(*trees.values())
                held = self._gpu.held(readings, job, _alive(readings)) if trees else []
                return self._gpu.judge(readings) + held
            case "fabric":
                return self._fabric.judge(readings)
            case "mounts":
                return room_findings(readings) + self._mounts.judge(readings)
            case "host":
                return self._host.judge(readings)
            case "process" | "cgroup":
                return self._process.judge(readings)
            case "clock":
                return clock_findings(readings)
            case _:
                return []

    def _tell_events(self, findings: list[Finding]) -> None:
        for finding in self._collapse.fresh(findings, time.monotonic()):
            self._tell(finding)

    def _tell_conditions(self, sensor: str, findings: list[Finding]) -> None:
        now = time.monotonic()
        lasting = self._lasting.setdefault(sensor, {})
        for finding in findings:
            if finding.id not in lasting:
                self._tell(finding)
            lasting[finding.id] = now
        for name in [name for name, seen in lasting.items() if now - seen > BACK_SECONDS]:
            del lasting[name]

    def _tell(self, finding: Finding) -> None:
        key = (finding.category, finding.severity)
        self.told[key] = self.told.get(key, 0) + 1
        self._recent.append(finding)
        log.info("found", sign=finding.sign, category=finding.category, role=finding.role, id=finding.id)
        self._report(Found(finding=finding), time.time())


def _alive(readings: Sequence[Reading]) -> frozenset[int]:
    """Of the processes that the driver names, those that exist under that number here."""
    named = {int(pid) for reading in readings for pid in str(reading.values.get("pids") or "").split()}
    return frozenset(pid for pid in named if os.path.exists(f"/proc/{pid}"))
