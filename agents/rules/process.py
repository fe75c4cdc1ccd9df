"""What the readings of processes and control groups mean: kills for want of memory, limits in sight, processes that are stuck. Pure."""

from collections.abc import Sequence
from typing import Final

from agents.rules.base import WARNS, conclude, near, number
from aimaster.wire.health import Finding, Reading

BLOCKED_SECONDS: Final = 60.0
STILL_SECONDS: Final = 300.0
STILL_RATIO: Final = 0.01
"""Of a core, for all processes of a member: less is standing still."""
ZOMBIES: Final = 50
GROWTH_SECONDS: Final = 600.0
"""A limit that would be reached within this long at the present pace is told."""
GROWTH_SPAN_SECONDS: Final = 60.0
"""A pace is taken over at least this long."""


class ProcessRules:
    """Judges the members' processes and groups."""

    def __init__(self) -> None:
        self._kills: dict[str, float] = {}
        self._blocked_since: dict[str, float] = {}
        self._still_since: dict[str, Reading] = {}
        self._grown_from: dict[str, Reading] = {}

    def kills(self, readings: Sequence[Reading]) -> list[Finding]:
        """Events: a group in which the kernel has killed since the last reading. Kills before the first one are history."""
        found = []
        for reading in readings:
            if reading.kind != "cgroup.memory" or "oom_kills" not in reading.values:
                continue
            group, kills = str(reading.values["group"]), number(reading, "oom_kills")
            more = kills - self._kills.get(group, kills)
            self._kills[group] = kills
            if more > 0:
                text = f"the kernel killed {more:.0f} process(es) of control group {group} at its memory limit"
                found.append(
                    conclude(
                        reading,
                        "cgroup.oom_kill",
                        "node.oom_cgroup",
                        text,
                        about=group,
                        weight=78,
                        severity="critical",
                        event=True,
                        group=group,
                        members=reading.values.get("members", ""),
                        count=int(more),
                    )
                )
        return found

    def judge(self, readings: Sequence[Reading]) -> list[Finding]:
        """The conditions that hold now."""
        found: list[Finding] = []
        for reading in readings:
            if reading.kind == "cgroup.memory":
                found += self._memory(reading)
            elif reading.kind == "cgroup.pids":
                found += near(reading, "pids", "limit", str(reading.values["group"]), "processes")
            elif reading.kind == "process.usage":
                found += near(reading, "files", "files_limit", str(reading.values["member"]), "open files")
                found += self._blocked(reading) + self._still(reading) + _zombies(reading)
        return found

    def _memory(self, reading: Reading) -> list[Finding]:
        group, used, limit = str(reading.values["group"]), number(reading, "used_bytes"), number(reading, "limit_bytes")
        if limit <= 0:
            return []
        since = self._grown_from.setdefault(group, reading)
        seconds = reading.time_seconds - since.time_seconds
        if seconds < GROWTH_SPAN_SECONDS:
            return []
        pace = (used - number(since, "used_bytes")) / seconds
        if seconds >= 2 * GROWTH_SPAN_SECONDS:
            self._grown_from[group] = reading
        if pace <= 0 or used + pace * GROWTH_SECONDS < limit or used < limit / 2:
            return []
        left = max(0.0, limit - used) / pace
        text = f"control group {group} reaches its memory limit in {left:.0f} s at its present pace"
        return [
            conclude(
                reading,
                "cgroup.growth",
                "node.oom_cgroup",
                text,
                about=group,
                weight=WARNS,
                severity="warning",
                group=group,
                bytes_per_second=int(pace),
            )
        ]

    def _blocked(self, reading: Reading) -> list[Finding]:
        member = str(reading.values["member"])
        if reading.values.get("state") != "D":
            self._blocked_since.pop(member, None)
            return []
        lasted = reading.time_seconds - self._blocked_since.setdefault(member, reading.time_seconds)
        if lasted < BLOCKED_SECONDS:
            return []
        text = f"{member} is blocked in the kernel (state D) for {lasted:.0f} s"
        return [
            conclude(
                reading,
                "process.blocked",
                "hang.unknown",
                text,
                about=member,
                weight=19,
                severity="warning",
                pid=reading.subject.pid,
                member=member,
            )
        ]

    def _still(self, reading: Reading) -> list[Finding]:
        """A note, not an alarm: who waits for work stands still as well."""
        member = str(reading.values["member"])
        since = self._still_since.setdefault(member, reading)
        seconds = reading.time_seconds - since.time_seconds
        used = number(reading, "cpu_seconds") - number(since, "cpu_seconds")
        if used < 0 or reading.subject.pid != since.subject.pid or used > STILL_RATIO * max(seconds, BLOCKED_SECONDS):
            self._still_since[member] = reading
            return []
        if seconds < STILL_SECONDS:
            return []
        text = f"{member} has used no processor for {seconds:.0f} s"
        return [
            conclude(
                reading,
                "process.still",
                "hang.unknown",
                text,
                about=member,
                weight=15,
                severity="info",
                pid=reading.subject.pid,
                member=member,
            )
        ]


def _zombies(reading: Reading) -> list[Finding]:
    count, member = int(number(reading, "zombies")), str(reading.values["member"])
    if count < ZOMBIES:
        return []
    text = f"{member} does not take back {count} of its ended processes"
    return [
        conclude(
            reading,
            "process.zombies",
            "node.limits",
            text,
            about=member,
            weight=15,
            severity="info",
            pid=reading.subject.pid,
            member=member,
        )
    ]
