"""What is in a state, and how its bytes get into a segment.

`capture` walks a nested state once: tensors become entries (tied ones once, a view with its own bytes only, of a DTensor the local shard), all
else becomes JSON at once. `Copy` moves the tensors: those that may change before the next optimizer step are copied by the caller, the others
by a thread, chunk by chunk, each chunk hashed while it is in cache. memcpy and XXH3 both run outside the interpreter's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from easyckpt import gate, memory, tree
from easyckpt.cuda import Lane
from easyckpt.digest import TensorDigest, TensorHash, digest_tensor
from easyckpt.errors import Unsupported
from easyckpt.layout import DTYPES, TensorEntry, place

CHUNK_BYTES = 4 << 20
SMALL_BYTES = 64 << 10
_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


Look = tuple[Any, ...]
"""All that says which memory a tensor is and how it is read: equal as long as it is that very tensor. Host and devices share no addresses."""


class Leaf(NamedTuple):
    """One tensor of a state."""

    entry: TensorEntry
    """Its place in the segment."""
    tensor: torch.Tensor
    """What this rank holds of it."""
    address: int = 0
    """As `address_of` says."""

    def held(self) -> Leaf:
        """To be copied later: it stays this memory whatever becomes of the tensor's `data`."""
        return Leaf(self.entry, self.tensor.detach(), self.address)


class Small(NamedTuple):
    """A tensor of few bytes in plain host memory."""

    address: int
    """Where it is."""
    at: int
    """Where it goes."""
    nbytes: int
    """How much it is."""
    name: str
    """Whose it is."""


class Known(NamedTuple):
    """What one save leaves to the next about one tensor."""

    kind: type[torch.Tensor]
    look: Look
    at: tree.TensorAt


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
    frozen: frozenset[str] = frozenset()
    """Names of parameters that take no gradient: nothing is expected to change them."""
    known: dict[str, Known] = {}
    """By name, for the next walk."""

    @property
    def leaves(self) -> list[Leaf]:
        """The large ones."""
        entries, tensors = self.entries, self.tensors
        return [Leaf(entries[index], tensors[index], address) for index, address in self.large]


def capture(state: Any, before: Capture | None = None) -> Capture:
    """Raises Unsupported with the path of what a snapshot cannot hold. With the same tensors as `before` it costs a few microseconds each."""
    if before is not None:
        with contextlib.suppress(_OtherTensors):
            return _Again(before).of(state)
    return _Walk().of(state)


class _OtherTensors(Exception):  # noqa: N818 - no error: the state is walked anew
    """Not all tensors are what they were at the save before."""


