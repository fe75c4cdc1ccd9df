"""A folder with a small random model of transformers, as a user has one: config, weights, and a tokenizer of one token a character."""

from pathlib import Path
from typing import Any

import torch

CHARACTERS = "0123456789=abcdefghijklmnopqrstuvwxyz"


def make_model_folder(folder: Path, *, seed: int = 5, kind: str = "Llama", **sizes: Any) -> Path:
    """Fill the folder and return it; `kind` and `sizes` as transformers names them."""
    import tokenizers
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 48, "tie_word_embeddings": True,
            "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
        } | sizes
    )  # fmt: skip
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        parameter.data.mul_(8.0)  # away from the uniform distribution
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {
        character: place for place, character in enumerate(CHARACTERS, start=3)
    }
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    raw.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="</s>", bos_token="<s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return folder
