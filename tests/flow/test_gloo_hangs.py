"""A real gloo job under `aimaster run`, default settings: minutes each, since torch starts eight times."""

import pytest

from agents.stacks import find_spy
from tests.bench.eyes import measure_hang

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spy() is None, reason="py-spy is not installed"),
]


EARLY, SLOW, VERY_SLOW, FIRST = {"at": 3}, {"at": 12, "step_seconds": 1.5}, {"at": 10, "step_seconds": 2.5}, {"at": 0}


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        *((mode, {}) for mode in ("sleep", "spin", "file", "die", "leave")),
        *((mode, EARLY) for mode in ("sleep", "spin", "file", "die")),
        *((mode, SLOW) for mode in ("sleep", "spin", "file")),
        ("sleep", VERY_SLOW),
        ("sleep", FIRST),
        ("spin", FIRST),
    ],
)
def test_the_guilty_rank_is_named_within_half_a_minute(mode, how):
    """Asleep, spinning, blocked on a file before an all-reduce, dead or gone without a word, early or late, with quick steps or slow ones:
    rank 2 is named, and the job ends well.
    """
    seen = measure_hang(mode, **how)
    assert seen["named"] == "rank-2"
    assert seen["seconds"] < 30
    assert (seen["incidents"], seen["exit_code"]) == (1, 0)


def test_a_first_evaluation_of_a_minute_is_no_incident():
    """All ranks are silent for 60 s in a phase that nobody has learnt: no verdict, nothing is killed."""
    seen = measure_hang("evaluate")
    assert (seen["named"], seen["incidents"], seen["exit_code"]) == (None, 0, 0)
