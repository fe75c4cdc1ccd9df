"""How often to save."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyckpt import shm
from easyckpt.interval import Life, Measured, Pace, choose

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
    pace = Pace(0.0, failure_seconds=60)
    assert pace.flush_interval(0.0).steps == 1
    for step in range(1, 30):
        pace.saw_save(step, step * 0.1)
    pace.saw_flush(2.0)
    assert 20 <= pace.flush_interval(3.0).steps <= 160
    pace.saw_flush(40.0)
    assert pace.flush_interval(3.0).steps > 20


def test_what_a_save_makes_training_wait_is_no_part_of_the_step_and_sets_the_interval_in_memory():
    """Steps of 0.8 s, each save stalls 0.2 s; nothing waited means every step."""
    pace = Pace(0.0, failure_seconds=10.0)
    for step in range(1, 5):
        pace.saw_save(step, float(step))
        pace.saw_stall(0.15)
        pace.saw_stall(0.05)
    chosen = pace.save_interval(5.0)
    assert chosen == choose(Measured(step_seconds=0.8, save_seconds=0.2, failure_seconds=10.0))
    assert chosen.steps > 1
    calm = Pace(0.0)
    for step in range(1, 5):
        calm.saw_save(step, float(step))
    assert calm.save_interval(5.0).steps == 1


def test_failures_are_counted_over_all_processes_of_a_run():
    """A day is taken for granted before there is evidence; every interruption brings the average down, and the interval with it."""
    calm, struck = Pace(0.0), Pace(0.0)
    struck.resume(Life(trained_seconds=3600.0, interruptions=11))
    for pace in (calm, struck):
        for step in range(1, 5):
            pace.saw_save(step, float(step))
        pace.saw_flush(0.2)
    assert calm.life(10.0).failure_seconds == 86_410.0
    assert struck.life(10.0) == Life(trained_seconds=3610.0, interruptions=12)
    assert struck.life(10.0).failure_seconds == pytest.approx((86_400 + 3610) / 13)
    assert struck.flush_interval(10.0).steps < calm.flush_interval(10.0).steps
    assert "a failure comes every" in struck.flush_interval(10.0).reason


def test_a_new_interval_is_news_only_when_it_has_changed_much():
    pace = Pace(0.0)
    assert pace.news(0.0).steps == 1
    assert pace.news(0.0) is None
    for step in range(1, 5):
        pace.saw_save(step, float(step))
    pace.saw_flush(100.0)
    assert pace.news(5.0).steps > 1
    assert pace.news(6.0) is None


def test_the_engine_takes_the_interval_it_measured(folder, tmp_path):
    """With flush_every="auto" the flushes become rarer than the saves once a flush was seen to take longer than a step."""
    import torch

    from easyckpt import Checkpointer

    heard = []
    engine = Checkpointer(tmp_path, folder=folder, flush_every="auto", on_event=heard.append)
    engine.save(1, {"w": torch.ones(3)})
    engine.wait()
    engine._pace.saw_flush(1000.0)
    for step in range(2, 6):
        engine.save(step, {"w": torch.ones(3)})
        engine.wait()
    assert engine.flush_interval.steps > 100
    assert engine.events.counts["flush_committed"] <= 2
    assert engine.events.counts["save_sealed"] == 5
    told = [event.text for event in heard if event.kind == "interval_chosen"]
    assert told[0] == "a flush every 1 steps: every step until a step and a flush were measured"
    assert "a failure comes every" in told[1]
    engine.close()


def test_a_snapshot_carries_how_often_its_run_was_interrupted(folder, tmp_path):
    """A restart that restores counts once; going back in a living process does not."""
    import torch

    from easyckpt import Checkpointer

    state = {"w": torch.ones(3)}
    for interruptions in range(3):
        engine = Checkpointer(folder=folder, member="m", on_event=lambda _event: None)
        assert (engine.restore(state) is None) == (interruptions == 0)
        engine.save(interruptions + 1, state)
        engine.wait()
        engine.restore(state)
        engine.save(interruptions + 2, state)
        engine.wait()
        engine.close()
        assert shm.scan(folder)[0].header.life.interruptions == interruptions
