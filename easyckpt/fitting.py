"""From shards back into a live state: in place, each tensor proven by its digest while it is copied.

The state is walked against the snapshot first and nothing is changed while they do not fit (Mismatch names every difference). Then the tensors
are filled, then numbers, text and lists are set, then stateful objects get what they cannot take in place. What only the snapshot has
appears in dicts and lists as new tensors (a fresh optimizer gets its moments so). No memory is needed beyond the state itself. A tensor that is
cut another way than it was saved is pieced together from all shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from easyckpt import gate, reader, reshard, snapshot, tree
from easyckpt.errors import Mismatch
from easyckpt.layout import TensorEntry
from easyckpt.reader import Fill, Parts, Whole, box_of
from easyckpt.reshard import Box
from easyckpt.snapshot import is_stateful
from easyckpt.sources import OpenShard

_NAMED = 8
NOTHING = object()
"""In a state's place: all of the snapshot is made anew."""


class Plan:
    """What filling a state will do, before anything is changed."""

    def __init__(
        self,
        shards: Sequence[OpenShard],
        *,
        strict: bool,
        only: Collection[str] | None = None,
        whole: bool = False,
    ) -> None:
        """`shards`: the one of this rank, or all of them. `only`: paths, or beginnings of paths, that are to be filled.

        `whole`: new tensors are made whole even where the snapshot has them in shards.
        """
        self._whole = whole
        self._held: dict[str, list[tuple[OpenShard, TensorEntry]]] = {}
        for shard in shards:
            for entry in shard.header.tensors:
                self._held.setdefault(entry.name, []).append((shard, entry))
        self._strict = strict
        self._only = tuple(only) if only is not None else None
        self._problems: list[str] = []
        self._made: dict[str, torch.Tensor] = {}
        self._cuts = snapshot.Cuts()
        self.fills: list[Fill] = []
        self._after: list[Callable[[], object]] = []

    def of(self, state: Any, document: Any) -> Any:
        """Plans to fill `state`; returns what stands in its place (the same object wherever it can be filled in place)."""
        result = self._value(state, document, ()) if state is not NOTHING else self._made_anew(document, ())
        if state is not NOTHING and not _is_same(result, state):
            self._problem(
                f"the state is a {type(state).__name__} at its top, which cannot become what the snapshot has there"
            )
        if self._problems:
            shown = "; ".join(self._problems[:_NAMED])
            more = f"; and {len(self._problems) - _NAMED} more" if len(self._problems) > _NAMED else ""
            raise Mismatch(
                f"the snapshot does not fit the state, nothing was changed: {shown}{more}."
                " Give restore() the state that was saved, or strict=False to take what fits"
            )
        return result

    def finish(self) -> None:
        """After the tensors are filled: sets everything else. Raises Mismatch where an object does not take what it once gave."""
        for action in self._after:
            action()

    def _value(self, value: Any, document: Any, path: tree.Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, document, path)
        if is_stateful(value):
            return self._stateful(value, document, path)
        if isinstance(value, MutableMapping):
            return self._mapping(value, document, path)
        if isinstance(value, list) and isinstance(document, list):
            return self._list(value, document, path)
        listed = document.get("$tuple") if isinstance(document, dict) else None
        if isinstance(value, tuple) and isinstance(listed, list) and len(listed) == len(value):
            parts = [(*path, str(index)) for index in range(len(value))]
            filled = tuple(
                self._value(item, part, inner) if self._is_wanted(inner) else item
                for item, part, inner in zip(value, listed, parts, strict=True)
            )
            return value if _is_same(filled, value) else filled
        return self._made_anew(document, path)

    def _list(self, value: list[Any], document: list[Any], path: tree.Path) -> list[Any]:
        """The same object, as long as the snapshot's where all of it is wanted."""
        whole = self._is_whole(path)
        items: list[Any] = []
        for index, item in enumerate(document):
            inner = (*path, str(index))
            if index < len(value):
                items.append(self._value(value[index], item, inner) if self._is_wanted(inner) else value[index])
            elif whole:
                items.append(self._made_anew(item, inner))
            elif self._is_wanted(inner):
                self._problem(f"{tree.join(inner)!r} has no place in the state, whose list has {len(value)}")
        if whole and len(document) != len(value):
            self._after.append(partial(value.__setitem__, slice(None), items))
        else:
            for index, new in enumerate(items):
                self._set(value, index, new)
        return value

    def _made_anew(self, document: Any, path: tree.Path) -> Any:
        """What only the snapshot has, as far as it is wanted; None stands in a list for what is not, so that the others keep their places."""
        if self._is_whole(path):
            return tree.decode(document, self._new)
        items = _items(document)
        if items is not None:
            inner = {key: (*path, tree.part(key)) for key in items}
            return {key: self._made_anew(items[key], at) for key, at in inner.items() if self._is_wanted(at)}
        places = [(item, (*path, str(index))) for index, item in enumerate(_listed(document))]
        made = [self._made_anew(item, at) if self._is_wanted(at) else None for item, at in places]
        return made if isinstance(document, list) else tuple(made)

    def _tensor(self, target: torch.Tensor, document: Any, path: tree.Path) -> torch.Tensor:
        name = tree.join(path)
        held = self._held.get(document.get("$tensor", ""), []) if isinstance(document, dict) else []
        if not held:
            self._problem(f"{name!r} is a tensor in the state, not in the snapshot")
            return target
        local = gate.local_part(target).detach()
        shape = tuple(local.shape)
        whole_shape, offsets = self._cuts.of(name, target, shape) or (shape, (0,) * len(shape))
        if any(size > 1 and not stride for size, stride in zip(shape, local.stride(), strict=True)):
            self._problem(f"{name!r} is expanded, several of its elements are one: give restore() a clone() of it")
            return target
        entry = held[0][1]
        if (entry.dtype, entry.global_shape or entry.shape) != (snapshot.dtype_name(local), whole_shape):
            saved = f"{entry.dtype}{list(entry.global_shape or entry.shape)}"
            self._problem(
                f"{name!r} is {saved} in the snapshot, {snapshot.dtype_name(local)}{list(whole_shape)} in the state"
            )
            return target
        box = Box(offsets=tuple(offsets), shape=tuple(local.shape))
        for shard, one in held:
            if box_of(one) == box:
                self.fills.append(Whole(shard=shard, entry=one, target=local))
                return target
        if not box.volume:
            return target
        pieces = reshard.cover(box, [box_of(one) for _, one in held])
        if pieces is None:
            self._problem(
                f"{name!r} is cut so that the shards at hand do not make up {list(box.shape)} at {list(box.offsets)}"
            )
        else:
            chosen = tuple((*held[piece.source], piece.box) for piece in pieces)
            self.fills.append(Parts(pieces=chosen, target=local, box=box))
        return target

    def _mapping(self, value: MutableMapping[Any, Any], document: Any, path: tree.Path, *, closed: bool = False) -> Any:
        items = _items(document)
        if items is None:
            self._problem(f"{tree.join(path)!r} is a dict in the state, not in the snapshot")
            return value
        for key in value:
            if key not in items and self._is_wanted((*path, tree.part(key))):
                self._problem(f"{tree.join((*path, tree.part(key)))!r} is not in the snapshot")
        for key, item in items.items():
            inner = (*path, tree.part(key))
            if not self._is_wanted(inner):
                continue
            if key in value:
                self._set(value, key, self._value(value[key], item, inner))
            elif closed:
                self._problem(f"{tree.join(inner)!r} is in the snapshot, not in the state")
            else:
                self._set(value, key, self._made_anew(item, inner))
        return value

    def _stateful(self, owner: Any, document: Any, path: tree.Path) -> Any:
        state = owner.state_dict()
        is_module = isinstance(owner, torch.nn.Module)
        if isinstance(owner, torch.optim.Optimizer):
            gate.knows(owner)
            if not self._fits_optimizer(owner, document, path):
                return owner
            self._give_moments(owner, state, document, path)
        if not isinstance(state, MutableMapping):
            self._after.append(partial(_load, owner, tree.decode(document, self._new), path))
            return owner
        before = len(self._after)
        self._mapping(state, document, path, closed=is_module)
        # A module's tensors were filled where they are: loading them again would copy all of them onto themselves.
        if not is_module or len(self._after) > before:
            self._after.append(lambda: _load(owner, state, path))
        return owner

    def _fits_optimizer(self, optimizer: torch.optim.Optimizer, document: Any, path: tree.Path) -> bool:
        """An optimizer's state goes by the place of a parameter in its groups: another cut would give it to the wrong ones."""
        saved = (_items(document) or {}).get("param_groups")
        there = [len(group["params"]) for group in saved] if isinstance(saved, list) else []
        here = [len(group["params"]) for group in optimizer.param_groups]
        if there != here:
            text = f"{tree.join(path)!r} has groups of {there} parameters in the snapshot, of {here} in the state"
            self._problem(text)
            return False
        for name, held in self._held.items():
            # Replicas are alike; ranks that each kept the moments of other parameters used the same numbers for them.
            unlike = {entry.digest for _, entry in held if entry.global_shape is None}
            if len(unlike) > 1 and name.startswith(tree.join((*path, "state", ""))):
                self._problem(
                    f"{name!r} is another tensor on each rank: it can only be restored on as many ranks as saved it"
                )
                return False
        return True

    def _give_moments(self, optimizer: torch.optim.Optimizer, state: Any, document: Any, path: tree.Path) -> None:
        """Makes the tensors that a fresh optimizer lacks, each like its parameter, so that sharded ones are sharded alike."""
        saved = _items((_items(document) or {}).get("state")) or {}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for index, parameter in enumerate(parameters):
            place = (*path, "state", tree.part(index))
            if index in state["state"] or index not in saved or not self._is_wanted(place):
                continue
            made = state["state"][index] = {}
            for key, item in (_items(saved[index]) or {}).items():
                if not self._is_wanted((*place, tree.part(key))):
                    continue
                held = self._held.get(item.get("$tensor", "")) if isinstance(item, dict) else None
                entry = held[0][1] if held else None
                if entry is not None and (entry.global_shape or entry.shape) == tuple(parameter.shape):
                    made[key] = torch.empty_like(parameter, dtype=getattr(torch, entry.dtype), requires_grad=False)
                else:
                    made[key] = tree.decode(item, self._new)

    def _new(self, name: str) -> torch.Tensor:
        """A tensor that only the snapshot has. Aliases are one object again."""
        held = self._held[name]
        entry = held[0][1]
        root = entry.alias_of or name
        if root in self._made:
            return self._made[root]
        if entry.global_shape is not None and not self._whole:
            self._problem(
                f"{name!r} is sharded and has no place in the state: pass the optimizer or model itself, not its state_dict()"
            )
        shape = entry.global_shape if entry.global_shape is not None and self._whole else entry.shape
        made = self._made[root] = torch.empty(shape, dtype=getattr(torch, entry.dtype))
        box = Box(offsets=(0,) * len(shape), shape=shape)
        pieces = reshard.cover(box, [box_of(one) for _, one in held]) if shape != entry.shape else None
        if pieces is not None:
            chosen = tuple((*held[piece.source], piece.box) for piece in pieces)
            self.fills.append(Parts(pieces=chosen, target=made, box=box))
        elif shape == entry.shape:
            self.fills.append(Whole(shard=held[0][0], entry=entry, target=made))
        else:
            self._problem(f"{name!r}: the shards at hand do not make up {list(shape)}")
        return made

    def _is_whole(self, path: tree.Path) -> bool:
        """Whether `only` names this path or something above it."""
        if self._only is None:
            return True
        name = tree.join(path)
        return any(name == one or name.startswith(one + "/") for one in self._only)

    def _is_wanted(self, path: tree.Path) -> bool:
        """Whether `only` names this path, something above it or something below it."""
        if self._only is None or self._is_whole(path):
            return True
        inside = tree.join(path) + "/"
        return any(one.startswith(inside) for one in self._only)

    def _set(self, owner: Any, key: Any, new: Any) -> None:
        if not _has(owner, key) or owner[key] is not new:
            self._after.append(lambda: owner.__setitem__(key, new))

    def _problem(self, text: str) -> None:
        if self._strict:
            self._problems.append(text)


