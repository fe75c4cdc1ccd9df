"""A folder of memory for each test, segments made in it without torch, and checkpointers that are closed at the end."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from easyckpt import Checkpointer, layout, memory
from easyckpt.digest import digest_tensor
from easyckpt.errors import SaveFailed
from easyckpt.layout import SegmentHeader, SegmentName, TensorEntry
from easyckpt.slot import Slot

MakeSegment = Callable[..., Path]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A node's segment folder, in real shared memory."""
    path = Path(f"/dev/shm/easyckpt-test-{os.getpid()}-{uuid.uuid4().hex[:8]}")
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_segment(folder: Path) -> MakeSegment:
    """Writes and seals a segment of two tensors whose bytes depend on (seed, step)."""

    def make(
        step: int = 1, *, member: str = "trainer-0", rank: int = 0, ranks: int = 1, slot: int = 0, **fields
    ) -> Path:
        seed = fields.pop("seed", 0)
        blocks = {"a": bytes((seed + step + i) % 251 for i in range(40_000)), "b": bytes([step % 256]) * 24}
        entries = [
            TensorEntry(name="a", dtype="float32", shape=(100, 100)),
            TensorEntry(name="b", dtype="int64", shape=(3,)),
            TensorEntry(name="tied", dtype="int64", shape=(3,), alias_of="b"),
        ]
        header = SegmentHeader(
            member=member, role=fields.pop("role", "trainer"), rank=rank, ranks=ranks, lineage=fields.pop("lineage", 0),
            step=step, flush=fields.pop("flush", True), tensors=layout.place(entries), extra={"step": step}, **fields,
        )  # fmt: skip
        place = Slot(folder / str(SegmentName(member=member, rank=rank, slot=slot)))
        place.fit(layout.room_for(header), header.data_bytes)
        place.claim()
        view = place.view()
        for entry in header.tensors:
            view[entry.offsets[0] : entry.offsets[1]] = blocks[entry.alias_of or entry.name]
        digests = {name: digest_tensor(memoryview(block)) for name, block in blocks.items()}
        view.release()
        place.seal(layout.with_digests(header, digests))
        place.close()
        return place.path

    assert memory.address_of(memoryview(b"x"))
    return make


@pytest.fixture
def engine(folder: Path) -> Iterator[Callable[..., Checkpointer]]:
    """Makes checkpointers in the test's folder."""
    made: list[Checkpointer] = []

    def make(storage: str | os.PathLike[str] | None = None, **options) -> Checkpointer:
        made.append(Checkpointer(storage, **{"folder": folder, **options}))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(SaveFailed):  # the tests that break something look at it themselves
            one.close()
