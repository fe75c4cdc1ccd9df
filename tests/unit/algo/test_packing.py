"""From samples to micro-batches of padded or packed rows."""

from hypothesis import given
from hypothesis import strategies as st

from aimaster.wire.checkpoint import Version
from aimaster.wire.training import Sample
from rl_runtime.algo.packing import LONGEST_PACK, micro_batches, pack, pad


def sample(prompt, tokens, advantage=1.0, number=0, untrained=0):
    return Sample(
        prompt_id=number,
        index=0,
        prompt_tokens=tuple(range(1, prompt + 1)),
        tokens=tuple(range(100, 100 + tokens)),
        logprobs=tuple(-float(place + 1) for place in range(tokens)),
        versions=(Version(0, 0),) * tokens,
        reward=0.0,
        advantage=advantage,
        untrained=untrained,
    )


def seen(batch):
    """The tokens that each token of a packed row sees, itself included."""
    return [batch.ids[0][row].tolist() for row in batch.layout.visible[0, 0]]


def test_padded_rows_know_what_predicts_each_completion_token():
    """The first is predicted by the prompt's last token, each further one by the token before it."""
    batch = pad([sample(3, 2), sample(1, 1)])
    assert batch.ids.tolist() == [[1, 2, 3, 100, 101], [1, 100, 0, 0, 0]]
    assert batch.ids.flatten()[batch.sources].tolist() == [[3, 100], [1, 1]]
    assert batch.targets.tolist() == [[100, 101], [100, 0]]
    assert batch.mask.tolist() == [[1, 1], [1, 0]]
    assert batch.behaviour.tolist() == [[-1, -2], [-1, 0]]
    assert batch.layout is None


def test_a_packed_row_holds_the_prompt_once():
    """Each completion stands right behind the prompt and sees it and itself, nothing of the others."""
    batch = pack([sample(2, 2, 1.0), sample(2, 3, -1.0)])
    assert batch.ids.tolist() == [[1, 2, 100, 101, 100, 101, 102]]
    assert batch.layout is not None
    assert batch.layout.positions.tolist() == [[0, 1, 2, 3, 2, 3, 4]]
    assert seen(batch) == [
        [1], [1, 2], [1, 2, 100], [1, 2, 100, 101], [1, 2, 100], [1, 2, 100, 101], [1, 2, 100, 101, 102],
    ]  # fmt: skip
    assert batch.sources.tolist() == [[1, 2, 0], [1, 4, 5]]
    assert batch.targets.tolist() == [[100, 101, 0], [100, 101, 102]]
    assert batch.mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.advantages.tolist() == [1, -1]


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.sampled_from([0.0, -1.0, 0.5])), max_size=12),
    st.integers(1, 5),
    st.booleans(),
)
def test_every_token_with_a_gradient_is_in_exactly_one_micro_batch(shapes, rows, packed):
    """Nothing is lost or doubled; samples without advantage or tokens are left out; no micro-batch is larger than asked."""
    samples = [sample(prompt, tokens, advantage) for prompt, tokens, advantage in shapes]
    batches = list(micro_batches(samples, rows=rows, packed=packed))
    assert all(len(batch.advantages) <= rows for batch in batches)
    taught = [one for one in samples if one.advantage and one.tokens]
    found = [
        (advantage, targets[mask.bool()].tolist(), behaviour[mask.bool()].tolist())
        for batch in batches
        for advantage, targets, mask, behaviour in zip(
            batch.advantages.tolist(), batch.targets, batch.mask, batch.behaviour, strict=True
        )
    ]
    assert sorted(found) == sorted((one.advantage, [*one.tokens], [*one.logprobs]) for one in taught)
    widths = [batch.ids.shape[1] for batch in batches]
    assert widths == sorted(widths, reverse=True)


def test_packed_rows_stay_short():
    """Attention costs the square of a row: long completions of one prompt are given several."""
    samples = [sample(100, LONGEST_PACK // 2) for _ in range(5)]
    batches = list(micro_batches(samples, rows=5, packed=True))
    assert [len(batch.advantages) for batch in batches] == [1] * 5
    assert all(batch.ids.shape[1] <= LONGEST_PACK for batch in batches)


def test_untrained_beginnings_are_masked():
    """Such tokens are context of those that follow; a completion of nothing else is left out."""
    samples = [sample(2, 3, untrained=2), sample(2, 3, untrained=3)]
    for packed in (True, False):
        (batch,) = micro_batches(samples, rows=4, packed=packed)
        assert batch.ids.tolist() == [[1, 2, 100, 101, 102]]
        assert batch.mask.tolist() == [[0, 0, 1]]
