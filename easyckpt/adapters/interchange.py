"""To and from other formats: torch.distributed.checkpoint (DCP) folders, Hugging Face safetensors folders, plain torch.load-able files.

Exports are whole tensors, however many ranks saved them. What comes in is never unpickled freely: DCP's metadata is read with a short list of
allowed names and its objects with weights_only, so a malicious folder is refused, not run.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from easyckpt import fitting, sources, tree
from easyckpt.errors import EasyckptError, Foreign
from easyckpt.reader import Advance
from easyckpt.sources import Candidate
from easyckpt.target import Target

SHARD_BYTES = 5 << 30
_INDEX = "model.safetensors.index.json"


def load_whole(
    target: Target, candidate: Candidate, *, only: list[str] | None = None, advance: Advance | None = None
) -> Any:
    """A snapshot as a nested state of whole CPU tensors and values."""
    with contextlib.ExitStack() as stack:
        nearest = [candidate.of_rank(rank)[0] for rank in sorted({source.rank for source in candidate.sources})]
        shards = [stack.enter_context(sources.open_source(source, target.storage)) for source in nearest]
        return fitting.build(shards, only=only, advance=advance)


def subtree(state: Any, path: str) -> Any:
    """What lies at a path such as "model" or "layers/0"; "" is the whole state."""
    for name in path.split("/") if path else ():
        inside = {tree.part(key): value for key, value in _items(state)}
        if name not in inside:
            raise EasyckptError(f"the snapshot has no {path!r}; `easyckpt show` lists what it has")
        state = inside[name]
    return state


def tensors_of(state: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted name, tensor) of every tensor in a nested state."""
    if isinstance(state, torch.Tensor):
        yield prefix, state
    for key, value in _items(state):
        yield from tensors_of(value, f"{prefix}.{key}" if prefix else str(key))


def _items(state: Any) -> Iterable[tuple[Any, Any]]:
    """Key or index, and value, of what holds others; nothing of anything else."""
    if isinstance(state, dict):
        return state.items()
    return enumerate(state) if isinstance(state, list | tuple) else ()


def _named(state: Any) -> dict[Any, Any]:
    """For formats that have names at their top. Raises EasyckptError where nothing there has one."""
    if not isinstance(state, dict | list | tuple):
        raise EasyckptError(
            f"this format holds named tensors, and a {type(state).__name__} alone has no name; nothing was written."
            " Export it with --format torch, or what holds it with --prefix"
        )
    return {key if isinstance(state, dict) else str(key): value for key, value in _items(state)}


# ------------------------------------------------------------------------------------------------------- Hugging Face


def export_huggingface(state: Any, folder: Path, *, config_from: Path | None = None) -> list[Path]:
    """A folder that transformers' from_pretrained loads. Tied tensors are written once, as it expects; `config_from` gives config and tokenizer."""
    from safetensors.torch import save_file

    state = _named(state)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    room, seen = SHARD_BYTES, set()
    for name, tensor in tensors_of(state):
        if tensor.data_ptr() in seen and tensor.numel():
            continue
        seen.add(tensor.data_ptr())
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor.contiguous()
        room -= tensor.nbytes
    count = len(shards)
    names = (
        ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if count > 1:
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1)
        (folder / _INDEX).write_text(text, encoding="utf-8")
    for source in config_from.iterdir() if config_from is not None else ():
        if source.suffix in (".json", ".txt", ".model", ".jinja") and source.name != _INDEX:
            shutil.copy(source, folder)
    return [folder / name for name in names]


def import_huggingface(folder: Path, advance: Advance | None = None) -> dict[str, Any]:
    """{"model": {name: tensor}} out of a safetensors file or folder."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise Foreign(f"{folder} has no *.safetensors; nothing was imported")
    model: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            model.update(load_file(file))
        except SafetensorError as error:
            raise Foreign(f"{file} is no safetensors file, or is damaged ({error}); nothing was imported") from error
        if advance is not None:
            advance(file.stat().st_size)
    return {"model": model}


def export_torch(state: Any, path: Path) -> None:
    """A file for torch.load."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        torch.save(state, file)


# ---------------------------------------------------------------------------------------------------------------- DCP


def export_dcp(state: Any, folder: Path) -> None:
    """A folder that torch.distributed.checkpoint.load reads on any number of ranks."""
    named = _named(state)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _one_process():
            save(named, checkpoint_id=folder, no_dist=True)
    except CheckpointException as error:
        raise EasyckptError(f"{folder} could not be written whole; remove it: {_why(error)}") from error


def import_dcp(folder: Path, advance: Advance | None = None) -> dict[str, Any]:
    """The nested state of a DCP folder, tensors whole."""
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    flat: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            flat[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        elif isinstance(stored, BytesStorageMetadata):
            flat[name] = None
    try:
        with _one_process():
            load(flat, storage_reader=reader, planner=_Planner(advance), no_dist=True)
    except CheckpointException as error:
        raise Foreign(
            f"{folder} cannot be read without running code of its own, or is damaged; nothing was imported: {_why(error)}"
        ) from error
    paths: dict[str, Any] = metadata.planner_data or {name: (name,) for name in flat}
    return _nest({paths.get(name, (name,)): value for name, value in flat.items()})


_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex",
        "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch._utils": {"_rebuild_dtype"},
    "torch": {"Size", "device", "layout", *(str(name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict", "defaultdict"},
    "pathlib": {"Path", "PosixPath"},
    "builtins": {"set", "list", "dict", "tuple"},
}  # fmt: skip


class _Allowed(pickle.Unpickler):
    """Knows the names that DCP's metadata is made of and no other."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise Foreign(f"the metadata asks for {module}.{name}, which no checkpoint needs: the folder is refused")


class _Reader(FileSystemReader):
    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            found = _Allowed(io.BytesIO(path.read_bytes())).load()
        except FileNotFoundError as error:
            raise Foreign(f"{self.path} has no .metadata: it is no DCP folder, or its save was not finished") from error
        except pickle.UnpicklingError as error:
            raise Foreign(f"{path} cannot be read ({error}); nothing was imported") from error
        if not isinstance(found, Metadata):
            raise Foreign(f"{path} holds no metadata; nothing was imported")
        return found


class _Planner(DefaultLoadPlanner):
    def __init__(self, advance: Advance | None) -> None:
        super().__init__()
        self._advance = advance

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        super().commit_tensor(read_item, tensor)
        if self._advance is not None:
            self._advance(tensor.nbytes)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Objects beside tensors: only those that torch reads without running code."""
        name = read_item.dest_index.fqn
        self.original_state_dict[name] = torch.load(value, weights_only=True)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """torch warns that one process saves alone, which is what is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _why(error: CheckpointException) -> str:
    return "; ".join(str(failure[0]).splitlines()[0] for failure in error.failures.values())


def _nest(flat: dict[tuple[Any, ...], Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path, value in flat.items():
        inner: dict[Any, Any] = root
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    listed = _lists(root)
    return listed if isinstance(listed, dict) else {"state": listed}


def _lists(value: Any) -> Any:
    """Dicts whose keys are 0, 1, 2, ... were lists."""
    if not isinstance(value, dict):
        return value
    items = {key: _lists(item) for key, item in value.items()}
    if items and all(isinstance(key, int) for key in items) and sorted(items) == list(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items