def _load(owner: Any, state: Any, path: tree.Path) -> None:
    try:
        owner.load_state_dict(state)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        name = f"{type(owner).__module__}.{type(owner).__qualname__}"
        raise Mismatch(
            f"{tree.join(path)!r}, a {name}, does not take the state that was saved ({error}); the rest of the state is filled."
            " Give restore() an object that is made as the saved one was"
        ) from error


def fill(
    shards: Sequence[OpenShard],
    state: Any,
    *,
    strict: bool = True,
    only: str | Collection[str] | None = None,
    sharing: int = 1,
) -> tuple[int, Any]:
    """Fills `state` from its rank's shard, or from all shards. The tensor bytes that were read, and the state: a new one for NOTHING.

    `sharing`: processes that do the same now on these cores. Raises Mismatch, Corrupt, Torn.
    """
    document = tree.merge([shard.header.extra for shard in shards])
    if only is not None:
        only = (only,) if isinstance(only, str) else only
        missing = sorted(path for path in only if not _leads_somewhere(document, path))
        if missing or not only:
            raise Mismatch(
                f"only= names what the snapshot has not: {missing[:_NAMED] if missing else 'nothing at all'}; nothing was changed."
                " `easyckpt show` lists the paths"
            )
    plan = Plan(shards, strict=strict, only=only)
    filled = plan.of(state, document)
    read_bytes = reader.read_all(plan.fills, sharing=sharing)
    plan.finish()
    return read_bytes, filled


