"""`aimaster stop`: asks the master to flush and stop; returns when the wish is accepted, or with --wait when the run has ended."""

import os
import time
from pathlib import Path

import click

from aimaster.cli.exits import FAILED, FINE
from aimaster.cli.options import asks_master
from aimaster.cli.reach import alive, ask_target, find, read_master

WAIT_SECONDS = 120.0


@click.command()
@asks_master
@click.option("--reason", default="stopped by an operator", show_default=True, help="Kept in the journal.")
@click.option("--wait", is_flag=True, help="Return when the run has ended.")
def stop(master: str | None, run_dir: Path | None, reason: str, wait: bool) -> int:
    """Flush, then stop a run; the same command resumes it."""
    target = find(master, run_dir, os.environ)
    ask_target(target, "POST", "/v1/stop", {"reason": reason})
    click.echo(f"stopping (found by {target.source})", err=True)
    if not wait or target.run is None:
        return FINE
    deadline = time.monotonic() + WAIT_SECONDS
    while alive(read_master(target.run)):
        if time.monotonic() > deadline:
            click.echo(f"the run still goes on after {WAIT_SECONDS:.0f} s", err=True)
            return FAILED
        time.sleep(0.2)
    return FINE
