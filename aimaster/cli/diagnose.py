"""`aimaster diagnose PATH…`: which node, GPU, rank or process failed first, why, whose fault it is and what to do.

Nothing needs to be deployed: it reads logs, in one pass and with bounded memory. Data goes to standard output (text for people, one JSON document
with --json), talk to standard error. Exit code: 0 nothing wrong, 1 a failure found, 2 usage, 3 cannot tell.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from aimaster.brain.diagnose import diagnose as judge
from aimaster.catalogue import Catalogue, RuleError, load
from aimaster.catalogue.findings import collect
from aimaster.catalogue.flight import LARGEST_BYTES, Dump, compare, may_be_dump, read_dump
from aimaster.catalogue.scan import LogScan
from aimaster.cli.diagnose_candidates import candidates
from aimaster.cli.diagnose_inputs import NotTextError, Unreadable, as_text_bytes, line_number, name_nodes, open_sources
from aimaster.wire.health import Evidence, Finding, Verdict

COUNTED_BYTES = 256 * 1024 * 1024
"""In larger plain files the line numbers of the evidence are counted by a second, partial pass."""
UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
UNEXPLAINED = frozenset({"unknown", "hang.unknown", "process.killed"})
"""Verdicts that leave the cause open: what is new in this attempt is offered to the reader."""
MARKS = {"self": "ROOT", "accusation": "ROOT", "follower": "echo", "benign": "    "}


class Report(msgspec.Struct, kw_only=True):
    """A verdict with what it was drawn from."""

    verdict: Verdict
    findings: list[Finding]
    nodes: list[str]
    frameworks: list[str]
    files: int
    bytes_read: int
    dropped: dict[str, int]
    problems: list[Unreadable]
    empty_window: bool = False
    """Nothing that was found bears a time between --since and --until."""


def read_logs(
    paths: tuple[str, ...], catalogue: Catalogue, problems: list[Unreadable]
) -> tuple[list[LogScan], list[Dump]]:
    """One scan per log with its node named, and the flight recorder dumps that lie among them."""
    scans: list[tuple[tuple[str, str], LogScan]] = []
    dumps: list[tuple[tuple[str, str], Dump]] = []
    binary: list[str] = []
    for source in open_sources(paths, sys.stdin.buffer, problems):
        shown, place = source.name or source.root, (source.root, source.name)
        scan = LogScan(catalogue, node=None, file=shown, count_lines=source.size < COUNTED_BYTES)
        try:
            dump = _read_one(scan, source.chunks)
            if dump is not None:
                dumps.append((place, dump))
        except NotTextError:
            binary.append(shown)
        except (OSError, EOFError) as error:
            problems.append(Unreadable(shown, str(error)))
        scan.finish()
        if scan.bytes_read:
            scans.append((place, scan))
    if binary:
        problems.append(
            Unreadable(f"{len(binary)} file{'s' if len(binary) > 1 else ''}", f"binary: {', '.join(binary[:5])}")
        )
    nodes = name_nodes([place for place, _ in scans] + [place for place, _ in dumps])
    for place, scan in scans:
        scan.node = nodes[place]
        if len({root for root, _ in nodes}) > 1 and place[1]:
            scan.file = f"{place[0].rstrip('/')}/{place[1]}"
    named = [msgspec.structs.replace(dump, node=nodes[place]) for place, dump in dumps]
    return [scan for _, scan in scans], named


def _read_one(scan: LogScan, chunks: Iterator[bytes]) -> Dump | None:
    """Feeds a log to its scan; a flight recorder's dump is returned instead, any other binary file left alone."""
    first = next(chunks, b"")
    if may_be_dump(first):
        held = bytearray(first)
        for chunk in chunks:
            held += chunk
            if len(held) > LARGEST_BYTES:
                break
        first = bytes(held)
        dump = read_dump(first, file=scan.file, node=None) if len(held) <= LARGEST_BYTES else None
        if dump is not None:
            return dump
    for chunk in as_text_bytes(first, chunks, scan.file):
        scan.feed(chunk)
    return None


