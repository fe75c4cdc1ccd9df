"""Which token comes next: one uniform number per token, from the seed of the completion and the place of the token.

The number is splitmix64 (Steele et al. 2014) of seed and place; the token is where it falls in the cumulative distribution. So a
completion is the same whatever shares its batch, and goes on after an interruption as if there had been none.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_WORD = (1 << 64) - 1


def uniforms(seeds: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return numbers in [0, 1), one per (seed, place)."""
    word = np.array([seed & _WORD for seed in seeds], dtype=np.uint64)
    word = _mix(word) + (np.array(places, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
    return torch.from_numpy((_mix(word) >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(
    word: "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]",
) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint64]]":
    word = (word ^ (word >> np.uint64(30))) * _MIX[0]
    word = (word ^ (word >> np.uint64(27))) * _MIX[1]
    return word ^ (word >> np.uint64(31))


def sample(logits: Tensor, numbers: Tensor, *, temperature: float) -> tuple[list[int], list[float]]:
    """Return a token per row and its log-prob at this temperature; temperature 0 takes the likeliest, with log-probs at 1."""
    logprobs = torch.log_softmax(logits.float() / (temperature or 1.0), -1)
    if temperature == 0.0:
        tokens = logprobs.argmax(-1)
    else:
        cumulative = logprobs.double().exp().cumsum(-1)
        # Scaled by the true total, so that rounding cannot push the number past the last likely token.
        target = numbers[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return tokens.tolist(), logprobs.gather(-1, tokens[:, None]).squeeze(-1).tolist()
