"""For failures that no sign knows: lines at the end of a log whose like did not occur at its beginning.

Numbers, addresses, paths and ids are masked, so that two lines of one kind look the same. The result is an offer to a reader, never a verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from aimaster.telemetry.scrub import scrub
from aimaster.wire.health import Evidence

if TYPE_CHECKING:
    from aimaster.catalogue.scan import LogScan

MOST: Final = 10

_MASKS: Final = (
    (re.compile(rb"\b0x[0-9a-fA-F]+\b|\b[0-9a-f]{8,}\b"), b"<hex>"),
    (re.compile(rb"(?:/[\w.+-]+){2,}"), b"<path>"),
    (re.compile(rb"\d+(?:\.\d+)*"), b"<n>"),
    (re.compile(rb"\s+"), b" "),
)
_ALARMING = re.compile(
    rb"(?i)error|fail|fatal|exception|abort|cannot|unable|denied|invalid|corrupt|kill|lost|refused|panic|critical"
)


def template(line: bytes) -> bytes:
    """The line with everything masked that changes from one occurrence to the next."""
    for pattern, mask in _MASKS:
        line = pattern.sub(mask, line)
    return line.strip()[:300]


def new_lines(scans: Iterable[LogScan]) -> Iterator[Evidence]:
    """At most a few alarming lines from the ends of the logs that are unlike all lines of their beginnings."""
    scans = list(scans)
    known = {template(line) for scan in scans for line in scan.head.splitlines()}
    left = MOST
    for scan in scans:
        if scan.bytes_read <= len(scan.head):
            continue  # the beginning is the whole log: nothing is new in it
        for line in scan.tail.splitlines()[-200:]:
            mask = template(line)
            if left and mask not in known and _ALARMING.search(line):
                known.add(mask)
                left -= 1
                yield Evidence(
                    node=scan.node,
                    file=scan.file,
                    text=scrub(line[:500].decode(errors="replace")),
                    role="benign",
                    sign="new",
                )
