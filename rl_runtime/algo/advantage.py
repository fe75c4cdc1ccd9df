"""Advantages within a group of completions of one prompt. Plain numbers, so that the controller needs no torch.

GRPO (Shao et al. 2024):     A_i = (r_i - mean(r)) / std(r)
Dr.GRPO (Liu et al. 2025):   A_i = r_i - mean(r)
DAPO (Yu et al. 2025):       groups without spread are dropped (`has_spread`), and answers that run into the length limit
                             lose up to a penalty (`overlong_penalty`, its equation 13)
"""

from collections.abc import Sequence

SPREAD = 1e-8
"""Rewards closer than this are equal."""
GUARD = 1e-4
"""Added to the deviation, so that a group of nearly equal rewards has no huge advantages."""


def group_advantages(
    rewards: Sequence[float], *, unbiased: bool = False, lowest: float = -5.0, highest: float = 5.0
) -> tuple[float, ...]:
    """Return one advantage per completion; all zero where the group has no spread. `unbiased` is Dr.GRPO's form."""
    if not has_spread(rewards):
        return (0.0,) * len(rewards)
    mean = sum(rewards) / len(rewards)
    deviation = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    scale = 1.0 if unbiased else 1.0 / (deviation + GUARD)
    return tuple(min(highest, max(lowest, (reward - mean) * scale)) for reward in rewards)


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether a group teaches anything at all."""
    return bool(rewards) and max(rewards) - min(rewards) > SPREAD


def overlong_penalty(tokens: int, *, longest: int, buffer: int, factor: float) -> float:
    """Return what a completion of `tokens` loses (0 or below): a ramp over the last `buffer` tokens before `longest`."""
    over = tokens - (longest - buffer)
    return 0.0 if over <= 0 else -min(1.0, over / buffer) * factor
