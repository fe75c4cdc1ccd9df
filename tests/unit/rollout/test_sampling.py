"""Sampling from the seed of a completion and the place of a token."""

import torch

from rl_runtime.rollout.sampling import sample, uniforms


def test_numbers_depend_on_seed_and_place_alone():
    """Neighbours in a batch change nothing."""
    alone = uniforms([7], [3])
    together = uniforms([1, 7, 9], [0, 3, 3])
    assert float(alone) == float(together[1])
    assert len({float(number) for number in uniforms([7] * 100 + list(range(100)), [*range(100), *[0] * 100])}) >= 199


def test_numbers_are_uniform():
    """Mean and spread over many seeds and places are those of the uniform distribution."""
    numbers = uniforms(
        [seed for seed in range(200) for _ in range(50)], [place for _ in range(200) for place in range(50)]
    )
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    assert abs(float(numbers.var()) - 1 / 12) < 0.002


def test_tokens_come_with_their_frequency_and_logprob():
    """Each token is drawn as often as its probability at the temperature says, and its log-prob is that probability's."""
    logits = torch.tensor([[0.0, 1.0, 2.0, float("-inf")]])
    probabilities = torch.softmax(logits[0] / 0.7, -1)
    tokens, logprobs = sample(logits.expand(20_000, 4), uniforms(range(20_000), [0] * 20_000), temperature=0.7)
    counts = torch.bincount(torch.tensor(tokens), minlength=4) / 20_000
    assert torch.allclose(counts, probabilities, atol=0.015)
    assert counts[3] == 0.0
    assert torch.allclose(torch.tensor(logprobs), probabilities[tokens].log(), atol=1e-5)


def test_temperature_zero_takes_the_likeliest():
    """Greedy decoding needs no luck."""
    tokens, _ = sample(torch.tensor([[0.1, 3.0, 2.0]]), uniforms([5], [0]), temperature=0.0)
    assert tokens == [1]
