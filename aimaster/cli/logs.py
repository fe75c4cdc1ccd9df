"""`aimaster logs MEMBER`: what a member printed, read from the run folder; it works after the end too."""

import os
import sys
import time
from collections import deque
from pathlib import Path

import click

from aimaster.cli.exits import UsageError
from aimaster.cli.options import asks_master
from aimaster.cli.reach import Target, find, has_ended
from aimaster.wire.places import RunPlaces

FOLLOW_SECONDS = 0.25
BLOCK_BYTES = 1 << 16


@click.command()
@click.argument("member")
@asks_master
@click.option("-f", "--follow", is_flag=True, help="Go on as more is printed, until the run ends.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="Start this many lines before the end.",
)
def logs(member: str, master: str | None, run_dir: Path | None, follow: bool, lines: int) -> None:
    """Show a member's output; MEMBER may also be `master`, or `agent-NODE`."""
    target = find(master, run_dir, os.environ)
    file = log_file(target, member)
    offset = print_end(file, lines)
    while follow:
        sys.stdout.flush()
        over = target.run is not None and has_ended(target.run)  # looked at before the file: it holds all by then
        offset = print_from(file, offset)
        if over:
            sys.stdout.flush()
            click.echo("the run has ended", err=True)
            return
        time.sleep(FOLLOW_SECONDS)


def log_file(target: Target, member: str) -> Path:
    """The file of a member, the newest where it lived on several nodes; UsageError names those that there are."""
    if target.run is None:
        raise UsageError("logs are read from the run folder: name it with --run-dir")
    places = RunPlaces(target.run)
    files = {"master": places.logs / "master.log"}
    files |= {f"agent-{file.parent.name}": file for file in places.run.glob("nodes/*/agent.log")}
    outputs = sorted(places.run.glob("nodes/*/members/*/output.log"), key=lambda file: file.stat().st_mtime)
    files |= {file.parent.name: file for file in outputs}
    known = {name: file for name, file in files.items() if file.exists()}
    if member not in known:
        raise UsageError(
            f"no log of {member!r} in {target.run} ({target.source}); there are: {', '.join(sorted(known)) or 'none'}"
        )
    return known[member]


def print_end(file: Path, lines: int) -> int:
    """The last lines; the offset behind them."""
    with file.open("rb") as data:
        for line in deque(data, maxlen=lines):
            sys.stdout.buffer.write(line)
        return data.tell()


def print_from(file: Path, offset: int) -> int:
    """What came after `offset`; the offset behind it. A file that shrank is begun again."""
    with file.open("rb") as data:
        if data.seek(0, os.SEEK_END) < offset:
            offset = 0
        data.seek(offset)
        while block := data.read(BLOCK_BYTES):
            sys.stdout.buffer.write(block)
        return data.tell()
