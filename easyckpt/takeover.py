"""The flush of a node that is lost, by a node that holds copies of its segments. No torch.

Who is lost is decided elsewhere; here is what follows. The newest whole step of the lost members that proves itself goes to storage, once, whoever
else tries the same; what a later lineage went back behind, or what was never committed, does not.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from easyckpt import shm
from easyckpt.claims import Claims
from easyckpt.errors import AlreadyFlushed, BadSegment
from easyckpt.flush import flush_segment, newest_to_flush
from easyckpt.layout import Rewind, Version, is_dead
from easyckpt.manifest import Manifest
from easyckpt.mappings import Mappings
from easyckpt.shm import Segment
from easyckpt.storage import Storage, list_manifests, open_storage


def take_over(
    folder: str | os.PathLike[str],
    storage: str | os.PathLike[str] | Storage,
    members: Collection[str],
    *,
    newest: Version | None = None,
    claims: Claims | None = None,
    mappings: Mappings | None = None,
) -> list[Manifest]:
    """Brings what `folder` holds of these members to storage, one checkpoint a role, where storage has none as new; what was committed here.

    `newest` is the newest committed version: only its lineage, and nothing above it, is flushed. Raises BeingFlushed while another process is
    at it (call again, with the same `claims`), or StorageError. `mappings` keeps what is read mapped for later flushes.
    """
    target = open_storage(storage)
    held = shm.scan(Path(folder))
    done = []
    for role in sorted({segment.header.role for segment in held if segment.header.member in members}):
        of_role = [segment for segment in held if segment.header.role == role]
        stored = list_manifests(target, role)
        rewinds = {rewind for segment in of_role for rewind in segment.header.rewinds}
        rewinds.update(rewind for record in stored for rewind in record.rewinds)
        left = [one for one in of_role if one.header.member in members and is_due(one.header.version, rewinds, newest)]
        record = _flush_first_good(left, role, [one.version for one in stored], target, claims or Claims(), mappings)
        done += [] if record is None else [record]
    return done


def is_due(version: Version, rewinds: Iterable[Rewind], newest: Version | None) -> bool:
    """Whether a version may go to storage: alive, and not beyond what was committed."""
    if is_dead(version, rewinds):
        return False
    return newest is None or (version[0] == newest[0] and version <= newest)


def _flush_first_good(
    left: list[Segment], role: str, stored: list[Version], target: Storage, claims: Claims, mappings: Mappings | None
) -> Manifest | None:
    """The newest step whose bytes prove themselves; a damaged copy gives way to an older one."""
    while (chosen := newest_to_flush(left, role, stored, marked_only=False)) is not None:
        try:
            return flush_segment(chosen, target, claims=claims, mappings=mappings)
        except AlreadyFlushed:
            return None
        except BadSegment:
            left = [one for one in left if one not in chosen]
    return None
