"""How much there is of the corpus, how much of it is distinct, and what the signs say to it."""

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from aimaster.catalogue import Catalogue
from aimaster.catalogue.scan import CHUNK_BYTES, LogScan
from aimaster.catalogue.templates import template

MOST_LINE_BYTES = 2000


class Alarm(NamedTuple):
    """A statement above benign that a healthy log made."""

    source: str
    sign: str
    role: str
    severity: str
    place: str
    text: str


class Amount(NamedTuple):
    """What one source gave."""

    bytes: int
    distinct_bytes: int
    templates: int


class Counter:
    """Distinct lines and templates over all sources: what two sources share counts once."""

    def __init__(self) -> None:
        self._lines: set[bytes] = set()
        self._templates: set[bytes] = set()

    def add(self, files: list[Path]) -> Amount:
        """Counts the files of one source."""
        size = distinct = 0
        before = len(self._templates)
        for path in files:
            with path.open("rb") as file:
                for line in file:
                    size += len(line)
                    key = hashlib.blake2b(line, digest_size=8).digest()
                    if key not in self._lines:
                        self._lines.add(key)
                        distinct += len(line)
                        self._templates.add(hashlib.blake2b(template(line[:MOST_LINE_BYTES]), digest_size=8).digest())
        return Amount(size, distinct, len(self._templates) - before)


def is_alarm(scan_hit) -> bool:
    """Above benign: a sign of failure, or an echo of one, that is more than a note."""
    return scan_hit.sign.kind == "sign" and scan_hit.sign.role != "benign"


def alarms(source: str, scan: LogScan) -> list[Alarm]:
    """What a scan of a healthy log found that it should not have."""
    return [
        Alarm(source, hit.sign.id, hit.sign.role, hit.sign.severity, f"{scan.file}:{hit.line}", hit.text[:300])
        for hit in scan.hits
        if is_alarm(hit)
    ]


def mutated(files: list[Path], megabytes: int, seed: int) -> Iterator[bytes]:
    """The material again and again with other digits, until it is this much.

    The digits from 2 to 9 change places, differently in each round: zero and one, which say whether something failed, stay what they are.
    """
    dice = random.Random(seed)
    made = 0
    while made < megabytes * 1_000_000 and files:
        digits = list(b"23456789")
        dice.shuffle(digits)
        table = bytes.maketrans(b"23456789", bytes(digits))
        for path in files:
            with path.open("rb", buffering=0) as file:
                while data := file.read(CHUNK_BYTES):
                    yield data.translate(table)
                    made += len(data)
                    if made >= megabytes * 1_000_000:
                        return
            yield b"\n"


def scan_file(catalogue: Catalogue, path: Path, name: str) -> LogScan:
    scan = LogScan(catalogue, node=None, file=name)
    with path.open("rb", buffering=0) as file:
        while data := file.read(CHUNK_BYTES):
            scan.feed(data)
    scan.finish()
    return scan
