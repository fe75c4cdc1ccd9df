"""easyckpt: save every step, lose nothing, restore from the nearest copy.

    ckpt = Checkpointer("checkpoints")
    restored = ckpt.restore(state)
    ckpt.save(step, state)

torch is imported when one of these names is first used: the parts that an agent needs (shm, replica, flush, storage) do without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from easyckpt.adapters.randomness import RandomState
    from easyckpt.engine import Checkpointer
    from easyckpt.lineage import Sealed
    from easyckpt.restore import Restored
    from easyckpt.sources import Candidate
    from easyckpt.weights import read_weights

_HOMES = {
    "Candidate": "easyckpt.sources",
    "Checkpointer": "easyckpt.engine",
    "RandomState": "easyckpt.adapters.randomness",
    "Restored": "easyckpt.restore",
    "Sealed": "easyckpt.lineage",
    "read_weights": "easyckpt.weights",
}

__all__ = ["Candidate", "Checkpointer", "RandomState", "Restored", "Sealed", "read_weights"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'easyckpt' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
