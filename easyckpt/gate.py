"""The moment before an optimizer changes what is being copied, found without user code.

torch.optim has a global hook that runs before every step of every optimizer. It lets a copy in the background finish first, and it tells
which tensors only an optimizer changes: parameters of its groups and its own state. Whatever is not known to be such is copied at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

Waiter = Callable[[], None]
_PLAIN_TYPES = (torch.nn.Parameter, torch.Tensor)

_lock = threading.Lock()
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_waiters: weakref.WeakSet[Any] = weakref.WeakSet()
_registered = False


def watch(copier: Any) -> None:
    """From now on every optimizer step calls `copier.before_step()` first, for as long as `copier` lives."""
    global _registered  # noqa: PLW0603 - one hook for the process
    with _lock:
        _waiters.add(copier)
        if not _registered:
            register_optimizer_step_pre_hook(_before_step)
            _registered = True


def unwatch(copier: Any) -> None:
    with _lock:
        _waiters.discard(copier)


def knows(optimizer: Optimizer) -> None:
    """Tells of an optimizer before its first step."""
    _optimizers.add(optimizer)


class Governed:
    """The memory that only an optimizer's step changes, as it is now."""

    def __init__(self) -> None:
        held: list[Any] = []
        for optimizer in list(_optimizers):
            for group in optimizer.param_groups:
                held += group["params"]
            for state in optimizer.state.values():
                held += state.values() if isinstance(state, dict) else ()
        tensors = [value for value in held if isinstance(value, torch.Tensor)]
        self._tensors = [value if type(value) in _PLAIN_TYPES else local_part(value) for value in tensors]
        # Tensors without elements have the address 0, as has what lies in no plain memory.
        self.addresses = {tensor.data_ptr() for tensor in self._tensors} - {0}
        self._storages: set[int] | None = None

    def holds(self, tensor: torch.Tensor, address: int) -> bool:
        """Whether a tensor, whose elements begin at `address`, lies in it: most are the very tensors, others are views into them."""
        if address in self.addresses:
            return True
        if self._storages is None:
            self._storages = {tensor.untyped_storage().data_ptr() for tensor in self._tensors} - {0}
        return tensor.untyped_storage().data_ptr() in self._storages


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; the tensor itself otherwise."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    _optimizers.add(optimizer)
    for copier in list(_waiters):
        copier.before_step()
