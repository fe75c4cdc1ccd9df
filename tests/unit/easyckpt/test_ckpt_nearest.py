"""What a restore reads: each shard from its nearest good tier, no more bytes than are needed, several at a time, into the state itself."""

import itertools
import os
import threading

import pytest
import torch

from easyckpt import Checkpointer, digest, memory, shm, snapshot
from easyckpt.agreement import Alone
from easyckpt.errors import Corrupt
from easyckpt.storage import FolderStorage

QUIET = {"on_event": lambda _event: None}


def flip(path, at=-2):
    with open(path, "r+b") as file:
        file.seek(at, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(at, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def in_memory(folder, rank):
    return next(one.path for one in shm.scan(folder) if one.header.rank == rank)


@pytest.fixture
def stages(folder, tmp_path):
    """Three ranks, each with layers of its own, whole in memory and on storage."""
    engines = [Checkpointer(tmp_path, folder=folder, rank=rank, ranks=3, **QUIET) for rank in range(3)]
    for rank, one in enumerate(engines):
        one.save(1, {"model": {f"layer{rank}": torch.full((20_000,), rank + 1.0)}, "step": 1})
        one._saver.settle(30)
    engines[0].wait()
    os.kill(engines[0]._flusher.sidecar.pid, 9)
    engines[0]._flusher.sidecar._process.wait()
    yield engines
    for one in engines:
        one.close()


def test_of_every_shard_only_the_bad_copy_is_replaced(stages, folder, tmp_path):
    """Rank 0 is bad in memory, rank 2 on storage: the one from storage, the other from memory, and both refusals are counted."""
    flip(in_memory(folder, 0))
    flip(next(tmp_path.rglob("*.r2.safetensors")))
    alone = Checkpointer(tmp_path, folder=folder, member="new", flush_every=None, **QUIET)
    state = {"model": {f"layer{rank}": torch.zeros(20_000) for rank in range(3)}, "step": 0}
    restored = alone.restore(state)
    assert (restored.step, restored.tier) == (1, "storage")
    assert [state["model"][f"layer{rank}"].unique().tolist() for rank in range(3)] == [[1.0], [2.0], [3.0]]
    assert alone.events.counts["tier_refused"] == 1
    flip(in_memory(folder, 2))
    with pytest.raises(Corrupt, match="half filled"):
        alone.restore(state)
    alone.close()


def test_a_rank_takes_its_own_shard_from_storage_while_the_others_take_theirs_from_memory(stages, folder):
    for rank, one in enumerate(stages):
        if rank == 1:
            flip(in_memory(folder, 1))
        state = {"model": {f"layer{rank}": torch.zeros(20_000)}, "step": 0}
        assert one.restore(state).tier == ("storage" if rank == 1 else "shm")
        assert state["model"][f"layer{rank}"].unique().tolist() == [rank + 1.0]


class Cut:
    """Ranks that each hold some rows of one matrix, as sharded tensors do."""

    def __init__(self, monkeypatch, rows, columns):
        self.shape = (rows, columns)
        self.whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
        self.places = {}
        monkeypatch.setattr(snapshot, "global_box", lambda _name, tensor: self.places.get(tensor.data_ptr()))

    def part(self, first, last):
        local = self.whole[first:last].clone()
        self.places[local.data_ptr()] = (self.shape, (first, 0))
        return local

    def save(self, folder, bounds):
        edges = list(itertools.pairwise(bounds))
        for rank, (first, last) in enumerate(edges):
            engine = Checkpointer(folder=folder, rank=rank, ranks=len(edges), **QUIET)
            engine.save(1, {"w": self.part(first, last), "other": torch.zeros(50_000)})
            engine.close()


@pytest.mark.parametrize("bounds", [[0, 500, 1000], [0, 1, 999, 1000], [0, 0, 1000], [0, 1000]], ids=str)
def test_each_rank_reads_what_it_needs_and_little_more(folder, monkeypatch, bounds):
    """Four ranks saved 1000 rows; others, evenly or not, restore them: all together read each byte once, and a part or two at each cut."""
    monkeypatch.setattr(digest, "PART_BYTES", 8192)
    cut = Cut(monkeypatch, 1000, 128)
    cut.save(folder, [0, 130, 500, 800, 1000])
    total = 0
    for rank, (first, last) in enumerate(itertools.pairwise(bounds)):
        engine = Checkpointer(folder=folder, member="new", rank=rank, ranks=len(bounds) - 1, **QUIET)
        local = cut.part(first, last)
        local.zero_()
        restored = engine.restore({"w": local}, only=["w"])
        assert torch.equal(local, cut.whole[first:last])
        assert restored.nbytes <= local.nbytes + 2 * 8192 * 4
        total += restored.nbytes
        engine.close()
    assert total <= cut.whole.nbytes + 2 * 8192 * 4 * len(bounds)


def test_a_cut_of_columns_takes_bounded_memory(folder, monkeypatch):
    """Rows are needed whole for their proof, but never many at a time."""
    from easyckpt import reader

    monkeypatch.setattr(digest, "PART_BYTES", 4096)
    monkeypatch.setattr(reader, "BLOCK_BYTES", 64 << 10)
    taken = []
    monkeypatch.setattr(
        reader.torch, "empty", lambda *shape, **kind: (taken.append(shape[0]), torch.zeros(*shape, **kind))[1]
    )
    cut = Cut(monkeypatch, 1000, 128)
    cut.save(folder, [0, 1000])
    engine = Checkpointer(folder=folder, member="new", rank=1, ranks=4, **QUIET)
    local = cut.whole[:, 32:64].clone().zero_()
    cut.places[local.data_ptr()] = (cut.shape, (0, 32))
    engine.restore({"w": local}, only=["w"])
    assert torch.equal(local, cut.whole[:, 32:64])
    assert taken
    assert max(taken) <= (64 << 10) + 2 * 4096
    engine.close()


def test_of_some_keys_only_their_bytes_are_read(folder):
    engine = Checkpointer(folder=folder, **QUIET)
    state = {"model": {"a": torch.ones(1000), "b": torch.ones(70_000)}, "optimizer": {"m": torch.ones(90_000)}}
    engine.save(1, state)
    assert engine.restore(state, only=["model/a"]).nbytes == 4000
    assert engine.restore(state, only=["model"]).nbytes == 284_000
    assert engine.restore(state).nbytes == 644_000
    engine.close()


def status_bytes(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def test_a_live_state_is_filled_without_a_second_one(folder, tmp_path):
    """From storage 192 MiB go straight into the tensors: the peak of this process rises by less than a tenth of that."""
    engine = Checkpointer(tmp_path, folder=folder, **QUIET)
    state = {f"w{index}": torch.full((8 << 20,), float(index)) for index in range(6)}
    engine.save(1, state)
    engine.close()
    for tensor in state.values():
        tensor.zero_()
    engine = Checkpointer(tmp_path, folder=folder, flush_every=None, **QUIET)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = status_bytes("VmRSS")
    from easyckpt.saver import Saver

    # What the next save needs is taken afterwards, in the background: it is not the restore's.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "prepare_later", lambda _this, _header: None)
        assert engine.restore(state).tier == "storage"
    assert status_bytes("VmHWM") - before < 19 << 20
    assert [tensor[-1].item() for tensor in state.values()] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    engine.close()


class Meeting(FolderStorage):
    """A storage on which the first read of two tensors' bytes waits for the other one's."""

    def __init__(self, root):
        super().__init__(root)
        self.barrier = threading.Barrier(2, timeout=20)
        self.met = set()

    def open_shard(self, folder, name):
        reader = super().open_shard(folder, name)
        read, meeting = reader.read_into, self

        def read_into(target, at):
            if at >= 4096 and threading.get_ident() not in meeting.met:
                meeting.met.add(threading.get_ident())
                meeting.barrier.wait()
            read(target, at)

        reader.read_into = read_into
        return reader


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core only: tensors are read one after the other")
def test_tensors_are_read_side_by_side(folder, tmp_path):
    """Two reads that wait for each other both come."""
    state = {"a": torch.ones(300_000), "b": torch.full((300_000,), 2.0)}
    engine = Checkpointer(tmp_path, folder=folder, **QUIET)
    engine.save(1, state)
    engine.close()
    engine = Checkpointer(tmp_path, folder=folder, flush_every=None, **QUIET)
    storage = Meeting(tmp_path)
    engine._storage = storage
    assert engine.restore(state).tier == "storage"
    assert len(storage.met) == 2
    engine.close()


class Crowded(Alone):
    """As many ranks restore on these cores as there are."""

    sharing = len(os.sched_getaffinity(0))


def test_ranks_that_share_their_cores_take_no_more_threads_than_there_are(folder, monkeypatch):
    """A core each: every rank reads on the thread that asked."""
    seen = set()
    copy = memory.copy
    monkeypatch.setattr(memory, "copy", lambda *where: (seen.add(threading.get_ident()), copy(*where))[1])
    state = {"a": torch.ones(300_000), "b": torch.full((300_000,), 2.0)}
    engine = Checkpointer(folder=folder, ranks_agree=Crowded(), mode="copy", **QUIET)
    engine.save(1, state)
    engine.wait()
    seen.clear()
    assert engine.restore(state).tier == "shm"
    assert seen == {threading.get_ident()}
    engine.close()
