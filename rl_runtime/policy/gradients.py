"""Reduced gradients kept on disk, one file for each committed step, so that a run can be replayed and compared.

    RUN/nodes/NODE/members/MEMBER/gradients/LINEAGE-STEP.safetensors      tensors under their parameters' names

What else is known of the step stands in the file's metadata. A file is whole or absent: it is written aside and renamed. Keeping it
is a service to people, so whatever goes wrong is said in the log and the step goes on; nothing is ever removed.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from aimaster.wire.checkpoint import Version
from aimaster.wire.places import RunPlaces

FOLDER = "gradients"
"""Within a member's own folder."""
NOTE = "aimaster.step"
"""Name of the metadata."""

log = structlog.get_logger("gradients")


class GradientNote(msgspec.Struct, frozen=True, kw_only=True):
    """Which step a gradient was applied at, and how."""

    version: Version
    """After the step."""
    epoch: int
    """In which it was reduced and committed."""
    batch_digest: str
    shares: tuple[int, ...]
    """Those that this member had computed itself."""
    learning_rate: float


def keep_gradient(folder: Path, note: GradientNote, tensors: Mapping[str, Tensor]) -> bool:
    """Write one file; False when that failed, which is logged."""
    path = folder / file_name(note.version)
    aside = path.with_name(f".{path.name}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        whole = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        aside.write_bytes(save(whole, metadata={NOTE: msgspec.json.encode(note).decode()}))
        aside.replace(path)
    except Exception as error:  # noqa: BLE001 - no fault of the disk, the format or the tensors may cost the step
        log.warning("a gradient could not be kept; the step goes on", file=str(path), reason=str(error))
        with contextlib.suppress(OSError):
            aside.unlink()
        return False
    return True


def read_gradient(path: Path) -> tuple[GradientNote, dict[str, Tensor]]:
    """Return what `keep_gradient` wrote. Raises OSError, SafetensorError or msgspec's errors for anything else."""
    with safe_open(path, framework="pt") as file:
        note = msgspec.json.decode((file.metadata() or {}).get(NOTE, ""), type=GradientNote)
        return note, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping


def kept_gradients(places: RunPlaces) -> dict[Version, list[Path]]:
    """Return the files of all members by the version they led to."""
    found: dict[Version, list[Path]] = {}
    for path in sorted(places.run.glob(f"nodes/*/members/*/{FOLDER}/*.safetensors")):
        lineage, _, step = path.stem.partition("-")
        if lineage.isdigit() and step.isdigit():
            found.setdefault(Version(int(lineage), int(step)), []).append(path)
    return found


def file_name(version: Version) -> str:
    return f"{version.lineage}-{version.step}.safetensors"
