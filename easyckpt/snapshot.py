"""How the bytes of a state's tensors get into a segment, and what is known of a tensor for that.

`Copy` moves the tensors: those that may change before the next optimizer step are copied by the caller, the others by a thread, chunk by chunk,
each chunk hashed while it is in cache. memcpy and XXH3 both run outside the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from easyckpt import memory
from easyckpt.cuda import Lane
from easyckpt.digest import TensorDigest, TensorHash, digest_tensor
from easyckpt.errors import Unsupported
from easyckpt.layout import DTYPES, TensorEntry
from easyckpt.reshard import Extents

CHUNK_BYTES = 4 << 20
SMALL_BYTES = 64 << 10
_DTYPE_NAMES = {getattr(torch, name): name for name in DTYPES}
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


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

    block: memoryview
    """Its bytes, where they are: valid while the tensor lives."""
    at: int
    """Where they go."""
    name: str
    """Whose they are."""


def is_stateful(value: Any) -> bool:
    """A module, optimizer, scheduler, scaler, data loader: anything that gives and takes a state_dict."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def global_box(name: str, tensor: torch.Tensor) -> tuple[Extents, Extents] | None:
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


class Cuts:
    """`global_box` of many tensors: layers are cut alike, and torch takes longer to say how than a small one to be copied."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, Extents], tuple[Extents, Extents] | None] = {}

    def of(self, name: str, tensor: torch.Tensor, local_shape: Extents) -> tuple[Extents, Extents] | None:
        spec = getattr(tensor, "_spec", None)
        if spec is None:
            return global_box(name, tensor)
        if (spec, local_shape) not in self._known:
            self._known[spec, local_shape] = global_box(name, tensor)
        return self._known[spec, local_shape]


def dtype_name(tensor: torch.Tensor) -> str:
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


# ---------------------------------------------------------------------------------------------------------------- copy


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements lie in host memory in the order of the file."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def counter_of(tensor: torch.Tensor) -> int:
    """How often torch counted a change of its memory; -1 for one that has no counter."""
    return -1 if tensor.is_inference() else int(tensor._version)  # noqa: SLF001 - torch has no other name for it


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

    def copy_small(self, small: Sequence[Small], targets: Sequence[memoryview]) -> None:
        """`targets`: where each of them goes, in the slot's memory."""
        for target, (block, _, _) in zip(targets, small, strict=True):
            target[:] = block
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
        for block, at, name in self._small:
            self.digests[name] = digest_tensor(self._memory[at : at + len(block)])
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
