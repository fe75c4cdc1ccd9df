"""Tokens that completions of one prompt begin with alike although they earned differently: what they teach contradicts itself.

Of such tokens neither completion is trained (`min_filter_prefix_tokens`, as Cosmos-RL does it). Plain numbers, so that the controller
needs no torch.
"""

from collections.abc import Sequence


def untrained_prefixes(
    completions: Sequence[Sequence[int]], advantages: Sequence[float], *, at_least: int
) -> tuple[int, ...]:
    """Return for each completion of a group how many of its first tokens are not trained.

    It is the longest beginning that it shares with one of another advantage; shorter than `at_least` (from 1), it is trained after all.
    """
    lengths = []
    for mine, advantage in zip(completions, advantages, strict=True):
        others = (tokens for tokens, other in zip(completions, advantages, strict=True) if other != advantage)
        longest = max((shared_length(mine, other) for other in others), default=0)
        lengths.append(longest if longest >= max(1, at_least) else 0)
    return tuple(lengths)


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    length = min(len(one), len(other))
    return next((place for place in range(length) if one[place] != other[place]), length)
