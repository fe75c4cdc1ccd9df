"""`aimaster audit RUN`: counts in the ledger of a run folder what was leased, admitted, dealt and trained; read-only, needs no master."""

from pathlib import Path

import click
import msgspec

from aimaster.cli.exits import FAILED, FINE, CommandError, UsageError
from aimaster.cli.render import table
from aimaster.wire.places import RunPlaces


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print as one JSON document.")
def audit(run: Path, as_json: bool) -> int:
    """Check a run's ledger: every prompt trained once, none lost, and every snapshot's hash chain as the ledger's. Exit 1 if not."""
    if not RunPlaces(run).ledger.exists():
        raise UsageError(f"{run} has no ledger: it is no run folder of a training job, or its controller never began")
    from aimaster.journal import JournalError
    from rl_runtime.controller.audit import audit as check

    try:
        report = check(run)
    except JournalError as error:
        raise CommandError(f"the ledger of {run} cannot be read: {error}") from error
    counts = msgspec.to_builtins(report)
    if as_json:
        click.echo(msgspec.json.encode(counts | {"ok": report.ok}).decode())
        return FINE if report.ok else FAILED
    problems = counts.pop("problems")
    table(("what", "count"), [(name.replace("_", " "), str(value)) for name, value in counts.items()])
    for problem in problems:
        click.echo(f"problem: {problem}")
    click.echo("nothing is lost and nothing was trained twice" if report.ok else "the ledger does not add up", err=True)
    return FINE if report.ok else FAILED
