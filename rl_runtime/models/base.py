"""What the runtime asks of a model and of a tokenizer, so that the training loop knows neither transformers nor the small Llama.

Names of parameters are those of the Hugging Face checkpoint, so that snapshots and model folders speak of the same tensors.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from torch import Tensor, nn

from rl_runtime.algo.packing import Layout


class ModelFolderError(Exception):
    """The model cannot be made: a missing folder, a folder without weights, sizes that do not fit. A message for the user."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    vocab_size: int
    eos: int
    """The token that ends a completion."""

    def encode(self, text: str, *, opening: bool = True) -> list[int]:
        """Return tokens; `opening` puts the model's first token, where it has one, before them."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text up to the end token."""
        ...


class CausalModel(Protocol):
    """A model in two halves, so that logits are made only where they are needed."""

    max_length: int
    """Longest prompt and completion together."""

    @property
    def lays_out(self) -> bool:
        """Return whether `hidden` heeds a layout."""
        ...

    @property
    def module(self) -> nn.Module:
        """Return what holds the parameters, under their checkpoint names."""
        ...

    def hidden(self, ids: Tensor, layout: Layout | None = None) -> Tensor:
        """Return the last hidden states [rows, tokens, width] of right-padded rows, or of packed ones with their layout."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return next-token logits of hidden states of any leading shape."""
        ...


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """A model with its tokenizer."""

    model: CausalModel
    tokenizer: Tokenizer
