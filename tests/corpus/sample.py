"""The sample of the healthy corpus that is kept in tests/data: of each source, a line of each template that sounds like trouble."""

import os
import re
import socket
from pathlib import Path

from aimaster.catalogue.templates import template
from tests.corpus.environment import PROJECT, cache_folder

DATA = PROJECT / "tests/data/healthy"
MOST_BYTES = 120_000
SOUNDS_BAD = re.compile(
    rb"(?i)error|fail|fatal|exception|abort|cannot|unable|denied|invalid|corrupt|kill|lost|refused|panic|critical|timed? ?out|dead|died|signal|"
    rb"exit|memory|warn|nan\b|retry|unreachable|reset|closed|terminat|preempt|evict|oom|traceback"
)


def write(logs: dict[str, list[Path]]) -> None:
    """One file a source, bounded, without this machine's names and paths."""
    DATA.mkdir(parents=True, exist_ok=True)
    for name, files in logs.items():
        kept, seen, size = [], set(), 0
        for path in files:
            for line in path.open("rb"):
                if len(line) > 600 or not SOUNDS_BAD.search(line) or (mask := template(line)) in seen:
                    continue
                seen.add(mask)
                plain = without_names(line.rstrip(b"\r\n"))
                size += len(plain) + 1
                if size <= MOST_BYTES:
                    kept.append(plain)
        (DATA / f"{name}.log").write_bytes(b"\n".join(kept) + b"\n")


def without_names(line: bytes) -> bytes:
    for place, word in (
        (str(cache_folder()), "/cache"),
        (str(PROJECT), "/src"),
        (os.path.expanduser("~"), "/home/user"),
    ):
        line = line.replace(place.encode(), word.encode())
    line = re.sub(rb"(?<![\w.-])" + re.escape(socket.gethostname().encode()) + rb"(?![\w-])", b"node-0", line)
    return line.decode("utf-8", "replace").encode()
