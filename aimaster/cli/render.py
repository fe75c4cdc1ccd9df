"""Tables and lines for people, made from the one view model. rich is imported when the first table is drawn.

On a terminal: colours (unless NO_COLOR) and its width. Elsewhere: plain text, no line cut.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from aimaster.wire.checkpoint import SnapshotPlace
from aimaster.wire.status import JobStatus

if TYPE_CHECKING:
    from rich.console import Console

PLAIN_WIDTH = 10_000
NARROW_WIDTH = 60
"""On a narrower terminal a table is a list of its cells."""
TIERS = ("shm", "peer", "storage")
STATE_COLOURS = {
    "running": "green",
    "connected": "green",
    "finished": "green",
    "starting": "yellow",
    "degraded": "yellow",
    "suspected": "yellow",
    "silent": "yellow",
    "stopping": "yellow",
    "stopped": "yellow",
    "dead": "red",
    "lost": "red",
    "failed": "red",
}


def console(stream: TextIO | None = None) -> "Console":
    """The console of rich on a stream; it honours NO_COLOR by itself."""
    from rich.console import Console

    stream = stream or sys.stdout
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, width=PLAIN_WIDTH, no_color=True, force_terminal=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], stream: TextIO | None = None) -> None:
    """Print rows under headings; a cell that is a known state word takes its colour. On a narrow terminal, each cell has its line."""
    from rich.table import Table
    from rich.text import Text

    out = console(stream)
    if out.width < NARROW_WIDTH:
        out.file.writelines(f"{line}\n" for line in cells(columns, rows))
        out.file.flush()
        return
    drawn = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        drawn.add_column(column, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell, style=STATE_COLOURS.get(cell, "")) for cell in row))
    with out.capture() as captured:
        out.print(drawn)
    # rich pads every line to the width of the table.
    for line in captured.get().splitlines():
        out.file.write(line.rstrip() + "\n")
    out.file.flush()


def cells(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """`heading: cell` lines, a row's others below its first; empty cells are left out. A table of two columns names its own rows."""
    for row in rows:
        if len(columns) == 2:
            yield f"{row[0]}: {row[1]}"
            continue
        shown = [f"{column}: {cell}" for column, cell in zip(columns, row, strict=True) if cell]
        yield from (line if position == 0 else f"  {line}" for position, line in enumerate(shown))


def seconds(value: float | None) -> str:
    """A duration with a digit or two where it is short."""
    if value is None:
        return "–"
    if value < 10:
        return f"{value:.2f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value // 60:.0f} min {value % 60:.0f} s"


def size(count: float) -> str:
    """Bytes in the largest unit below them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def newest_by_tier(snapshots: Iterable[SnapshotPlace]) -> dict[str, int]:
    """The newest step that lies in each tier."""
    newest: dict[str, SnapshotPlace] = {}
    for place in snapshots:
        if place.role == "policy" and (place.tier not in newest or place.version > newest[place.tier].version):
            newest[place.tier] = place
    return {tier: newest[tier].version.step for tier in TIERS if tier in newest}


def headline(status: JobStatus) -> str:
    """The run in one line: state, step, and the figures that are known."""
    total = f"/{status.steps}" if status.steps else ""
    parts = [f"{status.name} {status.state}"]
    if status.kind == "rl":
        parts.append(f"step {status.step}{total}")
        parts += figures(status)
    restarts = sum(member.restarts for member in status.members)
    if restarts:
        parts.append(f"restarts {restarts}")
    if status.incidents:
        parts.append(f"incidents {len(status.incidents)}")
    return "  ".join(parts) + (f"  ({status.reason})" if status.reason else "")


def figures(status: JobStatus) -> list[str]:
    """Reward, speed, staleness and the newest snapshot of each tier, as far as they are known."""
    known = status.figures
    parts = []
    if "reward_mean" in known:
        parts.append(f"reward {known['reward_mean']:.3f}")
    if "tokens_per_second" in known:
        parts.append(f"{known['tokens_per_second']:.0f} tokens/s")
    if "staleness_mean" in known:
        parts.append(f"staleness {known['staleness_mean']:.1f}")
    tiers = newest_by_tier(status.snapshots)
    if tiers:
        parts.append("snapshots " + " ".join(f"{tier} {step}" for tier, step in tiers.items()))
    return parts
