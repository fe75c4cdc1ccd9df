"""What is in a state: `capture` walks a nested state once. Tensors become entries (tied ones once, a view with its own bytes only, of a
DTensor the local shard), all else becomes JSON at once.

A walk leaves a trace. The next one goes along it: as long as every tensor is the same memory read the same way, entries and their places hold,
and a tensor costs a few comparisons. At the first that differs the state is walked anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from easyckpt import gate, memory, snapshot, tree
from easyckpt.errors import Unsupported
from easyckpt.layout import DTYPES, RESERVED_NAME, TensorEntry, place
from easyckpt.snapshot import PLAIN_TYPES, SMALL_BYTES, Leaf, Small, address_of, dtype_name, is_stateful


class Look(NamedTuple):
    """All that says which memory a tensor is and how it is read: equal as long as it is that very tensor. Host and devices share no addresses."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_negative: bool
    """As torch's lazy negation has it."""
    is_conjugate: bool
    """As torch's lazy conjugation has it."""
    cut: Any
    """Of a DTensor: mesh and placements."""


class Seen(NamedTuple):
    """A tensor, as a walk left it."""

    kind: type[torch.Tensor]
    look: Look
    document: Any


class Branch(NamedTuple):
    """A dict, list or tuple with tensors somewhere below."""

    kind: type[Any]
    keys: tuple[Any, ...] | None
    """Of a dict."""
    key_types: list[type[Any]] | None
    """Where they are not all text: 1 and True are equal keys and different JSON."""
    parts: tuple[Trace, ...]
    """What its items left, in order."""
    document: Any
    """Its JSON."""
    is_fixed: bool
    """Whether there are only tensors below: the JSON is the same every time."""


class Given(NamedTuple):
    """An object whose `state_dict` was taken."""

    part: Trace


class Other(NamedTuple):
    """Anything without tensors, or that is not followed: walked in full each time."""

    path: tree.Path


Trace = Seen | Branch | Given | Other


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """A state, walked."""

    entries: tuple[TensorEntry, ...]
    """All tensors, in file order, aliases after what they share."""
    tensors: tuple[torch.Tensor, ...]
    """Theirs, in the same order."""
    small: tuple[Small, ...]
    """Those that are copied at once whatever they are."""
    large: tuple[tuple[int, int], ...]
    """The other stored ones: index, and address as in a Leaf."""
    extra: Any
    """The rest, as JSON."""
    order: tuple[int, ...] = ()
    """Of the tensors as they are met, which comes where in the file."""
    trace: Trace | None = None
    """For the next walk."""

    def leaf(self, number: int) -> Leaf:
        """One of the large ones."""
        index, address = self.large[number]
        return Leaf(self.entries[index], self.tensors[index], address)

    @property
    def leaves(self) -> list[Leaf]:
        """All large ones."""
        return [self.leaf(number) for number in range(len(self.large))]

    def without_tensors(self) -> Capture:
        """To be kept for the next walk without keeping any tensor alive."""
        return msgspec.structs.replace(self, tensors=())


def capture(state: Any, before: Capture | None = None) -> Capture:
    """Raises Unsupported with the path of what a snapshot cannot hold. With the same tensors as `before` it costs about a microsecond each."""
    if before is not None and before.trace is not None:
        with contextlib.suppress(_OtherTensors):
            return _walk_again(state, before, before.trace)
    return _Walk().of(state)


class _OtherTensors(Exception):  # noqa: N818 - no error: the state is walked anew
    """Not all is where it was at the save before."""


