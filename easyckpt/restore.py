"""From a shard back into a live state: in place, each tensor proven by its digest while it is copied.

The state is walked against the snapshot first and nothing is changed while they do not fit (Mismatch names every difference). Then the tensors
are filled by a few threads, then numbers, text and lists are set, then stateful objects get what they cannot take in place. Keys that only
the snapshot has appear in dicts as new tensors (a fresh optimizer gets its moments so). No memory is needed beyond the state itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping, MutableSequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from easyckpt import gate, memory, snapshot, tree
from easyckpt.digest import TensorHash
from easyckpt.errors import Corrupt, Mismatch
from easyckpt.layout import SegmentHeader, TensorEntry
from easyckpt.snapshot import CHUNK_BYTES, is_plain_memory, is_stateful
from easyckpt.sources import OpenShard

THREADS = 4
_NAMED = 8


class Plan:
    """What filling a state will do, before anything is changed."""

    def __init__(self, header: SegmentHeader, *, strict: bool) -> None:
        self._entries = {entry.name: entry for entry in header.tensors}
        self._strict = strict
        self._problems: list[str] = []
        self._made: dict[str, torch.Tensor] = {}
        self.fills: list[tuple[TensorEntry, torch.Tensor]] = []
        self._after: list[Callable[[], object]] = []

    def of(self, state: Any, document: Any) -> Any:
        """Plans to fill `state`; returns what stands in its place (the same object wherever it can be filled in place)."""
        result = self._value(state, document, ())
        if self._problems:
            shown = "; ".join(self._problems[:_NAMED])
            more = f"; and {len(self._problems) - _NAMED} more" if len(self._problems) > _NAMED else ""
            raise Mismatch(
                f"the snapshot does not fit the state, nothing was changed: {shown}{more}."
                " Give restore() the state that was saved, or strict=False to take what fits"
            )
        return result

    def finish(self) -> None:
        """After the tensors are filled: sets everything else."""
        for action in self._after:
            action()

    def _value(self, value: Any, document: Any, path: tree.Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, document, path)
        if is_stateful(value):
            return self._stateful(value, document, path)
        if isinstance(value, MutableMapping):
            return self._mapping(value, document, path)
        if isinstance(document, list) and isinstance(value, MutableSequence) and len(value) == len(document):
            for index, item in enumerate(document):
                self._set(value, index, self._value(value[index], item, (*path, str(index))))
            return value
        if isinstance(value, tuple) and isinstance(document, dict) and len(document.get("$tuple", ())) == len(value):
            items = zip(value, document["$tuple"], strict=True)
            return tuple(self._value(item, part, (*path, str(index))) for index, (item, part) in enumerate(items))
        return tree.decode(document, self._new)

    def _tensor(self, target: torch.Tensor, document: Any, path: tree.Path) -> torch.Tensor:
        name = tree.join(path)
        entry = self._entries.get(document.get("$tensor", "")) if isinstance(document, dict) else None
        if entry is None:
            self._problem(f"{name!r} is a tensor in the state, not in the snapshot")
            return target
        local = gate.local_part(target).detach()
        box = snapshot.global_box(name, target)
        have = (snapshot.dtype_name(local), tuple(local.shape), *(box or (None, None)))
        want = (entry.dtype, entry.shape, entry.global_shape, entry.global_offsets)
        if have != want:
            self._problem(
                f"{name!r} is {entry.dtype}{list(entry.shape)} in the snapshot, {have[0]}{list(local.shape)} in the state"
            )
        else:
            self.fills.append((entry, local))
        return target

    def _mapping(self, value: MutableMapping[Any, Any], document: Any, path: tree.Path, *, closed: bool = False) -> Any:
        items = _items(document)
        if items is None:
            self._problem(f"{tree.join(path)!r} is a dict in the state, not in the snapshot")
            return value
        for key in value:
            if key not in items:
                self._problem(f"{tree.join((*path, tree.part(key)))!r} is not in the snapshot")
        for key, item in items.items():
            inner = (*path, tree.part(key))
            if key in value:
                self._set(value, key, self._value(value[key], item, inner))
            elif closed:
                self._problem(f"{tree.join(inner)!r} is in the snapshot, not in the state")
            else:
                self._set(value, key, tree.decode(item, self._new))
        return value

    def _stateful(self, owner: Any, document: Any, path: tree.Path) -> Any:
        state = owner.state_dict()
        is_module = isinstance(owner, torch.nn.Module)
        if isinstance(owner, torch.optim.Optimizer):
            gate.knows(owner)
            self._give_moments(owner, state, document)
        if not isinstance(state, MutableMapping):
            self._after.append(lambda: owner.load_state_dict(tree.decode(document, self._new)))
            return owner
        before = len(self._after)
        self._mapping(state, document, path, closed=is_module)
        # A module's tensors were filled where they are: loading them again would copy all of them onto themselves.
        if not is_module or len(self._after) > before:
            self._after.append(lambda: owner.load_state_dict(state))
        return owner

    def _give_moments(self, optimizer: torch.optim.Optimizer, state: Any, document: Any) -> None:
        """Makes the tensors that a fresh optimizer lacks, each like its parameter, so that sharded ones are sharded alike."""
        saved = _items((_items(document) or {}).get("state")) or {}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            if index in state["state"]:
                continue
            for key, item in (_items(saved.get(index)) or {}).items():
                entry = self._entries.get(item.get("$tensor", "")) if isinstance(item, dict) else None
                if entry is not None and entry.global_shape is not None:
                    like = torch.empty_like(parameter, dtype=getattr(torch, entry.dtype), requires_grad=False)
                    state["state"].setdefault(index, {})[key] = like
            if index in state["state"]:
                for key, item in (_items(saved[index]) or {}).items():
                    state["state"][index].setdefault(key, tree.decode(item, self._new))

    def _new(self, name: str) -> torch.Tensor:
        """A tensor that only the snapshot has. Aliases are one object again."""
        entry = self._entries[name]
        root = entry.alias_of or name
        if root not in self._made:
            if entry.global_shape is not None:
                self._problem(
                    f"{name!r} is sharded and has no place in the state: pass the optimizer or model itself, not its state_dict()"
                )
            self._made[root] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            self.fills.append((entry, self._made[root]))
        return self._made[root]

    def _set(self, owner: Any, key: Any, new: Any) -> None:
        if not _has(owner, key) or owner[key] is not new:
            self._after.append(lambda: owner.__setitem__(key, new))

    def _problem(self, text: str) -> None:
        if self._strict:
            self._problems.append(text)


def fill(shard: OpenShard, state: Any, *, strict: bool = True) -> Any:
    """Fills `state` from one shard and returns it (or what was built, for None). Raises Mismatch, Corrupt, Torn."""
    plan = Plan(shard.header, strict=strict)
    result = plan.of(state, shard.header.extra)
    copy_all(shard, plan.fills)
    plan.finish()
    return result


def copy_all(shard: OpenShard, fills: list[tuple[TensorEntry, torch.Tensor]]) -> None:
    """Copies and proves every tensor, a few threads at a time: memcpy, reads and hashing run outside the interpreter's lock."""
    unique = list(
        {(entry.offsets, target.data_ptr(), target.stride()): (entry, target) for entry, target in fills}.values()
    )
    unique.sort(key=lambda one: -one[0].nbytes)
    threads = min(THREADS, len(os.sched_getaffinity(0)), len(unique))
    if threads <= 1:
        for entry, target in unique:
            _copy_one(shard, entry, target)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="easyckpt-restore") as pool:
        lots = [unique[start::threads] for start in range(threads)]
        for done in [pool.submit(_copy_lot, shard, lot) for lot in lots]:
            done.result()


