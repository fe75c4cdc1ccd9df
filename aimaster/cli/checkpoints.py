"""`aimaster checkpoints`: the snapshots of a run, newest first: the tiers and nodes that hold each, when it was proven there, what is missing."""

import os
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from aimaster.brain.copies import TIERS, Copies, Holding, overview
from aimaster.cli.options import asks_master
from aimaster.cli.reach import find, picture
from aimaster.cli.render import seconds, size, table


@click.command()
@asks_master
@click.option("--json", "as_json", is_flag=True, help="Print as one JSON document.")
def checkpoints(master: str | None, run_dir: Path | None, as_json: bool) -> None:
    """List the snapshots of a run, tier by tier: own memory, peers' memory, storage; with each node's failure domain, and how long ago
    every byte was proven there. Warnings: a newest step that one failure takes away, copies that lag.
    """
    status = picture(find(master, run_dir, os.environ))
    found = overview(status)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
        return
    if found.snapshots:
        table(("step", "lineage", "member", "size", "chain", *TIERS, "whole"), rows(found.snapshots, status.now))
    else:
        click.echo("no snapshots", err=True)
    for warning in found.warnings:
        click.echo(f"warning: {warning}", err=True)


def rows(found: Sequence[Copies], now: float) -> list[tuple[str, ...]]:
    """One row for each snapshot of a member, with where it lies."""
    return [
        (
            str(copies.version.step),
            str(copies.version.lineage),
            copies.member,
            size(copies.size_bytes),
            copies.chain[:12],
            *(", ".join(cell(one, now) for one in copies.holdings if one.tier == tier) for tier in TIERS),
            "yes" if copies.whole else f"lacks rank {', '.join(map(str, copies.missing))}",
        )
        for copies in found
    ]


def cell(holding: Holding, now: float) -> str:
    """`node-1 (rack=r2) proven 12 s ago`, and the ranks that are not there, or damaged."""
    where = holding.node or "yes"
    domain = f" ({holding.domain})" if holding.domain else ""
    away = [rank for rank in holding.missing if rank not in holding.damaged]
    lacks = f" without rank {', '.join(map(str, away))}" if away else ""
    damaged = f" DAMAGED rank {', '.join(map(str, holding.damaged))}" if holding.damaged else ""
    proven = "" if holding.verified_at is None else f" proven {seconds(max(0.0, now - holding.verified_at))} ago"
    return f"{where}{domain}{lacks}{damaged}{proven}"
