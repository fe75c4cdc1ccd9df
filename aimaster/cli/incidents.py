"""`aimaster incidents`: what failed, why, what was done, and how long it took; with an ID, one of them in full."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from aimaster.cli.exits import UsageError
from aimaster.cli.options import asks_master
from aimaster.cli.reach import find, picture
from aimaster.cli.render import seconds, table
from aimaster.wire.status import IncidentStatus


@click.command()
@click.argument("incident_id", required=False, metavar="[ID]")
@asks_master
@click.option("--json", "as_json", is_flag=True, help="Print as one JSON document.")
def incidents(incident_id: str | None, master: str | None, run_dir: Path | None, as_json: bool) -> None:
    """List what failed and why; with an ID, one incident in full."""
    found = picture(find(master, run_dir, os.environ)).incidents
    if incident_id is None:
        if as_json:
            click.echo(msgspec.json.encode(found).decode())
        elif not found:
            click.echo("no incidents", err=True)
        else:
            table(
                ("incident", "subject", "category", "fault of", "action", "detected", "recovered", "lost"),
                map(row, found),
            )
        return
    one = next((incident for incident in found if incident.incident == incident_id), None)
    if one is None:
        known = ", ".join(incident.incident for incident in found) or "none"
        raise UsageError(f"there is no incident {incident_id}; there are: {known}")
    click.echo(msgspec.json.encode(one).decode() if as_json else "\n".join(story(one)))


def row(incident: IncidentStatus) -> tuple[str, ...]:
    return (
        incident.incident,
        ", ".join((incident.subject, *with_it(incident))) + (" (drill)" if incident.drill else ""),
        incident.verdict.category,
        incident.verdict.fault_of,
        incident.action,
        f"after {seconds(max(0.0, incident.detected_at - incident.occurred_at))}",
        "–"
        if incident.resumed_at is None
        else f"after {seconds(max(0.0, incident.resumed_at - incident.occurred_at))}",
        incident.lost,
    )


def with_it(incident: IncidentStatus) -> tuple[str, ...]:
    """Members other than its subject whose deaths belong to it."""
    return tuple(dict.fromkeys(name for name in incident.deaths if name != incident.subject))


def story(incident: IncidentStatus) -> Iterator[str]:
    """One incident, told from its occurrence to its end, then its evidence."""
    verdict = incident.verdict
    yield f"{incident.incident}: {incident.subject}, {verdict.category} (fault of {verdict.fault_of}, confidence {verdict.confidence:.2f})"
    if verdict.summary:
        yield verdict.summary
    if verdict.advice:
        yield f"advice: {verdict.advice}"
    yield ""
    moments = (
        ("occurred", incident.occurred_at),
        ("detected", incident.detected_at),
        (f"decided: {incident.action}", incident.decided_at),
        ("going on", incident.resumed_at),
        ("healed", incident.healed_at),
    )
    for word, at in moments:
        if at is not None:
            clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
            yield f"  {clock}  {word} (after {seconds(max(0.0, at - incident.occurred_at))})"
    if others := with_it(incident):
        yield f"  with it: {', '.join(others)}"
    yield f"  lost: {incident.lost}"
    for heading, lines in (
        ("evidence", [f"{line.file}:{line.line} {line.text}".strip() for line in verdict.evidence]),
        ("ruled out", [f"{other.category}: {other.why}" for other in verdict.ruled_out]),
        ("candidates", [line.text for line in verdict.candidates]),
        ("traceback", verdict.traceback.splitlines()),
    ):
        if lines:
            yield ""
            yield f"{heading}:"
            yield from (f"  {line}" for line in lines)
