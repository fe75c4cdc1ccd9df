"""Models that transformers loads from a local folder, and their tokenizers. Nothing is fetched from a hub."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_runtime.models.base import Bundle, ModelFolderError

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


def check_folder(path: str) -> Path:
    """Return the folder, or say in one sentence why it is no model."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        hint = (
            "run `make model`, which makes it"
            if "smollm2" in path.lower()
            else "give policy.model_name_or_path a local folder; nothing is fetched from a hub"
        )
        raise ModelFolderError(f"no model folder at {folder}: {hint}")
    if not (folder / "config.json").is_file():
        raise ModelFolderError(f"{folder} holds no config.json: it is no Hugging Face model folder")
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES[:2]):
        raise ModelFolderError(f"{folder} holds no weights (no *.safetensors): give a whole model folder")
    return folder


def load_folder(path: str, *, max_length: int) -> Bundle:
    """Load model and tokenizer in float32."""
    folder = check_folder(path)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]  # a member's output is a log

    try:
        module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelFolderError(f"transformers cannot load {folder}: {error}") from error
    module.train(mode=False)  # dropout would make a share's gradient depend on who computes it
    longest = int(getattr(module.config, "max_position_embeddings", max_length))
    return Bundle(model=FolderModel(module, min(max_length, longest)), tokenizer=FolderTokenizer(tokenizer))


class FolderModel:
    """A transformers causal model as the runtime sees it."""

    def __init__(self, module: Any, max_length: int) -> None:
        self.module: nn.Module = module
        self.max_length = max_length
        self._body: Any = module.base_model
        self._head: Any = module.get_output_embeddings()

    def hidden(self, ids: Tensor) -> Tensor:
        # Right padding needs no mask in a causal model: no completion token looks right.
        out: Tensor = self._body(input_ids=ids, use_cache=False).last_hidden_state
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self._head(hidden)
        return out

    def decode_step(self, **inputs: Any) -> Any:
        """One forward with a cache; returns what transformers returns."""
        return self._body(use_cache=True, **inputs)


class FolderTokenizer:
    """A transformers tokenizer as the runtime sees it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = len(tokenizer)
        if tokenizer.eos_token_id is None:
            raise ModelFolderError(f"the tokenizer of {tokenizer.name_or_path} names no end token")
        self.eos = int(tokenizer.eos_token_id)

    def encode(self, text: str, *, opening: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=opening))

    def decode(self, tokens: Sequence[int]) -> str:
        kept = list(tokens)
        if self.eos in kept:
            kept = kept[: kept.index(self.eos)]
        return str(self._tokenizer.decode(kept, skip_special_tokens=True))
