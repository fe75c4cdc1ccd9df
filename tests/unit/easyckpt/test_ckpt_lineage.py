"""Which lineage a save belongs to."""

import pytest
import torch

from easyckpt import shm
from easyckpt.agreement import Alone
from easyckpt.errors import Unsupported
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


class Asked(Alone):
    """How often the ranks are asked for what they know."""

    times = 0

    def newest_of_any(self, version):
        self.times += 1
        return version


def test_the_ranks_are_asked_once_whatever_becomes_of_the_first_save(engine):
    """A rank that skips or refuses its first save does not ask again with the second, when the others would not answer."""
    before = engine()
    for step in (1, 2):
        before.save(step, {"w": torch.ones(9)})
        before.wait()
    before.close()
    for segment in shm.scan(before.folder):
        shm.pin(segment.path)
    together = Asked()
    anew = engine(folder=before.folder, ranks_agree=together)
    assert not anew.save(1, {"w": torch.ones(9)})
    with pytest.raises(Unsupported):
        anew.save(2, {"w": object()})
    assert not anew.save(3, {"w": torch.ones(9)})
    assert together.times == 1


def test_a_first_save_that_is_refused_has_asked_already(engine):
    """The other ranks, whose state can be saved, are not left waiting for this one."""
    together = Asked()
    anew = engine(ranks_agree=together)
    with pytest.raises(Unsupported):
        anew.save(1, {"w": object()})
    assert together.times == 1
