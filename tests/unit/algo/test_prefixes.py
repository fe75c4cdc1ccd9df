"""Beginnings that completions of different advantage share are not trained."""

from hypothesis import given
from hypothesis import strategies as st

from rl_runtime.algo.prefixes import shared_length, untrained_prefixes


def test_a_beginning_shared_by_good_and_bad_is_not_trained():
    """Of each as much as it shares with any of the other kind."""
    completions = [(1, 2, 3), (1, 2, 4), (1, 5), (6,)]
    assert untrained_prefixes(completions, [1.0, -1.0, -1.0, -1.0], at_least=1) == (2, 2, 1, 0)


def test_those_that_earned_alike_contradict_nothing():
    """Equal completions of equal advantage are trained whole."""
    assert untrained_prefixes([(1, 2), (1, 2)], [0.5, 0.5], at_least=1) == (0, 0)


def test_short_beginnings_are_trained_after_all():
    """Below the least length nothing is left out; from it on, all of it is."""
    completions, advantages = [(1, 2, 3), (1, 2, 4)], [1.0, -1.0]
    assert untrained_prefixes(completions, advantages, at_least=3) == (0, 0)
    assert untrained_prefixes(completions, advantages, at_least=2) == (2, 2)
    assert untrained_prefixes(completions, advantages, at_least=0) == (2, 2)


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=5), st.sampled_from([-1.0, 1.0])), max_size=8))
def test_no_trained_token_follows_a_text_that_another_contradicts(group):
    """Two completions that train a token at the same place after the same text, itself included, have the same advantage."""
    completions, advantages = [tuple(tokens) for tokens, _ in group], [advantage for _, advantage in group]
    untrained = untrained_prefixes(completions, advantages, at_least=1)
    trained: dict[tuple[int, ...], set[float]] = {}
    for tokens, advantage, skipped in zip(completions, advantages, untrained, strict=True):
        assert 0 <= skipped <= len(tokens)
        for end in range(skipped + 1, len(tokens) + 1):
            trained.setdefault(tokens[:end], set()).add(advantage)
    assert all(len(found) == 1 for found in trained.values())


def test_shared_length():
    """Up to the first difference, or the end of the shorter."""
    assert [shared_length((1, 2), other) for other in ((), (1,), (1, 2, 3), (2, 2))] == [0, 1, 2, 0]
