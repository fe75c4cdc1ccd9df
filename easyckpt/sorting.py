"""Which of a state's large tensors are copied at once, which while training goes on, and which are in their slot already.

Governed by an optimizer: copied later, since its step waits. Of the others nobody knows who changes them: copied at once, unless they are still
(`stillness`). Restless ones, which something else was seen to change, are copied at once for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from easyckpt import gate
from easyckpt.digest import TensorDigest
from easyckpt.layout import TensorEntry
from easyckpt.snapshot import SMALL_BYTES, Leaf
from easyckpt.stillness import Stillness
from easyckpt.walk import Capture


class Sorted(NamedTuple):
    """The large tensors of one save."""

    now: list[Leaf]
    """To be copied before anything may change."""
    later: list[Leaf]
    """To be copied before an optimizer's step."""
    kept: list[Leaf]
    """In the slot already, to be hashed only."""


class _Roles(NamedTuple):
    """By their numbers in the capture; they hold as long as state and optimizers have the same tensors."""

    large: tuple[tuple[int, int], ...]
    """The capture's."""
    governed: set[int]
    """Where the memory lies that only optimizers change."""
    restless: int
    """How many tensors something else changed."""
    now: list[int]
    """Always copied at once."""
    later: list[int]
    """Always copied later."""
    loose: list[int]
    """Changed by nobody knows whom, or not at all."""


class Sorter:
    """Of one saver."""

    def __init__(self, *, overlap: bool, keeps: bool) -> None:
        """`overlap`: whether anything is copied later. `keeps`: whether what is still is left in its slot."""
        self._overlap = overlap
        self._keeps = keeps
        self._restless: set[str] = set()
        self._stillness = Stillness()
        self._roles: _Roles | None = None

    def sort(self, captured: Capture, held: Mapping[str, TensorEntry]) -> Sorted:
        """`held`: what the slot that will be written holds, by name."""
        roles = self._roles = self._roles_of(captured)
        now = [captured.leaf(number) for number in roles.now]
        # Held: each stays the memory that it is, whatever becomes of the tensor's `data` until it is copied.
        large, entries, tensors = captured.large, captured.entries, captured.tensors
        places = [large[number] for number in roles.later]
        later = [Leaf(entries[index], tensors[index].detach(), address) for index, address in places]
        kept: list[Leaf] = []
        self._stillness.forget()
        for number in roles.loose:
            leaf = captured.leaf(number)
            if self._keeps and self._stillness.is_held(leaf, held.get(leaf.entry.name)):
                kept.append(leaf.held())
            else:
                now.append(leaf)
        return Sorted(now, later, kept)

    def saved(self, digests: Mapping[str, TensorDigest]) -> None:
        """What the save before found, once it is sealed."""
        self._restless.update(self._stillness.saved(digests))

    def moved(self, names: Iterable[str]) -> list[str]:
        """These were changed where that does harm; those of them that were not known for it."""
        new = sorted(set(names) - self._restless)
        self._restless.update(new)
        return new

    def _roles_of(self, captured: Capture) -> _Roles:
        governed, restless, before = gate.Governed(), len(self._restless), self._roles
        same_state = before is not None and before.large is captured.large and before.restless == restless
        if before is not None and same_state and before.governed == governed.addresses:
            return before
        roles = _Roles(captured.large, governed.addresses, restless, [], [], [])
        for number, leaf in enumerate(captured.leaves):
            if leaf.entry.nbytes <= SMALL_BYTES or leaf.entry.name in self._restless:
                roles.now.append(number)
            elif not governed.holds(leaf.tensor, leaf.address):
                roles.loose.append(number)
            else:
                (roles.later if self._overlap else roles.now).append(number)
        return roles
