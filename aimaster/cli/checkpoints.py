"""`aimaster checkpoints`: the snapshots of a run, newest first, and the tiers each lies in."""

import os
from collections.abc import Iterable
from pathlib import Path

import click
import msgspec

from aimaster.cli.options import asks_master
from aimaster.cli.reach import find, picture
from aimaster.cli.render import TIERS, size, table
from aimaster.wire.checkpoint import SnapshotPlace


@click.command()
@asks_master
@click.option("--json", "as_json", is_flag=True, help="Print as one JSON document.")
def checkpoints(master: str | None, run_dir: Path | None, as_json: bool) -> None:
    """List the snapshots of a run, tier by tier: own memory, a peer's memory, storage."""
    found = picture(find(master, run_dir, os.environ)).snapshots
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    elif not found:
        click.echo("no snapshots", err=True)
    else:
        table(("step", "lineage", "member", "size", "chain", *TIERS), rows(found))


def rows(places: Iterable[SnapshotPlace]) -> list[tuple[str, ...]]:
    """One row for each snapshot of a member, with where it lies."""
    grouped: dict[tuple[int, int, str], list[SnapshotPlace]] = {}
    for place in places:
        grouped.setdefault((place.version.lineage, place.version.step, place.member), []).append(place)
    found = []
    for (lineage, step, member), group in sorted(
        grouped.items(), key=lambda item: (-item[0][0], -item[0][1], item[0][2])
    ):
        where = {
            tier: ", ".join(sorted({place.node or "yes" for place in group if place.tier == tier})) for tier in TIERS
        }
        total = sum({place.rank: place.size_bytes for place in group}.values())
        found.append((str(step), str(lineage), member, size(total), group[0].chain[:12], *where.values()))
    return found
