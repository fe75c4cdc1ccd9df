"""What a person sees: lines, the bar, tables, and the command's own output."""

import io

import pytest

from aimaster.brain.copies import gather
from aimaster.cli.checkpoints import rows
from aimaster.cli.front_display import BarDisplay, IncidentTeller, PlainDisplay, choose_display
from aimaster.cli.front_plan import plan_command
from aimaster.cli.render import headline, newest_by_tier, seconds, size, table
from aimaster.wire.checkpoint import SnapshotPlace, Tier, Version
from aimaster.wire.health import Verdict
from aimaster.wire.ids import MemberId, NodeId, RunId
from aimaster.wire.status import IncidentStatus, JobStatus


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def place(step: int, tier: Tier, lineage: int = 0, member: str = "policy-0", role: str = "policy") -> SnapshotPlace:
    return SnapshotPlace(
        member=MemberId(member),
        role=role,
        rank=0,
        ranks=1,
        version=Version(lineage, step),
        chain="c" * 32,
        state_digest="d",
        tier=tier,
        node=None if tier == "storage" else NodeId("node-0"),
        name="x",
        size_bytes=2048,
    )


def picture(step=1, now=0.0, state="running", incidents=()) -> JobStatus:
    return JobStatus(
        run_id="0a",
        name="tiny",
        kind="rl",
        state=state,
        started_at=0.0,
        now=now,
        term=1,
        step=step,
        steps=90,
        figures={"reward_mean": 0.25, "tokens_per_second": 900.0, "staleness_mean": 0.5},
        snapshots=(place(step, "shm"), place(step - 1, "peer"), place(0, "storage")),
        incidents=incidents,
    )


def test_the_headline_tells_step_reward_speed_staleness_and_the_newest_snapshot_of_each_tier():
    """One line holds all that a person asks first."""
    assert headline(picture(step=7)) == (
        "tiny running  step 7/90  reward 0.250  900 tokens/s  staleness 0.5  snapshots shm 7 peer 6 storage 0"
    )


def test_newest_counts_lineage_before_step():
    """After a rewind, the newer lineage's step is the newest, though it is smaller; other roles do not count."""
    found = newest_by_tier([place(9, "shm"), place(4, "shm", lineage=1), place(99, "shm", role="rollout")])
    assert found == {"shm": 4}


def test_plain_lines_are_few():
    """Off a terminal a line comes at each change of state, else at most every ten seconds, and never twice the same."""
    stream = io.StringIO()
    display = PlainDisplay(stream)
    for now in range(25):
        display.show(picture(step=now // 2, now=float(now)))
    display.show(picture(step=12, now=25.0, state="finished"))
    lines = stream.getvalue().splitlines()
    assert [line.split("step ")[1].split("/")[0] for line in lines] == ["0", "5", "10", "12"]
    assert all(line.startswith("aimaster: tiny ") for line in lines)


def test_a_wrapped_command_speaks_for_itself():
    """While a command runs, only notes are said."""
    stream = io.StringIO()
    display = PlainDisplay(stream, quiet=True)
    display.show(picture())
    display.note("hello")
    assert stream.getvalue() == "aimaster: hello\n"


def test_the_bar_shows_figures_and_keeps_notes():
    """On a terminal: a bar with the figures behind it, notes above it."""
    stream = Terminal()
    display = BarDisplay(stream)
    display.show(picture(step=7))
    display.note("something [odd]")
    display.close()
    text = stream.getvalue()
    for words in ("tiny running", "7/90", "reward 0.250", "aimaster: something [odd]"):
        assert words in text


def test_the_display_fits_the_job_and_the_stream():
    """The bar is for jobs of ours on a terminal."""
    plan = plan_command(
        ["x"], run_id=RunId("0a"), name="x", cwd="/", front_pid=1, ranks=2, port=1, max_restarts=1, environ={}
    )
    assert isinstance(choose_display(plan, Terminal()), PlainDisplay)


def test_each_incident_is_told_when_decided_and_when_over():
    """However often it is seen."""
    stream = io.StringIO()
    teller = IncidentTeller(PlainDisplay(stream))
    verdict = Verdict(category="process.killed", summary="SIGKILL")

    def seen(decided=None, resumed=None):
        return picture(
            incidents=(
                IncidentStatus(
                    incident="i-1",
                    subject="policy-1",
                    verdict=verdict,
                    action="restart_process",
                    occurred_at=1.0,
                    detected_at=1.0,
                    decided_at=decided,
                    resumed_at=resumed,
                    drill=True,
                ),
            )
        )

    for status in (seen(), seen(2.0), seen(2.0), seen(2.0, 3.5), seen(2.0, 3.5)):
        teller.tell(status)
    assert stream.getvalue().splitlines() == [
        "aimaster: incident i-1, a drill: policy-1 process.killed: SIGKILL -> restart_process",
        "aimaster: incident i-1: going on 2.50 s after it; lost: nothing",
    ]


def test_a_table_off_a_terminal_has_no_colour_and_cuts_nothing():
    """Plain columns, however long."""
    out = io.StringIO()
    table(("name", "state"), [("x" * 300, "dead"), ("y", "running")], out)
    lines = out.getvalue().splitlines()
    assert lines[1] == "x" * 300 + "  dead"
    assert "\x1b" not in out.getvalue()


def test_colour_on_a_terminal_unless_unwanted(monkeypatch):
    """A state word is coloured on a terminal; NO_COLOR is honoured."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = Terminal()
    table(("state",), [("dead",)], coloured)
    assert "\x1b[31m" in coloured.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    table(("state",), [("dead",)], plain)
    assert "\x1b[31m" not in plain.getvalue()


def test_checkpoints_are_listed_newest_first_with_their_tiers():
    """One row a snapshot of a member, with the nodes that hold it."""
    places = [place(3, "shm"), place(3, "storage"), place(2, "peer"), place(1, "shm", lineage=1)]
    found = rows(gather(places, {}), 0.0)
    assert [(row[0], row[1], *row[5:]) for row in found] == [
        ("1", "1", "node-0", "", "", "yes"),
        ("3", "0", "node-0", "", "yes", "yes"),
        ("2", "0", "", "node-0", "", "yes"),
    ]


@pytest.mark.parametrize(("value", "shown"), [(None, "–"), (0.123, "0.12 s"), (45.6, "46 s"), (150.0, "2 min 30 s")])
def test_durations(value, shown):
    """Short ones with two digits, long ones in minutes."""
    assert seconds(value) == shown


@pytest.mark.parametrize(("count", "shown"), [(0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (5 << 40, "5.0 TiB")])
def test_sizes(count, shown):
    """In the largest unit below."""
    assert size(count) == shown


def test_a_narrow_terminal_gets_a_list(monkeypatch):
    """Below sixty columns each cell has a line of its own, with its heading; empty cells are left out."""
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    table(("member", "state", "phase"), [("policy-0", "running", "compute"), ("policy-1", "dead", "")], out)
    assert out.getvalue().splitlines() == [
        "member: policy-0",
        "  state: running",
        "  phase: compute",
        "member: policy-1",
        "  state: dead",
    ]
    pair = Terminal()
    table(("run", "tiny"), [("outcome", "finished")], pair)
    assert pair.getvalue() == "outcome: finished\n"
