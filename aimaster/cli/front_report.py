"""The summary for people and for programs: a table on stdout, or one JSON document."""

import sys
from collections.abc import Iterator
from typing import TextIO

import msgspec

from aimaster.cli.front_summary import Summary
from aimaster.cli.render import seconds, table


def print_summary(
    summary: Summary, *, as_json: bool, stream: TextIO | None = None, with_traceback: bool = True
) -> None:
    """`with_traceback`: False where it was seen already, in the output of a wrapped command."""
    stream = stream or sys.stdout
    if as_json:
        stream.write(msgspec.json.encode(summary).decode() + "\n")
        stream.flush()
        return
    if with_traceback and summary.failure is not None and summary.failure.traceback:
        stream.write(summary.failure.traceback.rstrip() + "\n\n")
    stream.flush()
    table(("run", summary.name), summary_rows(summary), stream)
    if summary.incidents:
        stream.write("\n")
        # Of a command it is known that its processes run again, not when they have caught up.
        back = "recovered after" if summary.kind == "rl" else "runs again after"
        columns = ("incident", "what", "action", "detected after", back, "lost", "drill")
        table(columns, incident_rows(summary), stream)


def summary_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    """What came of the run, the important things first."""
    yield "outcome", summary.outcome
    if summary.reason:
        yield "reason", summary.reason
    if summary.failure is not None:
        failure = summary.failure
        where = f"{failure.member}" + (f" on {failure.node}" if failure.node else "")
        yield "verdict", failure.category
        yield "culprit", where + (f", rank {failure.rank}" if failure.rank is not None else "")
        if failure.sentence:
            yield "because", failure.sentence
        if failure.advice:
            yield "advice", failure.advice
        for line in failure.candidates:
            yield "candidate", line
    for member, end in summary.children.items():
        yield member, f"signal {end.signal}" if end.signal else f"exit code {end.exit_code}"
    if summary.kind == "rl":
        planned = f" of {summary.steps_planned}" if summary.steps_planned else ""
        yield "steps", f"{summary.steps}{planned}"
        yield "reward before", _number(summary.reward_before)
        yield "reward after", _number(summary.reward_after)
    yield "incidents", str(len(summary.incidents))
    yield "seconds lost" if summary.kind == "rl" else "seconds down", f"{summary.seconds_lost:.1f}"
    yield "took", seconds(summary.seconds) + (f" (start {summary.starts} of this run)" if summary.starts > 1 else "")
    for drill in summary.drills_not_reached:
        yield "drill not reached", drill
    yield "run folder", summary.run_dir


def incident_rows(summary: Summary) -> Iterator[tuple[str, ...]]:
    for line in summary.incidents:
        yield (
            line.incident,
            line.what,
            line.action,
            seconds(line.detected_after_seconds),
            seconds(line.recovered_after_seconds),
            line.lost,
            "drill" if line.drill else "",
        )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
