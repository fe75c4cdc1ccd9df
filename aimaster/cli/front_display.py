"""What a person sees while a run goes on, on stderr: a progress bar on a terminal, one line now and then elsewhere.

Each incident is told once when it is decided and once when training goes on. No word of it waits for a reader that stands still.
"""

import contextlib
import io
import sys
from typing import TYPE_CHECKING, Protocol, TextIO, cast

from aimaster.cli.front_output import NoteStream
from aimaster.cli.render import console, figures, headline, seconds
from aimaster.wire.status import IncidentStatus, JobStatus
from aimaster.wire.topology import JobPlan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import TaskID

PLAIN_LINE_SECONDS = 10.0


class Display(Protocol):
    def note(self, text: str) -> None:
        """One sentence that stays."""
        ...

    def show(self, status: JobStatus) -> None:
        """The run now."""
        ...

    def close(self) -> None: ...


class PlainDisplay:
    """Lines: at most one every ten seconds, and one at each change of state."""

    def __init__(self, stream: TextIO, *, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet
        """Notes only: a wrapped command speaks for itself."""
        self._said_at = float("-inf")
        self._said: tuple[str, int] | None = None

    def note(self, text: str) -> None:
        # Who reads no more (`2>&1 | head`) does not end the job.
        with contextlib.suppress(BrokenPipeError):
            print(f"aimaster: {text}", file=self._stream, flush=True)

    def show(self, status: JobStatus) -> None:
        now = (status.state, status.step)
        if self._quiet or now == self._said:
            return
        changed = self._said is None or now[0] != self._said[0]
        if changed or status.now - self._said_at >= PLAIN_LINE_SECONDS:
            self.note(headline(status))
            self._said, self._said_at = now, status.now

    def close(self) -> None:
        close_notes(self._stream)


class BarDisplay:
    """A progress bar of rich and the figures below it; notes scroll above."""

    def __init__(self, stream: TextIO) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console(stream)
        self._progress = Progress(*columns, console=self._console)
        self._figures = ""
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._drawn)
        self._task: TaskID | None = None

    def note(self, text: str) -> None:
        self._console.print(f"aimaster: {text}", markup=False)

    def show(self, status: JobStatus) -> None:
        if self._task is None:
            self._task = self._progress.add_task(status.name, total=status.steps)
            self._live.start()
        self._progress.update(self._task, description=f"{status.name} {status.state}", completed=status.step)
        self._figures = "  ".join(figures(status))

    def close(self) -> None:
        if self._task is not None:
            self._live.stop()
        close_notes(self._console.file)

    def _drawn(self) -> "RenderableType":
        from rich.console import Group
        from rich.text import Text

        return Group(self._progress, Text(self._figures, style="cyan"))


def choose_display(plan: JobPlan, stream: TextIO = sys.stderr) -> Display:
    """The bar for a job of ours on a terminal, lines for all else; either closes the stream that it is given here."""
    with contextlib.suppress(io.UnsupportedOperation):  # a stream without a descriptor holds nobody up
        stream.fileno()
        stream = cast("TextIO", NoteStream(stream))
    if plan.kind == "rl" and stream.isatty():
        return BarDisplay(stream)
    return PlainDisplay(stream, quiet=plan.kind == "command")


def close_notes(stream: object) -> None:
    """Let the last words out; a stream that was not made here is left open."""
    if isinstance(stream, NoteStream):
        stream.close()


class IncidentTeller:
    """Tells each incident twice: when it is decided, and when the job goes on."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._decided: set[str] = set()
        self._resumed: set[str] = set()

    def tell(self, status: JobStatus) -> None:
        for incident in status.incidents:
            if incident.incident not in self._decided and incident.decided_at is not None:
                self._decided.add(incident.incident)
                self._display.note(decided_sentence(incident))
            if incident.incident not in self._resumed and incident.resumed_at is not None:
                self._resumed.add(incident.incident)
                self._display.note(resumed_sentence(incident, status.kind))


def decided_sentence(incident: IncidentStatus) -> str:
    verdict = incident.verdict
    rank = f" (rank {verdict.culprit.rank})" if verdict.culprit.rank is not None else ""
    drill = ", a drill" if incident.drill else ""
    story = verdict.summary or "no sign explains it"
    return f"incident {incident.incident}{drill}: {incident.subject}{rank} {verdict.category}: {story} -> {incident.action}"


def resumed_sentence(incident: IncidentStatus, kind: str) -> str:
    """Of a command it is known that its processes run again, not what they had to do again."""
    after = None if incident.resumed_at is None else max(0.0, incident.resumed_at - incident.occurred_at)
    if kind == "command":
        return f"incident {incident.incident}: runs again {seconds(after)} after it"
    return f"incident {incident.incident}: going on {seconds(after)} after it; lost: {incident.lost}"
