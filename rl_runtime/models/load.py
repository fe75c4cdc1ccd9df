"""Makes the model a configuration names: a fresh small Llama by its sizes, or a folder by transformers."""

import msgspec

from rl_runtime.models.base import Bundle
from rl_runtime.models.characters import CharacterTokenizer
from rl_runtime.models.tiny import Shape, TinyLlama


class ModelChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which model."""

    shape: Shape | None
    """A fresh one of these sizes (its vocabulary is the character tokenizer's); None: from `folder`."""
    folder: str = ""
    max_length: int
    """Prompt and completion together."""
    seed: int = 0
    """Of the fresh model's first weights."""


def load_model(choice: ModelChoice) -> Bundle:
    """Return the model with its tokenizer; raises ModelFolderError with a message for the user."""
    if choice.shape is not None:
        return Bundle(model=TinyLlama(choice.shape, seed=choice.seed), tokenizer=CharacterTokenizer())
    from rl_runtime.models.folder import load_folder

    return load_folder(choice.folder, max_length=choice.max_length)
