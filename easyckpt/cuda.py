"""Device memory into a segment: asynchronous copies on a side stream into the segment's own pages, which are registered with the driver.

The side stream first waits for what the training stream had been given at the moment of the save. Before a byte is hashed or anyone is told
that the copy is done, the side stream is synchronized. Where registering is refused (locked-memory limit) the copies are correct and slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Lane:
    """The way from the devices of one save into one slot."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        """On the training thread: marks where the copies may begin."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        for device in devices:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Starts one copy; `finish` ends it. The source is kept alive by who called."""
        with torch.cuda.stream(self._streams[source.device]):
            target.copy_(source, non_blocking=True)

    def sum_of(self, tensor: torch.Tensor) -> int:
        """`word_sum` of a tensor as it is when the copies are done, wherever the training stream is by then."""
        with torch.cuda.stream(self._streams[tensor.device]):
            return int(word_sum(tensor))

    def number(self, made: torch.Tensor) -> int:
        """What the training stream had computed before this way was opened."""
        with torch.cuda.stream(self._streams[made.device]):
            return int(made)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()


def word_sum(tensor: torch.Tensor) -> torch.Tensor:
    """A sum over a tensor's bits, made where it lies at the speed of its memory: tells a tensor that moved, and is no proof of more."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    words = flat.view(torch.uint8)
    if words.numel() % 4 == 0 and words.data_ptr() % 4 == 0:
        words = words.view(torch.int32)
    return words.sum(dtype=torch.int64)


def register(address: int, nbytes: int) -> bool:
    """Lets devices write straight into the mapping; False where the driver refuses."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0  # type: ignore[no-untyped-call]


def unregister(address: int) -> None:
    """Before the mapping is closed."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