class _Walk:
    """One walk over a state."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self._known: dict[str, Known] = {}
        self._entries: list[TensorEntry] = []
        self._owners: dict[Look, str] = {}
        self._still: set[int] = set()
        """Memory of parameters that take no gradient."""

    def of(self, state: Any) -> Capture:
        extra = tree.encode(state, self._leaf)
        entries = place(self._entries)
        tensors = tuple([self._tensors[entry.name] for entry in entries])
        small: list[Small] = []
        large: list[tuple[int, int]] = []
        for index, (entry, tensor) in enumerate(zip(entries, tensors, strict=True)):
            address = address_of(tensor)
            if not entry.alias_of and address and entry.nbytes <= SMALL_BYTES:
                small.append(Small(address, entry.offsets[0], entry.nbytes, entry.name))
            elif not entry.alias_of:
                large.append((index, address))
        return Capture(
            entries=entries,
            tensors=tensors,
            small=tuple(small),
            large=tuple(large),
            extra=extra,
            frozen=self._frozen(),
            known=self._known,
        )

    def _leaf(self, name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return self._other(value)
        local, entry = _entry(name, value)
        # Equal for tensors that are the same memory seen the same way: tied weights. Those without memory are nobody's.
        owner = self._owners.setdefault(_look(local), name) if local.numel() else name
        self._entries.append(entry if owner == name else msgspec.structs.replace(entry, alias_of=owner))
        self._tensors[name] = local
        at = tree.TensorAt(name)
        self._known[name] = Known(type(value), _look(value), at)
        return at

    def _other(self, value: Any) -> Any:
        if isinstance(value, torch.optim.Optimizer):
            gate.knows(value)
        elif isinstance(value, torch.nn.Module):
            self._still.update(_address(parameter) for parameter in value.parameters() if not parameter.requires_grad)
        return value.state_dict() if is_stateful(value) else value

    def _frozen(self) -> frozenset[str]:
        if not self._still:
            return frozenset()
        return frozenset(name for name, tensor in self._tensors.items() if _address(tensor) in self._still)


class _Again(_Walk):
    """A walk over a state whose tensors are expected to be those of the walk before; ends at the first that is not."""

    def __init__(self, before: Capture) -> None:
        super().__init__()
        self._before = before
        self._known = before.known

    def of(self, state: Any) -> Capture:
        extra = tree.encode(state, self._leaf)
        if len(self._tensors) != len(self._known):
            raise _OtherTensors
        found = self._tensors
        tensors = tuple([found[entry.name] for entry in self._before.entries])
        return msgspec.structs.replace(self._before, tensors=tensors, extra=extra, frozen=self._frozen())

    def _leaf(self, name: str, value: Any) -> Any:
        known = self._known.get(name)
        if known is None:
            if isinstance(value, torch.Tensor):
                raise _OtherTensors
            return self._other(value)
        if type(value) is not known.kind or value.layout is not torch.strided or known.look != _look(value):
            raise _OtherTensors
        self._tensors[name] = value if known.kind in _PLAIN_TYPES else gate.local_part(value)
        return known.at


def _look(tensor: torch.Tensor) -> Look:
    local, spec = tensor, None
    if type(tensor) not in _PLAIN_TYPES:
        local = gate.local_part(tensor)
        spec = getattr(tensor, "_spec", None)  # how a DTensor is cut
    return (
        local.data_ptr(), local.shape, local.stride(), local.dtype, spec, local.storage_offset(), local.is_conj(), local.is_neg(),
    )  # fmt: skip


def _address(tensor: torch.Tensor) -> int:
    return gate.local_part(tensor).untyped_storage().data_ptr()


def is_stateful(value: Any) -> bool:
    """A module, optimizer, scheduler, scaler, data loader: anything that gives and takes a state_dict."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def global_box(name: str, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """(shape of the whole, where this rank's part begins) of a DTensor; None for a plain tensor."""
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        return None
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(tensor, DTensor)  # noqa: S101 - nothing else has a _local_tensor here: see _entry
    if any(placement.is_partial() for placement in tensor.placements):
        raise Unsupported(
            f"state[{name!r}] is a partial DTensor: reduce it (full_tensor or redistribute) before it is saved"
        )
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(shape) != tuple(local.shape):
        raise Unsupported(f"state[{name!r}] has an irregular shard {tuple(local.shape)}; nothing was saved")
    return tuple(tensor.shape), tuple(offsets)


def dtype_name(tensor: torch.Tensor) -> str:
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def _entry(name: str, tensor: torch.Tensor) -> tuple[torch.Tensor, TensorEntry]:
    """What this rank holds, and its entry."""
    kind = type(tensor)
    if kind not in _PLAIN_TYPES and kind.__module__ != "torch.distributed.tensor":
        raise Unsupported(
            f"state[{name!r}] is a tensor subclass, {kind.__module__}.{kind.__qualname__}, whose inner parts are not known; nothing was saved."
            " Put its plain tensors into the state instead"
        )
    local = gate.local_part(tensor).detach()
    if local.layout != torch.strided or local.device.type == "meta" or local.is_quantized:
        raise Unsupported(
            f"state[{name!r}] is {local.layout} on {local.device}: only dense tensors with data can be saved"
        )
    if dtype_name(local) not in DTYPES:
        raise Unsupported(f"state[{name!r}] has type {local.dtype}, which a snapshot cannot hold; nothing was saved")
    box = global_box(name, tensor)
    entry = TensorEntry(
        name=name,
        dtype=dtype_name(local),
        shape=tuple(local.shape),
        global_shape=box[0] if box else None,
        global_offsets=box[1] if box else None,
    )
    return local, entry


# ---------------------------------------------------------------------------------------------------------------- copy


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in host memory in the order of the file."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def address_of(tensor: torch.Tensor) -> int:
    """Where its elements lie in host memory in the order of the file; 0 where they do not."""
    return tensor.data_ptr() if is_plain_memory(tensor) else 0


def view_at(block: memoryview, entry: TensorEntry) -> torch.Tensor:
    """The tensor in a segment's memory, without a copy."""
    if entry.nbytes == 0:
        return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    flat = torch.frombuffer(block, dtype=torch.uint8, count=entry.nbytes, offset=entry.offsets[0])
    return flat.view(getattr(torch, entry.dtype)).view(entry.shape)


class Copy:
    """Moves captured tensors into the memory of one claimed slot and hashes them."""

    def __init__(self, block: memoryview, lane: Lane | None = None) -> None:
        self._lane = lane
        self._started = False
        self._memory = block
        self._address = memory.address_of(block)
        self._unhashed: list[tuple[str, int, int]] = []
        self._small: Sequence[Small] = ()
        self.digests: dict[str, TensorDigest] = {}
        self.hurry = False
        """Set by who waits: hashing is put off until all is copied."""

    def copy(self, leaves: Sequence[Leaf]) -> None:
        """Copies and hashes, chunk by chunk; with `hurry` only copies, and leaves the hashing to `hash_rest`."""
        for leaf in leaves:
            if self.hurry or not leaf.address:
                self.copy_only([leaf])
            else:
                self._copy_and_hash(leaf)
        self.finish()

    def copy_only(self, leaves: Sequence[Leaf]) -> None:
        """Only starts the copies of device memory: `finish` ends them."""
        for leaf in leaves:
            begin, end = leaf.entry.offsets
            if leaf.address:
                memory.copy(self._address + begin, leaf.address, end - begin)
            elif end > begin:
                view = view_at(self._memory, leaf.entry)
                if self._lane is not None and leaf.tensor.is_cuda:
                    self._lane.copy(view, leaf.tensor)
                    self._started = True
                else:
                    with torch.no_grad():
                        view.copy_(leaf.tensor)
        self.adopt(leaves)

    def copy_small(self, small: Sequence[Small]) -> None:
        copy, base = memory.copy_small, self._address
        for address, at, nbytes, _ in small:
            copy(base + at, address, nbytes)
        self._small = small

    def adopt(self, leaves: Sequence[Leaf]) -> None:
        """Takes for copied what another process has copied: only hashing is left."""
        self._unhashed.extend((leaf.entry.name, *leaf.entry.offsets) for leaf in leaves)

    def finish(self) -> None:
        """Until all that was started is there."""
        if self._lane is not None and self._started:
            self._lane.finish()
            self._started = False

    def keep(self, leaves: Sequence[Leaf]) -> None:
        """Takes for copied what the slot holds from an earlier save, and hashes the tensors themselves, to see whether they are still that."""
        for leaf in leaves:
            self.digests[leaf.entry.name] = source_digest(leaf.tensor)

    def hash_rest(self) -> None:
        for name, begin, end in self._unhashed:
            self.digests[name] = digest_tensor(self._memory[begin:end])
        for _, at, nbytes, name in self._small:
            self.digests[name] = digest_tensor(self._memory[at : at + nbytes])
        self._unhashed.clear()

    def _copy_and_hash(self, leaf: Leaf) -> None:
        begin, end = leaf.entry.offsets
        running = TensorHash()
        for at in range(begin, end, CHUNK_BYTES):
            stop = min(at + CHUNK_BYTES, end)
            memory.copy(self._address + at, leaf.address + at - begin, stop - at)
            running.update(self._memory[at:stop])
        self.digests[leaf.entry.name] = running.finish()


def source_digest(tensor: torch.Tensor) -> TensorDigest:
    """Of the tensor as it is now, to see whether it moved since it was copied."""
    plain = tensor if is_plain_memory(tensor) else tensor.cpu().contiguous().resolve_conj().resolve_neg()
    if plain.numel() == 0:
        return digest_tensor(memoryview(b""))
    nbytes = plain.numel() * plain.element_size()
    return digest_tensor(memory.block_at(plain.data_ptr(), nbytes))