def examine(
    paths: tuple[str, ...],
    catalogue: Catalogue,
    *,
    now: float,
    since: float | None = None,
    until: float | None = None,
) -> Report:
    """Reads everything and judges it."""
    problems: list[Unreadable] = []
    scans, dumps = read_logs(paths, catalogue, problems)
    said = collect(scans, catalogue.xids, now=now) + compare(dumps)
    findings = [one for one in said if _within(one, since, until)]
    verdict = judge(findings, now)
    verdict = msgspec.structs.replace(
        verdict, evidence=tuple(_with_line(line, scans, paths) for line in verdict.evidence)
    )
    if not scans and not dumps:
        verdict = msgspec.structs.replace(verdict, confidence=0.0, summary="Cannot tell: there is no log to read.")
    empty_window = not any(one.time_seconds is not None for one in findings) and (
        since is not None or until is not None
    )
    if empty_window and verdict.category == "benign":
        verdict = msgspec.structs.replace(verdict, confidence=0.0, summary="Cannot tell: nothing in the window.")
    if verdict.category in UNEXPLAINED:
        verdict = msgspec.structs.replace(verdict, candidates=candidates(paths, scans))
    dropped: dict[str, int] = {}
    for scan in scans:
        for sign, count in scan.dropped.items():
            dropped[sign] = dropped.get(sign, 0) + count
    return Report(
        verdict=verdict,
        findings=findings,
        nodes=sorted({node for node in ({scan.node for scan in scans} | {dump.node for dump in dumps}) if node}),
        frameworks=sorted({hit.sign.source for scan in scans for hit in scan.hits}),
        files=len(scans) + len(dumps),
        bytes_read=sum(scan.bytes_read for scan in scans),
        dropped=dropped,
        problems=problems,
        empty_window=empty_window,
    )


def _with_line(line: Evidence, scans: list[LogScan], paths: tuple[str, ...]) -> Evidence:
    """The evidence with its line number, where the scan did not count lines."""
    scan = next((one for one in scans if one.file == line.file and not one.count_lines), None)
    if line.line or scan is None or not line.text:
        return line
    path = next(
        (place for place in (line.file, *(str(Path(root, line.file)) for root in paths)) if Path(place).is_file()), None
    )
    return line if path is None else msgspec.structs.replace(line, line=line_number(path, line.offset))


def _within(finding: Finding, since: float | None, until: float | None) -> bool:
    at = finding.time_seconds
    return at is None or ((since is None or at >= since) and (until is None or at <= until))


def parse_time(text: str, now: float) -> float:
    """2026-01-31, 2026-01-31T12:00[:00][Z|+08:00], or an age: 90s, 30m, 2h, 1d ago."""
    age = re.fullmatch(r"-?(\d+(?:\.\d+)?)([smhd])(?: ago)?", text.strip())
    if age:
        return now - float(age[1]) * UNIT_SECONDS[age[2]]
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is no time: write 2026-01-31T12:00:00 or an age such as 30m, 2h, 1d"
        ) from error
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()


# -------------------------------------------------------------------------------------------------------------- showing


def as_document(report: Report) -> dict[str, Any]:
    """The JSON document: the verdict's fields first, then what was read."""
    document: dict[str, Any] = msgspec.to_builtins(report.verdict)
    document["read"] = {
        "files": report.files,
        "bytes": report.bytes_read,
        "nodes": report.nodes,
        "frameworks": report.frameworks,
        "statements_beyond_the_limit": report.dropped,
        "unreadable": [problem._asdict() for problem in report.problems],
    }
    return document