def build(
    shards: Sequence[OpenShard], *, only: Collection[str] | None = None, advance: reader.Advance | None = None
) -> Any:
    """The whole snapshot, or what `only` names of it, as a new state of dicts, lists and CPU tensors, sharded ones made whole."""
    plan = Plan(shards, strict=True, only=only, whole=True)
    state = plan.of(NOTHING, tree.merge([shard.header.extra for shard in shards]))
    reader.read_all(plan.fills, advance)
    plan.finish()
    return state


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


def _listed(document: Any) -> list[Any]:
    """The JSON of what a list or tuple in the snapshot holds; nothing for anything else."""
    held = document.get("$tuple") if isinstance(document, dict) else document
    return held if isinstance(held, list) else []


def _leads_somewhere(document: Any, path: str) -> bool:
    """Whether the snapshot has something at a path."""
    for name in path.split("/"):
        items = _items(document)
        if items is None:
            items = dict(enumerate(_listed(document)))
        inside = {tree.part(key): item for key, item in items.items()}
        if name not in inside:
            return False
        document = inside[name]
    return True


def _no_tensor(name: str) -> Any:
    raise Mismatch(f"{name!r} is a key of a dict: a key cannot be a tensor")


def _is_same(made: Any, given: Any) -> bool:
    """Whether nothing has to be put in its place."""
    if made is given:
        return True
    both = isinstance(made, tuple) and isinstance(given, tuple) and len(made) == len(given)
    return both and all(_is_same(one, other) for one, other in zip(made, given, strict=True))


def _has(owner: Any, key: Any) -> bool:
    return key in owner if type(owner) is dict or isinstance(owner, MutableMapping) else True
