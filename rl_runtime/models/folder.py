"""Models that transformers loads from a local folder, and their tokenizers. Nothing is fetched from a hub."""

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn

from rl_runtime.algo.packing import Layout
from rl_runtime.models.base import Bundle, ModelFolderError

WEIGHT_FILES = ("*.safetensors", "*.bin")
SHARED_HEADS = "sdpa_shared_heads"
"""Our attention, as transformers knows it."""


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
    if not any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
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
    _share_heads(module)
    module.train(mode=False)  # dropout would make a share's gradient depend on who computes it
    longest = int(getattr(module.config, "max_position_embeddings", max_length))
    return Bundle(model=FolderModel(module, min(max_length, longest)), tokenizer=FolderTokenizer(tokenizer))


class FolderModel:
    """A transformers causal model as the runtime sees it."""

    def __init__(self, module: Any, max_length: int) -> None:
        self.module: nn.Module = module
        self._config: Any = module.config.get_text_config()
        self.max_length = max_length
        self._body: Any = module.base_model
        self._head: Any = module.get_output_embeddings()

    @cached_property
    def lays_out(self) -> bool:
        """Whether packed rows give what separate ones do: asked of the model itself, since not every attention heeds such a mask."""
        kinds = set(getattr(self._config, "layer_types", None) or ())
        if kinds - {"full_attention"} or (not kinds and getattr(self._config, "sliding_window", None)):
            return False
        device = next(self.module.parameters()).device
        ids = torch.arange(3, 10, device=device)[None] % int(self._config.vocab_size)
        visible = torch.ones(7, 7, dtype=torch.bool, device=device).tril()
        visible[5:, 3:5] = False
        places = torch.tensor([[0, 1, 2, 3, 4, 3, 4]], device=device)
        with torch.no_grad():
            try:
                packed = self.hidden(ids, Layout(positions=places, visible=visible[None, None]))[0, 5:]
            except (TypeError, ValueError, RuntimeError):  # a model that knows no positions or no such mask
                return False
            alone = self.hidden(torch.cat([ids[:, :3], ids[:, 5:]], 1))[0, 3:]
        return bool(torch.allclose(packed, alone, rtol=1e-3, atol=1e-4 * float(alone.abs().max())))

    def hidden(self, ids: Tensor, layout: Layout | None = None) -> Tensor:
        # Right padding needs no mask in a causal model: no completion token looks right.
        marks = {} if layout is None else {"attention_mask": layout.visible, "position_ids": layout.positions}
        out: Tensor = self._body(input_ids=ids, use_cache=False, **marks).last_hidden_state
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self._head(hidden)
        return out

    def decode_step(self, **inputs: Any) -> Any:
        """One forward with a cache; returns what transformers returns."""
        return self._body(use_cache=True, **inputs)


def _share_heads(module: Any) -> None:
    """Let decoding use keys and values as they lie in the cache, where transformers repeats them for each query head first."""
    if module.config._attn_implementation != "sdpa":  # noqa: SLF001 - there is no other way to know
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(
        layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any
    ) -> tuple[Tensor, None]:
        rows, heads, length, size = query.shape
        groups = key.shape[1]
        plain = others.get("position_bias") is None and (mask is None or mask.shape[1] == 1)
        if length > 1 or groups == heads or not plain:
            out: tuple[Tensor, None] = sdpa_attention_forward(layer, query, key, value, mask, **others)
            return out
        # The query heads of a group stand as so many tokens of one head: all of them see the same.
        query = query.reshape(rows, groups, heads // groups, size)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=others.get("scaling"))
        return mixed.reshape(rows, 1, heads, -1), None

    AttentionInterface.register(SHARED_HEADS, attend)
    AttentionMaskInterface.register(SHARED_HEADS, sdpa_mask)
    module.set_attn_implementation(SHARED_HEADS)


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
