"""The front's own small decisions."""

import msgspec

from aimaster.cli.front import with_known_figures
from aimaster.wire.status import JobStatus

OLD = JobStatus(
    run_id="0a",
    name="tiny",
    kind="rl",
    state="running",
    started_at=0.0,
    now=5.0,
    term=1,
    epoch=2,
    step=7,
    figures={"reward_mean": 0.5},
    controller_url="http://127.0.0.1:1",
)
UNHEARD = JobStatus(run_id="0a", name="tiny", kind="rl", state="degraded", started_at=0.0, now=6.0, term=2)


def test_a_new_master_that_has_not_heard_the_controller_does_not_set_the_run_back():
    """Step, epoch and figures stay as the master before knew them, for as long as the new one has heard nothing; all else is new."""
    once = with_known_figures(UNHEARD, OLD)
    twice = with_known_figures(msgspec.structs.replace(UNHEARD, now=7.0), once)
    assert (twice.step, twice.epoch, twice.figures) == (7, 2, {"reward_mean": 0.5})
    assert (twice.state, twice.now, twice.term) == ("degraded", 7.0, 2)


def test_what_the_controller_says_counts():
    """A step that a heard controller tells is believed, a smaller one too: after a rewind it is the truth."""
    heard = msgspec.structs.replace(UNHEARD, step=3, controller_url="http://127.0.0.1:2")
    assert with_known_figures(heard, OLD) is heard
    assert with_known_figures(UNHEARD, None) is UNHEARD
