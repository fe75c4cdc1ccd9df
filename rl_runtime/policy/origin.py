"""Where a new run starts from when `train.resume` names a path: weights, moments and optimizer step of a snapshot of another run.

The path is a segment file, a checkpoint (a folder with its manifest), the storage it lies in, or a run folder; of several checkpoints the
newest is taken. Steps, batches and lineage are the new run's own and begin at 0.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from aimaster.settings import from_json
from aimaster.wire.places import RunPlaces
from easyckpt import read_weights
from easyckpt.errors import EasyckptError
from easyckpt.manifest import FILE_NAME, folder_name
from easyckpt.storage import list_manifests

ROLE = "policy"


class OriginError(Exception):
    """The run cannot start from there; a message for the user."""


def fill_from(
    path: Path, state: Mapping[str, Mapping[str, Tensor]], *, beat: Callable[[], None] = lambda: None
) -> tuple[Path, int]:
    """Fill every tensor of `state` in place, each proven by its digest; return the segment file and its step."""
    segment = find_segment(path)
    step = 0
    for part, tensors in state.items():
        beat()
        try:
            header, found = read_weights(segment, prefix=f"{part}/", into=dict(tensors))
        except (EasyckptError, OSError) as error:
            raise OriginError(f"train.resume: {segment} cannot be used: {error}") from error
        if missing := sorted(set(tensors) - set(found)):
            raise OriginError(f"train.resume: {segment} is of another model: it has no {part}/{missing[0]}")
        step = header.step
    return segment, step


def find_segment(path: Path) -> Path:
    """Return the segment file of the checkpoint that a path names."""
    path = path.expanduser()
    if path.is_file():
        return path
    if (path / FILE_NAME).is_file():
        storage, wanted = path.parent.parent, f"{path.parent.name}/{path.name}"
    else:
        storage, wanted = _storage_of(path), ""
    for manifest in list_manifests(storage, ROLE):
        folder = folder_name(manifest)
        if wanted in ("", folder):
            if len(manifest.shards) > 1:
                raise OriginError(
                    f"train.resume: {storage / folder} has {len(manifest.shards)} shards; only one is read here"
                )
            return storage / folder / manifest.shards[0].file
    raise OriginError(
        f"train.resume: {path} holds no checkpoint of a policy: name a checkpoint, its storage, or a run folder"
    )


def _storage_of(path: Path) -> Path:
    """Return the storage of a run folder; anything else is taken for a storage itself."""
    places = RunPlaces(path)
    if not places.resolved.is_file():
        return path
    return Path(from_json(places.resolved.read_bytes()).aimaster.snapshots.storage or places.storage)
