"""A tensor that is cut another way than it was saved."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from easyckpt import Checkpointer, digest, shm
from easyckpt.errors import Mismatch
from easyckpt.fitting import fill
from easyckpt.layout import TensorEntry
from easyckpt.reshard import Box, blocks, cover, element_span, overlap, strides
from easyckpt.snapshot import Copy, Leaf, address_of


@st.composite
def cuts(draw, shape):
    """A grid of boxes that makes up the whole: uneven, some of them empty."""
    edges = []
    for extent in shape:
        inner = draw(st.lists(st.integers(0, extent), max_size=3))
        edges.append(sorted([0, *inner, extent]))
    axes = [list(itertools.pairwise(edge)) for edge in edges]
    return [
        Box(offsets=tuple(begin for begin, _ in cell), shape=tuple(end - begin for begin, end in cell))
        for cell in itertools.product(*axes)
    ]


@given(st.data(), st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
def test_any_cut_is_made_of_any_other(data, shape):
    """Every target box is covered exactly once, and its bytes lie where `element_span` says."""
    before, after = data.draw(cuts(shape)), data.draw(cuts(shape))
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    everything = Box(offsets=(0,) * len(shape), shape=shape)
    for target in after:
        got = torch.full(target.shape, -1)
        pieces = cover(target, before)
        assert pieces is not None
        for piece in pieces:
            source = before[piece.source]
            held = whole[source.slices(everything)].contiguous().flatten()
            for block in blocks(piece.box, source, 8, 40):
                first, last = element_span(block, source)
                part = held[first:last].clone().as_strided(block.shape, strides(source.shape), 0)
                got[block.slices(target)] = part
        assert torch.equal(got, whole[target.slices(everything)])


def test_replicas_are_read_once_and_gaps_are_refused():
    half = Box(offsets=(0, 0), shape=(2, 4))
    rest = Box(offsets=(2, 0), shape=(2, 4))
    target = Box(offsets=(1, 1), shape=(2, 2))
    assert [piece.source for piece in cover(target, [half, half, rest])] == [0, 2]
    assert cover(target, [half]) is None
    assert cover(target, [half, rest, Box(offsets=(1, 0), shape=(2, 4))]) is None
    assert overlap(half, rest) is None
    assert cover(Box(offsets=(), shape=()), [Box(offsets=(), shape=())]) is not None


class Shards:
    """Shards of one tensor in memory, which count the bytes read from them."""

    def __init__(self, whole, boxes):
        from easyckpt.layout import SegmentHeader, place, with_digests

        self.read_bytes = 0
        everything = Box(offsets=(0,) * whole.dim(), shape=tuple(whole.shape))
        self.shards = []
        for rank, box in enumerate(boxes):
            local = whole[box.slices(everything)].contiguous()
            entry = TensorEntry(
                name="w", dtype="float32", shape=box.shape, global_shape=tuple(whole.shape), global_offsets=box.offsets
            )
            header = SegmentHeader(
                member="m", role="r", rank=rank, ranks=len(boxes), lineage=0, step=1, tensors=place([entry]),
                extra={"w": {"$tensor": "w"}},
            )  # fmt: skip
            block = memoryview(bytearray(header.data_bytes))
            copy = Copy(block)
            copy.copy([Leaf(header.tensors[0], local, address_of(local))])
            copy.hash_rest()
            self.shards.append(Shard(self, with_digests(header, copy.digests), block))


class Shard:
    def __init__(self, owner, header, block):
        self.owner, self.header, self.block, self.where = owner, header, block, f"rank {header.rank}"

    def view(self):
        return None

    def read_into(self, target, at):
        self.owner.read_bytes += len(target)
        target[:] = self.block[at : at + len(target)]

    def explain(self, error):
        return error


def test_only_needed_parts_are_read_and_each_is_proven(monkeypatch):
    """Of a large shard a quarter is needed: a quarter and at most two parts' rest is read, and a flipped byte in it is found."""
    monkeypatch.setattr(digest, "PART_BYTES", 4096)
    whole = torch.randn(4000, 16)
    held = Shards(whole, [Box(offsets=(0, 0), shape=(4000, 16))])
    target = torch.zeros(1000, 16)
    box = Box(offsets=(1500, 0), shape=(1000, 16))
    from easyckpt.reader import Parts, read_all

    shard = held.shards[0]
    want = Parts(pieces=((shard, shard.header.tensors[0], box),), target=target, box=box)
    read_all([want])
    assert torch.equal(target, whole[1500:2500])
    assert held.read_bytes <= target.numel() * 4 + 2 * 4096
    shard.block[1600 * 64] ^= 1
    with pytest.raises(Exception, match="digest"):
        read_all([want])
    shard.block[1600 * 64] ^= 1
    shard.block[10] ^= 1
    read_all([want])


