"""What the machine's readings mean: a folder that runs out of room. Pure."""

from collections.abc import Iterable

from aimaster.wire.health import Finding, Reading, Subject

CATEGORY_OF_FOLDER = {"memory": "node.shm_full"}
"""Any other folder is a disk."""
FULL_BYTES = 16 << 20
FULL_RATIO = 0.002


def room_findings(readings: Iterable[Reading]) -> list[Finding]:
    """A finding for each folder with neither 16 MiB nor 0.2 % left; its id is the same as long as it lasts."""
    findings = []
    for reading in readings:
        if reading.kind != "host.room" or reading.state != "ok":
            continue
        free, total = int(reading.values["free_bytes"] or 0), int(reading.values["total_bytes"] or 0)
        if total == 0 or free >= max(FULL_BYTES, FULL_RATIO * total):
            continue
        folder = str(reading.values["folder"])
        findings.append(
            Finding(
                id=f"{reading.node}:room:{folder}",
                sign="host.room",
                category=CATEGORY_OF_FOLDER.get(folder, "node.disk_full"),
                role="self",
                subject=Subject(node=reading.node),
                node=reading.node,
                time_seconds=reading.time_seconds,
                details={"folder": folder, "free_bytes": str(free)},
            )
        )
    return findings