def _copy_lot(shard: OpenShard, lot: list[tuple[TensorEntry, torch.Tensor]]) -> None:
    for entry, target in lot:
        _copy_one(shard, entry, target)


def _copy_one(shard: OpenShard, entry: TensorEntry, target: torch.Tensor) -> None:
    plain = is_plain_memory(target)
    held = target if plain else torch.empty(entry.shape, dtype=target.dtype)
    running = TensorHash()
    view = shard.view()
    if entry.nbytes:
        block = memory.block_at(held.data_ptr(), entry.nbytes)
        begin, end = entry.offsets
        source = memory.address_of(view) if view is not None else 0
        for at in range(begin, end, CHUNK_BYTES):
            stop = min(at + CHUNK_BYTES, end)
            if view is None:
                shard.read_into(block[at - begin : stop - begin], at)
            else:
                memory.copy(held.data_ptr() + at - begin, source + at, stop - at)
            running.update(block[at - begin : stop - begin])
    if running.finish() != (entry.digest, entry.parts):
        raise shard.explain(
            Corrupt(
                f"{shard.where}: tensor {entry.name!r} does not match its digest; this copy is not used, another is tried"
            )
        )
    if not plain:
        with torch.no_grad():
            target.copy_(held)


def _items(document: Any) -> dict[Any, Any] | None:
    """Key and JSON of a dict in the snapshot; None for anything else."""
    if not isinstance(document, dict):
        return None
    if len(document) == 1:
        ((key, value),) = document.items()
        if key == "$dict":
            return {tree.decode(item[0], _no_tensor): item[1] for item in value}
        if key.startswith("$"):
            return None
    return document


def _no_tensor(name: str) -> Any:
    raise Mismatch(f"{name!r} is a key of a dict: a key cannot be a tensor")


def _has(owner: Any, key: Any) -> bool:
    return key in owner if isinstance(owner, MutableMapping) else True
