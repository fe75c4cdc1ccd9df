"""Which tensors need no copy because a slot holds their bytes already: frozen weights, LoRA's base, large tables.

A tensor counts as still when two saves of it, while its version counter stood at the same number, gave the same digest. The counter alone is
not trusted (`.data`, numpy and C++ write past it): what is left in its slot is hashed at its source in every save, and one that was found changed is
never left again. A tensor that is made anew for each save has other memory each time and is never still.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch.multiprocessing.reductions import StorageWeakRef

from easyckpt.digest import TensorDigest
from easyckpt.layout import TensorEntry
from easyckpt.snapshot import Leaf, counter_of


class _Record(NamedTuple):
    """A tensor at one of its saves."""

    memory: StorageWeakRef
    """Whose memory it was: no other can be taken for it while this exists."""
    address: int
    """Where in it the tensor began."""
    version: int
    """Of its counter."""
    digest: TensorDigest | None = None
    """Once it is hashed."""
    is_still: bool = False
    """Whether the save before, with the same counter, gave the same digest."""


class Stillness:
    """Of the tensors of one saver that no optimizer governs. Used while no save is on its way, and by that save's thread."""

    def __init__(self) -> None:
        self._seen: dict[str, _Record] = {}
        self._now: dict[str, _Record] = {}
        """In the save that is on its way."""

    def is_held(self, leaf: Leaf, held: TensorEntry | None) -> bool:
        """Whether a slot that holds `held` of the tensor holds what it is now, as far as can be told without hashing it."""
        entry, seen = leaf.entry, self._look(leaf)
        return (
            held is not None
            and seen is not None
            and seen.is_still
            and seen.digest == (held.digest, held.parts)
            and (held.offsets, held.dtype, held.shape) == (entry.offsets, entry.dtype, entry.shape)
        )

    def saved(self, digests: Mapping[str, TensorDigest]) -> Iterable[str]:
        """Takes over what the save found. Names of tensors that changed past their counter."""
        past = []
        before_all, self._seen = self._seen, {}
        for name, now in self._now.items():
            before, digest = before_all.get(name), digests[name]
            is_same = before is not None and before[:3] == now[:3] and before.digest is not None
            is_still = is_same and before is not None and before.digest == digest
            if is_same and not is_still:
                past.append(name)
            self._seen[name] = now._replace(digest=digest, is_still=is_still)
        self._now = {}
        return past

    def forget(self) -> None:
        """Before a save: what an earlier one did not come to say."""
        self._now = {}

    def _look(self, leaf: Leaf) -> _Record | None:
        """What is known of the tensor as it is now; it is looked for again when this save is done. None where nothing can be known."""
        name, tensor = leaf.entry.name, leaf.tensor
        version = counter_of(tensor)
        if version < 0:
            return None
        seen = self._seen.get(name)
        memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        now = _Record(memory, tensor.data_ptr(), version)
        self._now[name] = now
        return seen if seen is not None and seen[:3] == now[:3] else None