def test_a_columns_cut_is_pieced_together_from_rows(monkeypatch):
    monkeypatch.setattr(digest, "PART_BYTES", 64)
    whole = torch.randn(10, 6)
    rows = [Box(offsets=(0, 0), shape=(7, 6)), Box(offsets=(7, 0), shape=(0, 6)), Box(offsets=(7, 0), shape=(3, 6))]
    held = Shards(whole, rows)
    state = {"w": torch.zeros(10, 6)}
    fill(held.shards, state)
    assert torch.equal(state["w"], whole)
    with pytest.raises(Mismatch, match="do not make up"):
        fill(held.shards[:1], {"w": torch.zeros(10, 6)})


def test_ranks_with_different_names_are_restored_together(folder):
    """Pipeline stages: each rank has other tensors; one rank afterwards takes all of them."""
    engines = [Checkpointer(folder=folder, rank=rank, ranks=2) for rank in (0, 1)]
    for rank, one in enumerate(engines):
        one.save(1, {"model": {f"layer{rank}": torch.full((3,), float(rank)), "shared": torch.ones(2)}, "step": 1})
        one.wait()
        one.close()
    alone = Checkpointer(folder=folder, member="other")
    state = {"model": {"layer0": torch.zeros(3), "layer1": torch.zeros(3), "shared": torch.zeros(2)}, "step": 0}
    restored = alone.restore(state)
    assert restored.step == state["step"] == 1
    assert state["model"]["layer1"].tolist() == [1.0] * 3
    assert len(shm.scan(folder)) == 2
    alone.close()


def test_ranks_whose_optimizers_hold_other_parameters_are_not_mixed_up(folder):
    """Pipeline stages number their parameters alike: one process cannot tell whose moments are whose, and says so."""
    engines = [Checkpointer(folder=folder, rank=rank, ranks=2) for rank in (0, 1)]
    for rank, one in enumerate(engines):
        layer = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer(torch.full((1, 3), rank + 1.0)).sum().backward()
        optimizer.step()
        one.save(1, {"optimizer": optimizer})
        one.wait()
    assert [one.restore({"optimizer": optimizer}).step for one in engines] == [1, 1]
    for one in engines:
        one.close()
    alone = Checkpointer(folder=folder, member="other")
    fresh = torch.optim.SGD(torch.nn.Linear(3, 3).parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(Mismatch, match="is another tensor on each rank"):
        alone.restore({"optimizer": fresh})
    alone.close()


def test_only_some_keys_are_restored(folder):
    engine = Checkpointer(folder=folder)
    engine.save(4, {"model": {"a": torch.ones(2), "b": torch.ones(2)}, "optimizer": {"m": torch.ones(2)}, "step": 4})
    state = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}, "mine": 1}
    engine.restore(state, only=["model/a"])
    assert state["model"]["a"].sum() == 2
    assert state["model"]["b"].sum() == 0
    assert set(state) == {"model", "mine"}
    engine.restore(state, only=["model", "step"])
    assert state["model"]["b"].sum() == 2
    assert state["step"] == 4
    engine.close()
