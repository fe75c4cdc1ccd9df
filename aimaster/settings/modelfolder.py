"""What is wrong with a Hugging Face model folder, as far as its names, sizes and headers tell; no tensor is read."""

from pathlib import Path
from typing import Final

import orjson

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf")
LENGTH_BYTES: Final = 8
"""A safetensors file begins with the length of its header."""
LONGEST_HEADER_BYTES: Final = 100_000_000
"""The format's own bound."""


def model_trouble(folder: Path) -> str | None:
    """Why a model cannot be loaded from the folder, with what to do; None when nothing speaks against it."""
    if not (folder / "config.json").is_file():
        return f"{folder} holds no config.json: name a Hugging Face model folder"
    files = sorted(file for pattern in WEIGHTS for file in folder.glob(pattern))
    if not files:
        return f"{folder} holds no weights ({', '.join(WEIGHTS)}): download them into it"
    if (text := _config_trouble(folder / "config.json")) is not None:
        return f"{folder / 'config.json'} {text}: name a whole Hugging Face model folder"
    for index in sorted(folder.glob("*.index.json")):
        if missing := [name for name in _shards(index) if not (folder / name).is_file()]:
            return f"{folder} lacks {', '.join(missing[:3])}, which {index.name} names: download them into it"
    for file in files:
        if (text := _weights_trouble(file)) is not None:
            return f"{file} {text}: download it again"
    return None


def _config_trouble(file: Path) -> str | None:
    try:
        config = orjson.loads(file.read_bytes())
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except orjson.JSONDecodeError as error:
        return f"is no JSON ({error})"
    kind = config.get("model_type") if isinstance(config, dict) else None
    return None if isinstance(kind, str) and kind else "names no model_type"


def _shards(index: Path) -> list[str]:
    try:
        names = orjson.loads(index.read_bytes())["weight_map"].values()
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return []  # transformers says better what it misses in it
    return sorted({name for name in names if isinstance(name, str)})


def _weights_trouble(file: Path) -> str | None:
    try:
        size = file.stat().st_size
        if size == 0:
            return "is empty"
        return _safetensors_trouble(file, size) if file.suffix == ".safetensors" else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _safetensors_trouble(file: Path, size: int) -> str | None:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if not 0 < length <= min(LONGEST_HEADER_BYTES, size - LENGTH_BYTES):
            return "is no safetensors file, or only its beginning"
        header = stream.read(length)
    try:
        entries = [entry for name, entry in orjson.loads(header).items() if name != "__metadata__"]
        end = max((int(entry["data_offsets"][1]) for entry in entries), default=0)
    except (orjson.JSONDecodeError, AttributeError, KeyError, IndexError, TypeError, ValueError):
        return "has a header that cannot be read"
    whole = LENGTH_BYTES + length + end
    return None if size >= whole else f"ends after {size} of {whole} bytes"
