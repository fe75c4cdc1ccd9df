"""From the samples of a share to micro-batches, and back to nothing lost: every completion token is in exactly one.

Two forms. `pad`: a row for each sample, right-padded (a causal model never looks right). `pack`: one row for samples of one prompt,
the prompt once and the completions behind it, each of which sees the prompt and itself: of eight answers to a long prompt, seven
readings of it are saved. Samples whose advantage is zero have no gradient under any loss here; they are left out, and the normaliser,
which travels with the deal, still counts their tokens.
"""

from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from aimaster.wire.training import Sample

LONGEST_PACK = 2048
"""Tokens; what is computed and thrown away in attention grows with the square."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where the tokens of packed rows stand and what they see."""

    positions: Tensor
    """[rows, width]: in a token's own text."""
    visible: Tensor
    """[rows, 1, width, width]: whether the third sees the fourth."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one forward and backward pass. Without a word on them they are [samples, longest completion]."""

    ids: Tensor
    """[rows, width]."""
    layout: Layout | None = None
    """None: a row is one text."""
    sources: Tensor
    """Which token predicts this one, as a place in `ids` laid flat."""
    targets: Tensor
    """The completions' tokens."""
    mask: Tensor
    """1.0 where there is a token to train."""
    behaviour: Tensor
    """The engine's log-probs."""
    advantages: Tensor
    """One per sample."""


def micro_batches(samples: Sequence[Sample], *, rows: int, packed: bool = False) -> Iterator[MicroBatch]:
    """Yield the samples that carry a gradient, `rows` at a time, longest first: what fits once fits always."""
    taught = [sample for sample in samples if sample.advantage != 0.0 and len(sample.tokens) > sample.untrained]
    if packed:
        for pile in _piles(taught, rows):
            yield pack(pile)
        return
    taught.sort(key=lambda sample: -(len(sample.prompt_tokens) + len(sample.tokens)))
    for start in range(0, len(taught), rows):
        yield pad(taught[start : start + rows])


def pad(samples: Sequence[Sample]) -> MicroBatch:
    """Return the samples as right-padded rows."""
    width = max(len(sample.prompt_tokens) + len(sample.tokens) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    for row, sample in enumerate(samples):
        text = sample.prompt_tokens + sample.tokens
        ids[row, : len(text)] = torch.tensor(text)
    begins = [row * width + len(sample.prompt_tokens) for row, sample in enumerate(samples)]
    return _batch(samples, ids, begins, before=[begin - 1 for begin in begins], layout=None)


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """Return samples of one prompt as one row."""
    prompt = samples[0].prompt_tokens
    text, positions, owners, begins = list(prompt), list(range(len(prompt))), [0] * len(prompt), []
    for number, sample in enumerate(samples, start=1):
        begins.append(len(text))
        text += sample.tokens
        positions += range(len(prompt), len(prompt) + len(sample.tokens))
        owners += [number] * len(sample.tokens)
    owner = torch.tensor(owners)
    visible = torch.ones(len(text), len(text), dtype=torch.bool).tril()
    visible &= (owner[None, :] == owner[:, None]) | (owner[None, :] == 0)
    layout = Layout(positions=torch.tensor([positions]), visible=visible[None, None])
    return _batch(samples, torch.tensor([text]), begins, before=[len(prompt) - 1] * len(samples), layout=layout)


def _piles(samples: Sequence[Sample], rows: int) -> list[list[Sample]]:
    """Return samples of one prompt each, at most `rows` and about `LONGEST_PACK` tokens, longest first."""
    piles: list[list[Sample]] = []
    open_piles: dict[tuple[int, ...], tuple[list[Sample], int]] = {}
    for sample in samples:
        pile, width = open_piles.get(sample.prompt_tokens, ([], 0))
        if not pile or len(pile) == rows or width + len(sample.tokens) > LONGEST_PACK:
            pile, width = [], len(sample.prompt_tokens)
            piles.append(pile)
        pile.append(sample)
        open_piles[sample.prompt_tokens] = (pile, width + len(sample.tokens))
    return sorted(piles, key=lambda pile: -len(pile[0].prompt_tokens) - sum(len(one.tokens) for one in pile))


def _batch(
    samples: Sequence[Sample], ids: Tensor, begins: Sequence[int], *, before: Sequence[int], layout: Layout | None
) -> MicroBatch:
    """Return the batch of completions that begin at places in `ids` laid flat, their first tokens predicted at `before`."""
    shape = len(samples), max(len(sample.tokens) for sample in samples)
    sources, targets = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    mask, behaviour = torch.zeros(shape), torch.zeros(shape)
    for row, (sample, begin, first) in enumerate(zip(samples, begins, before, strict=True)):
        count = len(sample.tokens)
        sources[row, :count] = torch.tensor([first, *range(begin, begin + count - 1)])
        targets[row, :count] = torch.tensor(sample.tokens)
        mask[row, sample.untrained : count] = 1.0
        behaviour[row, :count] = torch.tensor(sample.logprobs)
    return MicroBatch(
        ids=ids,
        layout=layout,
        sources=sources,
        targets=targets,
        mask=mask,
        behaviour=behaviour,
        advantages=torch.tensor([sample.advantage for sample in samples]),
    )
