"""How often to save."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyckpt.interval import Measured, Pace, choose

seconds = st.floats(1e-3, 1e4)


@pytest.mark.parametrize(
    ("measured", "steps", "reason"),
    [
        (Measured(step_seconds=1, save_seconds=0), 1, "next to nothing"),
        (Measured(step_seconds=1, save_seconds=0.5, failure_seconds=3600), 60, "failure comes every"),
        (Measured(step_seconds=0.1, save_seconds=0.001, busy_seconds=5, failure_seconds=1), 50, "one takes 5 s"),
        (Measured(step_seconds=1, save_seconds=2, failure_seconds=10), 100, "2% of the time"),
        (Measured(step_seconds=1e-6, save_seconds=100), 10_000, "no less often"),
    ],
)
def test_the_interval_follows_from_what_was_measured_and_says_why(measured, steps, reason):
    answer = choose(measured)
    assert answer.steps == steps
    assert reason in answer.reason


@given(seconds, seconds, seconds, seconds)
def test_dearer_saves_come_less_often_and_more_failures_make_them_more_frequent(step, save, busy, failure):
    base = choose(Measured(step_seconds=step, save_seconds=save, busy_seconds=busy, failure_seconds=failure)).steps
    assert (
        choose(Measured(step_seconds=step, save_seconds=2 * save, busy_seconds=busy, failure_seconds=failure)).steps
        >= base
    )
    assert (
        choose(Measured(step_seconds=step, save_seconds=save, busy_seconds=busy, failure_seconds=failure / 4)).steps
        <= base
    )
    assert base * step >= min(busy, 10_000 * step) * 0.999


def test_a_run_measures_its_own_pace():
    """Steps of 0.1 s and flushes of 2 s: no more often than every 20 steps, said so."""
    pace = Pace(failure_seconds=60)
    assert pace.interval.steps == 1
    for step in range(1, 30):
        pace.saw_save(step, step * 0.1)
    pace.saw_flush(2.0)
    assert 20 <= pace.interval.steps <= 160
    pace.saw_flush(40.0)
    assert pace.interval.steps > 20


def test_the_engine_takes_the_interval_it_measured(folder, tmp_path):
    """With flush_every="auto" the flushes become rarer than the saves once a flush was seen to take longer than a step."""
    import torch

    from easyckpt import Checkpointer

    engine = Checkpointer(tmp_path, folder=folder, flush_every="auto")
    engine.save(1, {"w": torch.ones(3)})
    engine.wait()
    engine._pace.saw_flush(1000.0)
    for step in range(2, 6):
        engine.save(step, {"w": torch.ones(3)})
        engine.wait()
    assert engine.flush_interval.steps > 100
    assert engine.events.counts["flush_committed"] <= 2
    assert engine.events.counts["save_sealed"] == 5
    engine.close()
