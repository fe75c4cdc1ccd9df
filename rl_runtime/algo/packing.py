"""From the samples of a share to padded micro-batches, and back to nothing lost: every completion token is in exactly one.

Rows are right-padded (a causal model never looks right). Rows of similar length share a micro-batch, since padding costs what
tokens cost. Samples whose advantage is zero have no gradient under any loss here; they are left out, and the normaliser, which
travels with the deal, still counts their tokens.
"""

from collections.abc import Iterator, Sequence

import msgspec
import torch
from torch import Tensor

from aimaster.wire.training import Sample


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors of one forward and backward pass; the last three are aligned with `ids[:, 1:]`, what the model predicts."""

    ids: Tensor
    mask: Tensor
    """1.0 on completion tokens."""
    behaviour: Tensor
    """The engine's log-probs, 0 elsewhere."""
    advantages: Tensor
    """One per row."""


def micro_batches(samples: Sequence[Sample], *, rows: int) -> Iterator[MicroBatch]:
    """Yield the samples that carry a gradient, `rows` at a time, longest first: what fits once fits always."""
    taught = [sample for sample in samples if sample.advantage != 0.0 and sample.tokens]
    taught.sort(key=lambda sample: -(len(sample.prompt_tokens) + len(sample.tokens)))
    for start in range(0, len(taught), rows):
        yield pad(taught[start : start + rows])


def pad(samples: Sequence[Sample]) -> MicroBatch:
    """Return the samples as one right-padded batch."""
    width = max(len(sample.prompt_tokens) + len(sample.tokens) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    mask = torch.zeros(len(samples), width - 1)
    behaviour = torch.zeros(len(samples), width - 1)
    for row, sample in enumerate(samples):
        begin = len(sample.prompt_tokens)
        end = begin + len(sample.tokens)
        ids[row, :end] = torch.tensor(sample.prompt_tokens + sample.tokens)
        mask[row, begin - 1 : end - 1] = 1.0
        behaviour[row, begin - 1 : end - 1] = torch.tensor(sample.logprobs)
    advantages = torch.tensor([sample.advantage for sample in samples])
    return MicroBatch(ids=ids, mask=mask, behaviour=behaviour, advantages=advantages)
