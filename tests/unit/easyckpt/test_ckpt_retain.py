"""What may be overwritten or deleted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyckpt.layout import Rewind
from easyckpt.retain import SlotState, choose_slot, newest_whole, to_delete


def rank(*slots):
    """A rank's slots: a step, None for unsealed, a step in a list for pinned."""
    return [
        SlotState(
            slot=i,
            version=None if s in (None, [None]) else (0, s[0] if isinstance(s, list) else s),
            pinned=isinstance(s, list),
        )
        for i, s in enumerate(slots)
    ]


@pytest.mark.parametrize(
    ("own", "others", "chosen"),
    [
        (rank(None, None), [], 0),  # a new engine
        (rank(1, None), [], 1),  # the free one
        (rank(1, 2), [], 0),  # the older one
        (rank(3, 2), [], 1),
        (rank([1], 2), [], 1),  # the pinned one counts as the whole one
        (rank(1, [2]), [], 0),
        (rank([1], [2]), [], None),
        (rank([None], 2), [], None),  # the only whole one stays
        (rank(2, 2), [], 0),  # the same step twice: one of the two is enough
        (rank([2], 2), [], 1),
        (rank(1), [], 0),  # one slot: its owner accepted the risk
        (rank([1]), [], None),
        (rank(1, 2), [rank(1, 2)], 0),
        (rank(1, 2), [rank(1, None)], None),  # step 2 is not whole yet, step 1 is the only whole one
        (rank(3, 2), [rank(1, 2)], None),  # ahead of the other rank: step 3 may still become whole
        (rank(1, 2), [rank(1, 3)], 1),  # step 2 can never become whole
        (rank([1], 2), [rank([1], 2)], 1),
        (rank([1], 2), [rank(1, 2)], None),  # pinned on one rank only: it might go on the other
        (rank(1, None), [[]], 1),
        (rank(1, 2), [[]], None),
    ],
)
def test_which_slot_may_be_overwritten(own, others, chosen):
    assert choose_slot(own, others) == chosen


@given(st.data(), st.integers(1, 3), st.integers(2, 3))
def test_a_whole_step_is_never_lost(data, ranks, slots):
    """Ranks that save, fall behind, are pinned, unpinned and killed in any order keep a whole step once there was one, and never go back."""
    held = [[None] * slots for _ in range(ranks)]
    pins: set[int] = set()
    steps = [0] * ranks
    newest = None

    def states(r):
        return [SlotState(slot=i, version=v and (0, v), pinned=v in pins) for i, v in enumerate(held[r])]

    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["save", "save", "save", "killed", "pin", "unpin"]))
        r = data.draw(st.integers(0, ranks - 1))
        if action == "pin" and newest is not None:
            pins = {newest}
        elif action == "unpin":
            pins = set()
        elif action in ("save", "killed"):
            if steps[r] > min(steps):
                continue  # ranks of one member step together
            steps[r] += 1
            slot = choose_slot(states(r), [states(other) for other in range(ranks) if other != r])
            if slot is not None:
                held[r][slot] = None if action == "killed" else steps[r]
        whole = newest_whole([states(r) for r in range(ranks)])
        if newest is not None:
            assert whole is not None
            assert whole >= (0, newest) or whole[1] in pins
        newest = whole[1] if whole else newest


def test_the_newest_checkpoint_is_never_deleted():
    assert to_delete([(0, 1)], keep=1) == []
    assert to_delete([], keep=1) == []
    assert to_delete([(0, 1), (0, 2)], keep=0) == [(0, 1)]


@pytest.mark.parametrize(
    ("keep", "keep_every", "gone"),
    [(2, None, [1, 2, 3, 4]), (2, 3, [1, 2, 4]), (6, None, []), (1, 2, [1, 3, 5])],
)
def test_retention_keeps_the_newest_and_the_multiples(keep, keep_every, gone):
    versions = [(0, step) for step in range(1, 7)]
    assert to_delete(versions, keep=keep, keep_every=keep_every) == [(0, step) for step in gone]


def test_a_dead_branch_goes_first():
    """What a later lineage went back behind is no checkpoint any more: it neither stays nor counts."""
    versions = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert to_delete(versions, keep=3, rewinds=[Rewind(lineage=1, step=1)]) == [(0, 2), (0, 3)]
    assert to_delete([(0, 2), (0, 3)], keep=1, rewinds=[Rewind(lineage=1, step=1)]) == []


def test_what_a_run_that_began_from_nothing_found_stays_but_for_its_newest():
    """Perhaps somebody forgot to restore it; `easyckpt gc` lets it go."""
    versions, anew = [(0, 98), (0, 99), (0, 100), (1, 1), (1, 2)], [Rewind(lineage=1, step=0)]
    assert to_delete(versions, keep=1, rewinds=anew) == [(0, 98), (0, 99), (1, 1)]
    assert to_delete(versions, keep=1, rewinds=anew, keep_abandoned=False) == [(0, 98), (0, 99), (0, 100), (1, 1)]
