"""Every random number generator of the process as one part of the state: python's, numpy's, torch's, and each CUDA device's.

    state = {"model": model, "optimizer": optimizer, "rng": RandomState()}

It is taken the moment `save` is called. numpy's counts only if the program uses numpy; a generator object of your own goes into the state by
its own state_dict(). Nothing is pickled: the words of a generator are integer tensors.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from easyckpt.errors import Mismatch


class RandomState:
    """Gives and takes all generators' states."""

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "torch": torch.get_rng_state(),
        }
        if "numpy" in sys.modules:
            state["numpy"] = _numpy_state()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = list(torch.cuda.get_rng_state_all())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved = state["python"]
        random.setstate((saved["version"], tuple(saved["words"].tolist()), saved["gauss"]))
        torch.set_rng_state(state["torch"])
        if "numpy" in state:
            _set_numpy_state(state["numpy"])
        cuda = state.get("cuda", [])
        if cuda and torch.cuda.is_available():
            if len(cuda) != torch.cuda.device_count():
                raise Mismatch(f"the random state is of {len(cuda)} CUDA devices, here are {torch.cuda.device_count()}")
            torch.cuda.set_rng_state_all(cuda)


def _numpy_state() -> dict[str, Any]:
    import numpy as np

    found: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one is what is meant
    words = torch.tensor(found["state"]["key"].tolist(), dtype=torch.int64)
    return {
        "name": str(found["bit_generator"]),
        "words": words,
        "position": int(found["state"]["pos"]),
        "has_gauss": int(found["has_gauss"]),
        "gauss": float(found["gauss"]),
    }


def _set_numpy_state(saved: dict[str, Any]) -> None:
    import numpy as np

    words = np.array(saved["words"].tolist(), dtype=np.uint32)
    np.random.set_state((saved["name"], words, saved["position"], saved["has_gauss"], saved["gauss"]))  # noqa: NPY002