def as_text(report: Report, *, explain: bool) -> str:
    """For people: the verdict, what to do, the evidence in order of time, what was ruled out."""
    verdict = report.verdict
    lines = [verdict.summary, ""]
    if verdict.category != "benign":
        lines += [
            f"  category    {verdict.category}",
            f"  fault of    {verdict.fault_of}",
            f"  action      {verdict.action}",
            f"  confidence  {verdict.confidence:.2f}",
            "",
            f"What to do: {verdict.advice}",
        ]
    if verdict.evidence:
        lines += ["", "Evidence, in order of time:", *map(_evidence_line, verdict.evidence)]
    if verdict.traceback:
        lines += ["", *("    " + line for line in verdict.traceback.splitlines()[-25:])]
    if verdict.candidates:
        lines += [
            "",
            "Candidates, with low confidence: lines that no sign knows and that are new in this attempt:",
            *map(_evidence_line, verdict.candidates),
        ]
    if verdict.ruled_out:
        lines += ["", "Ruled out:"]
        for one in verdict.ruled_out if explain else verdict.ruled_out[:8]:
            where = f" on {one.culprit.node}" if one.culprit.node else ""
            lines.append(f"  {one.category}{where}: {one.why}")
            if explain:
                lines += [_evidence_line(line) for line in one.evidence]
    if explain:
        lines += ["", f"All statements ({len(report.findings)}):"]
        lines += [
            f"  {_clock(one.time_seconds)} {one.role:10} {one.weight:3} {one.category:24} {one.sign:28} {one.subject.node or '-'}"
            for one in report.findings
        ]
    read = f"Read {report.files} logs, {report.bytes_read / 1e6:.1f} MB, of {len(report.nodes) or 1} node{'s' if len(report.nodes) > 1 else ''}"
    lines += ["", f"{read}; seen: {', '.join(report.frameworks) or 'no known program'}."]
    if report.dropped:
        total = sum(report.dropped.values())
        lines.append(f"{total} repeated statements of {len(report.dropped)} flooding signs were counted, not kept.")
    lines += [f"Could not read {problem.name}: {problem.why}" for problem in report.problems]
    return "\n".join(lines)


def _evidence_line(line: Evidence) -> str:
    place = f"{line.node}:" if line.node and not line.file.startswith(line.node) else ""
    where = f"{place}{line.file}:{line.line}" if line.line else f"{place}{line.file}"
    text = " ".join(line.text.split())
    return f"  {MARKS[line.role]} {_clock(line.time_seconds)} {where}  {text[:220]}"


def _clock(at: float | None) -> str:
    return "-------- --:--:--" if at is None else datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M:%S")


def exit_code(verdict: Verdict, report: Report) -> int:
    """0 nothing wrong, 1 a failure found, 3 cannot tell."""
    if verdict.category == "unknown" or report.files == 0 or (report.empty_window and verdict.category == "benign"):
        return 3
    return 0 if verdict.action == "ignore" else 1


@click.command(epilog="Exit codes: 0 nothing wrong, 1 a failure found, 2 usage, 3 cannot tell.")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, allow_dash=True))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.option("--explain", is_flag=True, help="Show all statements and the lines of what was ruled out.")
@click.option("--since", metavar="TIME", help="Leave out what happened before: 2026-01-31T12:00, or an age such as 2h.")
@click.option("--until", metavar="TIME", help="Leave out what happened after.")
@click.option(
    "--rules",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Your own signs, retryable errors and signs to switch off (TOML); may be repeated.",
)
def diagnose(
    paths: tuple[str, ...], as_json: bool, explain: bool, since: str | None, until: str | None, rules: tuple[str, ...]
) -> None:
    """Find who failed first, and why, in logs.

    PATHS: a log file, a folder with one folder per node, a Ray session folder, an archive of one (tar, zip, gz, zst), or - for standard input.
    """
    now = time.time()
    try:
        catalogue = load(rules)
    except RuleError as error:
        raise click.UsageError(str(error)) from error
    begin, end = (parse_time(text, now) if text else None for text in (since, until))
    if begin is not None and end is not None and begin > end:
        raise click.UsageError(f"--since {since} is later than --until {until}: nothing lies between them")
    report = examine(paths, catalogue, now=now, since=begin, until=end)
    if as_json:
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(as_document(report)), indent=1) + b"\n")
    else:
        click.echo(as_text(report, explain=explain))
    sys.exit(exit_code(report.verdict, report))


if __name__ == "__main__":
    diagnose()
