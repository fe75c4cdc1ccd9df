"""What the machine's readings mean: folders without room, disks that turned read-only, a silent file server, a wrong clock. Pure."""

from collections.abc import Sequence
from typing import Final

from agents.rules.base import WARNS, conclude, near, number
from aimaster.wire.health import Finding, Reading

CATEGORY_OF_FOLDER: Final = {"memory": "node.shm_full", "shm": "node.shm_full"}
"""Any other folder is a disk."""
FULL_BYTES: Final = 16 << 20
FULL_RATIO: Final = 0.002
FULL_INODES: Final = 16
GROWTH_SECONDS: Final = 600.0
"""Memory that would be used up within this long at the present pace is told."""
GROWTH_SPAN_SECONDS: Final = 60.0
"""A pace is taken over at least this long."""
SKEW_WARNS_SECONDS: Final = 1.0
SKEW_ACTS_SECONDS: Final = 60.0


def room_findings(readings: Sequence[Reading]) -> list[Finding]:
    """A finding for each folder with neither 16 MiB nor 0.2 % left, or no inodes; and for one whose server does not answer.

    Of the machine's other disks and file servers it is a warning: who knows whether this job uses them.
    """
    findings = []
    for reading in readings:
        if reading.kind not in ("host.room", "host.mount", "host.remote"):
            continue
        own = reading.kind == "host.room"
        folder = str(reading.values.get("folder") or reading.values.get("device"))
        if reading.state == "bad":
            text = f"the file server of {folder} ({reading.values.get('server')}) does not answer for {number(reading, 'seconds'):.0f} s"
            findings.append(
                conclude(
                    reading,
                    "host.silent_mount",
                    "node.shared_fs",
                    text,
                    about=folder,
                    weight=60 if own else WARNS,
                    severity="warning",
                    folder=folder,
                )
            )
        if reading.state != "ok" or reading.kind == "host.remote":
            continue
        free, total = int(number(reading, "free_bytes")), int(number(reading, "total_bytes"))
        inodes, left = int(number(reading, "inodes")), int(number(reading, "free_inodes"))
        category = CATEGORY_OF_FOLDER.get(folder, "node.disk_full")
        if total > 0 and free < min(max(FULL_BYTES, FULL_RATIO * total), total / 2):
            text = f"folder {folder} has {free} of {total} bytes left"
            findings.append(
                conclude(
                    reading,
                    "host.room",
                    category,
                    text,
                    about=folder,
                    folder=folder,
                    free_bytes=free,
                    weight=50 if own else WARNS,
                    severity="error" if own else "warning",
                )
            )
        elif inodes > 0 and left < FULL_INODES:
            text = f"folder {folder} has {left} of {inodes} inodes left"
            findings.append(
                conclude(
                    reading,
                    "host.inodes",
                    category,
                    text,
                    about=folder,
                    folder=folder,
                    free_inodes=left,
                    weight=50 if own else WARNS,
                    severity="error" if own else "warning",
                )
            )
    return findings


class HostRules:
    """Memory that runs out, and threads near what the kernel allows."""

    def __init__(self) -> None:
        self._since: Reading | None = None

    def judge(self, readings: Sequence[Reading]) -> list[Finding]:
        """The conditions that hold now."""
        found: list[Finding] = []
        for reading in readings:
            if reading.kind == "host.memory":
                found += self._memory(reading)
            elif reading.kind == "host.load":
                found += near(reading, "threads", "threads_limit", "the machine", "threads")
        return found

    def _memory(self, reading: Reading) -> list[Finding]:
        total, left = number(reading, "total_bytes"), number(reading, "available_bytes")
        since = self._since = self._since or reading
        seconds = reading.time_seconds - since.time_seconds
        if seconds < GROWTH_SPAN_SECONDS:
            return []
        pace = (number(since, "available_bytes") - left) / seconds
        if seconds >= 2 * GROWTH_SPAN_SECONDS:
            self._since = reading
        if pace <= 0 or left > total / 2 or left > pace * GROWTH_SECONDS:
            return []
        text = f"the machine's memory is used up in {left / pace:.0f} s at its present pace"
        return [
            conclude(
                reading,
                "host.growth",
                "node.oom_host",
                text,
                weight=WARNS,
                severity="warning",
                bytes_per_second=int(pace),
            )
        ]


class MountRules:
    """A file system that was writable and is not any more: the kernel gave it up."""

    def __init__(self) -> None:
        self._writable: set[str] = set()

    def judge(self, readings: Sequence[Reading]) -> list[Finding]:
        found = []
        for reading in readings:
            if reading.kind not in ("host.mount", "host.room") or reading.state != "ok":
                continue
            name = str(reading.values.get("device") or reading.values.get("folder"))
            if not reading.values.get("read_only"):
                self._writable.add(name)
            elif name in self._writable:
                text = f"{name} was writable and is read-only now"
                found.append(
                    conclude(
                        reading,
                        "host.read_only",
                        "node.disk_fault",
                        text,
                        about=name,
                        weight=75,
                        severity="critical",
                        device=name,
                    )
                )
        return found


def clock_findings(readings: Sequence[Reading]) -> list[Finding]:
    """More than a second apart from the master warns, more than a minute is the node's fault."""
    found = []
    for reading in readings:
        if reading.kind != "host.clock" or reading.state != "ok":
            continue
        offset = number(reading, "offset_seconds")
        apart = abs(offset) - number(reading, "uncertainty_seconds")
        if apart <= SKEW_WARNS_SECONDS:
            continue
        acts = apart > SKEW_ACTS_SECONDS
        text = f"this node's clock is {offset:+.1f} s from the master's"
        found.append(
            conclude(
                reading,
                "host.clock",
                "node.clock_skew",
                text,
                about="acts" if acts else "",
                weight=75 if acts else WARNS,
                severity="critical" if acts else "warning",
                offset_seconds=f"{offset:.1f}",
            )
        )
    return found
