"""The moment before an optimizer changes what is being copied, found without user code.

torch.optim has a global hook that runs before every step of every optimizer. It lets a copy in the background finish first, and it tells
which tensors only an optimizer changes: parameters of its groups and its own state. Whatever is not known to be such is copied at once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

Waiter = Callable[[], None]

_lock = threading.Lock()
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_waiters: weakref.WeakSet[Any] = weakref.WeakSet()
_registered = False


def watch(copier: Any) -> None:
    """From now on every optimizer step calls `copier.ready()` first, for as long as `copier` lives."""
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


def governed_storages() -> set[int]:
    """Addresses of the memory that only an optimizer's step changes."""
    found: set[int] = set()
    for optimizer in list(_optimizers):
        for group in optimizer.param_groups:
            _add_addresses(found, group["params"])
        for state in optimizer.state.values():
            if isinstance(state, dict):
                _add_addresses(found, state.values())
    return found


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor; the tensor itself otherwise."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    _optimizers.add(optimizer)
    for copier in list(_waiters):
        copier.ready()


def _add_addresses(found: set[int], values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            local = getattr(value, "_local_tensor", value)
            found.add(local.untyped_storage().data_ptr())
