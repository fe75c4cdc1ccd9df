"""From samples to padded micro-batches."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from aimaster.wire.checkpoint import Version
from aimaster.wire.training import Sample
from rl_runtime.algo.packing import micro_batches, pad


def sample(prompt, tokens, advantage=1.0, number=0):
    return Sample(
        prompt_id=number,
        index=0,
        prompt_tokens=tuple(range(1, prompt + 1)),
        tokens=tuple(range(100, 100 + tokens)),
        logprobs=tuple(-float(place + 1) for place in range(tokens)),
        versions=(Version(0, 0),) * tokens,
        reward=0.0,
        advantage=advantage,
    )


def test_targets_are_aligned_with_what_the_model_predicts():
    """Mask and log-probs of completion token t stand where the model predicts it: one place before it."""
    batch = pad([sample(3, 2), sample(1, 1)])
    assert batch.ids.tolist() == [[1, 2, 3, 100, 101], [1, 100, 0, 0, 0]]
    assert batch.mask.tolist() == [[0, 0, 1, 1], [1, 0, 0, 0]]
    assert batch.behaviour.tolist() == [[0, 0, -1, -2], [-1, 0, 0, 0]]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.sampled_from([0.0, -1.0, 0.5])), max_size=12),
    st.integers(1, 5),
)
def test_every_token_with_a_gradient_is_in_exactly_one_micro_batch(shapes, rows):
    """Nothing is lost or doubled; samples without advantage or tokens are left out; no micro-batch is larger than asked."""
    samples = [sample(prompt, tokens, advantage) for prompt, tokens, advantage in shapes]
    batches = list(micro_batches(samples, rows=rows))
    assert all(len(batch.ids) <= rows for batch in batches)
    expected = sum(len(one.tokens) for one in samples if one.advantage)
    assert sum(int(batch.mask.sum()) for batch in batches) == expected
    widths = [batch.ids.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)
    assert all(torch.all(batch.advantages != 0.0) for batch in batches)
