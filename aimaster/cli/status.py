"""`aimaster status`: the run now, from the master's one view model; `--json` is that model itself."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from aimaster.cli.exits import DEGRADED, FAILED, FINE
from aimaster.cli.options import asks_master
from aimaster.cli.reach import GONE, find, picture
from aimaster.cli.render import headline, seconds, table
from aimaster.wire.status import JobStatus, MemberStatus

WATCH_SECONDS = 1.0
CLEAR = "\x1b[H\x1b[2J"


@click.command()
@asks_master
@click.option("--json", "as_json", is_flag=True, help="Print the view model as one JSON document.")
@click.option("--watch", is_flag=True, help="Refresh every second until the run ends.")
@click.option("--exit-code", is_flag=True, help="Exit 1 when the job failed, 4 when it is degraded.")
def status(master: str | None, run_dir: Path | None, as_json: bool, watch: bool, exit_code: bool) -> int:
    """Show a run: members, step, reward, snapshots, incidents. Of a run that has ended, its last picture."""
    while True:
        target = find(master, run_dir, os.environ)
        now = picture(target)
        if watch and sys.stdout.isatty():
            sys.stdout.write(CLEAR)
        show(now, as_json=as_json, last=not target.url)
        if not watch or now.state in ("finished", "failed") or not target.url:
            break
        time.sleep(WATCH_SECONDS)
    return code_of(now.state) if exit_code else FINE


def code_of(state: str) -> int:
    """The exit code of a state."""
    return {"failed": FAILED, "degraded": DEGRADED}.get(state, FINE)


def show(now: JobStatus, *, as_json: bool, last: bool = False) -> None:
    if as_json:
        click.echo(msgspec.json.encode(now).decode())
        return
    click.echo(headline(now))
    if last:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now.now))
        click.echo(f"the run has ended; this is its last picture, of {at}")
    if now.kind == "rl":
        click.echo(f"epoch {now.epoch}  lineage {now.lineage}  term {now.term}  up {seconds(now.now - now.started_at)}")
    for finding in now.findings:
        click.echo(f"finding: {finding}")
    click.echo()
    table(("member", "node", "state", "phase", "step", "in", "restarts", "pid"), map(member_row, now.members))
    click.echo()
    table(("node", "state", "agent", "seen"), node_rows(now))


def member_row(member: MemberStatus) -> tuple[str, ...]:
    progress = member.progress if member.state not in GONE else None
    if progress is not None and member.role == "command" and not progress.beats:
        progress = None  # a command that does not report is in no phase that is known
    return (
        member.member,
        member.node,
        member.state,
        progress.phase if progress is not None else "",
        str(progress.step) if progress is not None and progress.step >= 0 else "",
        "yes" if member.in_epoch else "",
        str(member.restarts),
        str(member.process.pid) if member.process is not None else "",
    )


def node_rows(now: JobStatus) -> Iterator[tuple[str, ...]]:
    for node in now.nodes:
        seen = f"{seconds(max(0.0, now.now - node.seen_at))} ago" if node.seen_at else "never"
        yield node.node, node.state, node.url, seen