class _Walk:
    """One full walk over a state."""

    def __init__(self) -> None:
        self._met: list[torch.Tensor] = []
        self._names: list[str] = []
        self._seen: dict[str, Seen] = {}
        self._given: dict[int, tuple[Any, Any]] = {}
        """By its id: an object, and the state_dict that it gave."""
        self._entries: list[TensorEntry] = []
        self._owners: dict[Look, str] = {}
        self._cuts = snapshot.Cuts()

    def of(self, state: Any) -> Capture:
        extra = tree.encode(state, self._leaf)
        entries = place(self._entries)
        met_at = {name: index for index, name in enumerate(self._names)}
        order = tuple([met_at[entry.name] for entry in entries])
        tensors = tuple([self._met[index] for index in order])
        small: list[Small] = []
        large: list[tuple[int, int]] = []
        for index, (entry, tensor) in enumerate(zip(entries, tensors, strict=True)):
            address = address_of(tensor)
            if not entry.alias_of and address and entry.nbytes <= SMALL_BYTES:
                small.append(Small(memory.block_at(address, entry.nbytes), entry.offsets[0], entry.name))
            elif not entry.alias_of:
                large.append((index, address))
        return Capture(
            entries=entries,
            tensors=tensors,
            small=tuple(small),
            large=tuple(large),
            extra=extra,
            order=order,
            trace=self._trace(state, extra, ()),
        )

    def _leaf(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            given = _give(value)
            if given is not value:
                self._given[id(value)] = (value, given)
            return given
        local, entry = _entry(name, value, self._cuts)
        # Equal for tensors that are the same memory seen the same way: tied weights. Those without memory are nobody's.
        owner = self._owners.setdefault(_look(local), name) if local.numel() else name
        self._entries.append(entry if owner == name else msgspec.structs.replace(entry, alias_of=owner))
        self._met.append(local)
        self._names.append(name)
        at = tree.TensorAt(name)
        self._seen[name] = Seen(type(value), _look(value), at.document)
        return at

    def _trace(self, value: Any, document: Any, path: tree.Path) -> Trace:
        """What the walk just done has left at a value, given its JSON."""
        if isinstance(value, torch.Tensor):
            return self._seen[tree.join(path)]
        if id(value) in self._given:
            return Given(self._trace(self._given[id(value)][1], document, path))
        keys: tuple[Any, ...] | None = None
        if isinstance(value, Mapping):
            keys = tuple(value)
            pairs = document.get("$dict") if len(document) == 1 else None
            items = [item for _, item in pairs] if isinstance(pairs, list) else list(document.values())
            names, values = [tree.part(key) for key in value], list(value.values())
        elif isinstance(value, list | tuple):
            items = document if isinstance(value, list) else document["$tuple"]
            names, values = [str(index) for index in range(len(value))], list(value)
        else:
            return Other(path)
        parts = tuple(
            [self._trace(one, item, (*path, name)) for one, item, name in zip(values, items, names, strict=True)]
        )
        if not any(isinstance(part, Seen | Branch | Given) for part in parts):
            return Other(path)
        is_fixed = all(isinstance(part, Seen) or (isinstance(part, Branch) and part.is_fixed) for part in parts)
        key_types = [*map(type, keys)] if keys and not all(type(key) is str for key in keys) else None
        return Branch(type(value), keys, key_types, parts, document, is_fixed)


def _walk_again(state: Any, before: Capture, trace: Trace) -> Capture:
    """Along the trace of the walk before. Raises _OtherTensors where it does not hold."""
    met: list[torch.Tensor] = []
    extra = _follow(state, trace, met)
    return msgspec.structs.replace(before, tensors=tuple([met[index] for index in before.order]), extra=extra)


def _follow(value: Any, trace: Trace, met: list[torch.Tensor]) -> Any:
    """The JSON of a value; its tensors are added to `met`."""
    if isinstance(trace, Seen):
        met.append(_same(value, trace))
        return trace.document
    if isinstance(trace, Branch):
        kind, keys, key_types, below, document, is_fixed = trace
        if type(value) is not kind or len(value) != len(below):
            raise _OtherTensors
        if keys is not None:
            if tuple(value) != keys or (key_types and [*map(type, value)] != key_types):
                raise _OtherTensors
            value = value.values()
        parts = []
        for item, part in zip(value, below, strict=True):
            if type(part) is Seen:
                met.append(_same(item, part))
                parts.append(part.document)
            else:
                parts.append(_follow(item, part, met))
        return document if is_fixed else _rebuilt(trace, parts)
    if isinstance(trace, Given):
        given = _give(value)
        if given is value:
            raise _OtherTensors
        return _follow(given, trace.part, met)
    return tree.encode(value, _no_new_tensor, tree.join(trace.path) if trace.path else None)


def _rebuilt(trace: Branch, parts: Sequence[Any]) -> Any:
    """The JSON of a branch, with new parts."""
    before = trace.document
    if trace.keys is None:
        return list(parts) if isinstance(before, list) else {"$tuple": list(parts)}
    if len(before) == 1 and isinstance(before.get("$dict"), list):
        return {"$dict": [[key, part] for (key, _), part in zip(before["$dict"], parts, strict=True)]}
    return dict(zip(before, parts, strict=True))


def _no_new_tensor(_name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        raise _OtherTensors
    return _give(value)


def _give(value: Any) -> Any:
    """The state_dict of what has one, else the value."""
    if isinstance(value, torch.optim.Optimizer):
        gate.knows(value)
    return value.state_dict() if is_stateful(value) else value


def _same(value: Any, seen: Seen) -> torch.Tensor:
    """What this rank holds of a tensor, if it is the one that was seen. Called for every tensor of every save."""
    kind, (address, shape, stride, dtype, is_negative, is_conjugate, cut), _ = seen
    if type(value) is not kind:
        raise _OtherTensors
    local: torch.Tensor = value if kind in PLAIN_TYPES else gate.local_part(value)
    try:
        is_same = (
            local.data_ptr() == address
            and local.dtype is dtype
            and local.shape == shape
            and local.stride() == stride
            and local.is_neg() is is_negative
            and (not dtype.is_complex or local.is_conj() is is_conjugate)
            and (local is value or _cut(value) == cut)
        )
    except RuntimeError:  # one without storage, a sparse one
        is_same = False
    if not is_same:
        raise _OtherTensors
    return local


def _look(tensor: torch.Tensor) -> Look:
    local = tensor if type(tensor) in PLAIN_TYPES else gate.local_part(tensor)
    return Look(
        local.data_ptr(), local.shape, local.stride(), local.dtype, local.is_neg(), local.is_conj(),
        None if local is tensor else _cut(tensor),
    )  # fmt: skip


def _cut(tensor: torch.Tensor) -> Any:
    """How a DTensor is cut."""
    return getattr(tensor, "_spec", None)


def _entry(name: str, tensor: torch.Tensor, cuts: snapshot.Cuts) -> tuple[torch.Tensor, TensorEntry]:
    """What this rank holds, and its entry."""
    kind = type(tensor)
    if kind not in PLAIN_TYPES and kind.__module__ != "torch.distributed.tensor":
        raise Unsupported(
            f"state[{name!r}] is a tensor subclass, {kind.__module__}.{kind.__qualname__}, whose inner parts are not known; nothing was saved."
            " Put its plain tensors into the state instead"
        )
    local = gate.local_part(tensor).detach()
    if local.layout != torch.strided or local.is_nested or local.device.type == "meta" or local.is_quantized:
        kind_name = "nested" if local.is_nested else f"{local.layout} on {local.device}"
        raise Unsupported(f"state[{name!r}] is {kind_name}: only dense tensors with data can be saved")
    if name == RESERVED_NAME:
        raise Unsupported(
            f"state[{name!r}]: safetensors files keep this name for themselves; nothing was saved. Rename it"
        )
    if dtype_name(local) not in DTYPES:
        raise Unsupported(f"state[{name!r}] has type {local.dtype}, which a snapshot cannot hold; nothing was saved")
    box = cuts.of(name, tensor, tuple(local.shape))
    entry = TensorEntry(
        name=name,
        dtype=dtype_name(local),
        shape=tuple(local.shape),
        global_shape=box[0] if box else None,
        global_offsets=box[1] if box else None,
    )
    return local, entry
