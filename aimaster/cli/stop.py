"""`aimaster stop`: asks the master to flush and stop; returns when the wish is accepted, or with --wait when the run has ended.

A run that has ended already is as it was wished: that is said, and the exit code is 0.
"""

import os
import time
from pathlib import Path

import click

from aimaster.cli.exits import FAILED, FINE
from aimaster.cli.options import asks_master
from aimaster.cli.reach import ask_target, find, has_ended, last_picture

WAIT_SECONDS = 120.0


@click.command()
@asks_master
@click.option("--reason", default="aimaster stop", show_default=True, help="Kept in the journal.")
@click.option("--wait", is_flag=True, help="Return when the run has ended.")
def stop(master: str | None, run_dir: Path | None, reason: str, wait: bool) -> int:
    """Flush, then stop a run; the same command resumes it. Of a run that has ended, that is said."""
    target = find(master, run_dir, os.environ)
    if not target.url and target.run is not None:
        last = last_picture(target.run)
        if last is not None and has_ended(target.run):
            click.echo(f"the run has ended already: {last.state} (found by {target.source})", err=True)
            return FINE
    if wait:
        click.echo(f"asking for the stop (found by {target.source})", err=True)
    ask_target(target, "POST", "/v1/stop", {"reason": reason})
    if not wait or target.run is None:
        click.echo(f"stopping (found by {target.source})", err=True)
        return FINE
    deadline = time.monotonic() + WAIT_SECONDS
    while not has_ended(target.run):
        if time.monotonic() > deadline:
            click.echo(f"the run still goes on after {WAIT_SECONDS:.0f} s", err=True)
            return FAILED
        time.sleep(0.2)
    click.echo("the run has ended", err=True)
    return FINE
