"""Which lineage a save belongs to."""

from easyckpt.layout import Rewind, is_dead
from easyckpt.lineage import History, advance, begin


def test_going_on_keeps_the_lineage():
    history = begin(History(lineage=1, step=5), (1, 5))
    assert advance(history, 6).version == (1, 6)
    assert advance(history, 9).rewinds == ()


def test_starting_anew_beside_an_old_run_begins_a_lineage():
    """A fresh state saved where an older run's step 100 lies is the newest from its first step on."""
    history = advance(begin(History(), (0, 100)), 1)
    assert history.version == (1, 1)
    assert is_dead((0, 100), history.rewinds)


def test_going_back_kills_what_was_above():
    """After a restore of step 5 where 10 was saved, 6 to 10 are dead and 5 is alive."""
    history = advance(begin(History(lineage=0, step=5), (0, 10)), 6)
    assert history.version == (1, 6)
    assert [step for step in range(1, 11) if not is_dead((0, step), history.rewinds)] == [1, 2, 3, 4, 5]
    assert not is_dead((1, 6), history.rewinds)


def test_a_step_saved_twice_lives_once():
    history = advance(advance(History(), 3), 3)
    assert history.version == (1, 3)
    assert is_dead((0, 3), history.rewinds)


def test_the_callers_count_is_taken():
    """A lineage given from outside is kept, and its rise is a going back to where the state came from."""
    history = advance(History(lineage=2, step=7), 8, given=3)
    assert history == History(lineage=3, step=8, rewinds=(Rewind(lineage=3, step=7),))
    assert advance(history, 9, given=3).rewinds == history.rewinds
