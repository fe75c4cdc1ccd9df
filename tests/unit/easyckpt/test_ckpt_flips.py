"""One changed byte, anywhere, on any tier: it is found, and nothing of that copy is believed.

Small snapshots are tried byte by byte through the very call a trainer makes; a large one at the places where it is proven in parts. In every
test the damaged copy is the only one, so a restore may only find nothing, or say that what it found is damaged.
"""

import contextlib
import shutil

import pytest
import torch

from easyckpt import Checkpointer, manifest, read_weights, shm
from easyckpt.digest import PART_BYTES
from easyckpt.errors import BadSegment, Corrupt, EasyckptError
from easyckpt.flush import flush_segment, verify_stored
from easyckpt.replica import open_for_send, receive
from easyckpt.shardserver import Peer, ShardServer
from easyckpt.storage import list_manifests

QUIET = {"on_event": lambda _event: None}


def small():
    tied = torch.tensor([1.5, -2.0, 3.25])
    return {"a": tied, "b": tied, "n": torch.tensor([7, -1]), "none": torch.empty(0), "t": torch.tensor(2.0), "step": 4}


def blank(state):
    return {name: torch.zeros_like(one) if isinstance(one, torch.Tensor) else 0 for name, one in state.items()}


class Tier:
    """One copy of one snapshot, and the engine that can only restore from there."""

    def __init__(self, kind, folder, root, state):
        self.stack = contextlib.ExitStack()
        self.state = state
        made = Checkpointer(folder=folder, **QUIET)
        made.save(4, state)
        made.close()
        (segment,) = shm.scan(folder)
        storage, peers = None, ()
        self.root = folder
        if kind == "held for a peer":
            receive(folder, open_for_send(segment.path)[2], segment.path.name)
            segment.path.unlink()
        elif kind == "storage":
            storage = root / "storage"
            flush_segment(segment, storage)
            segment.path.unlink()
            self.root = storage
        elif kind == "over the wire":
            self.root = folder.with_name(folder.name + "-far")
            self.stack.callback(shutil.rmtree, self.root)
            receive(self.root, open_for_send(segment.path)[2], segment.path.name)
            segment.path.unlink()
            server = ShardServer(self.root)
            self.stack.callback(server.close)
            peers = (Peer(server.address),)
        (self.path,) = (path for path in self.root.rglob("*.safetensors") if shm.peek(path) is not None)
        self.prefix_bytes = segment.prefix_bytes
        self.engine = Checkpointer(storage, folder=folder, member="new", flush_every=None, peers=peers, **QUIET)
        self.stack.callback(self.engine.close)

    def header_places(self):
        """Every byte that says something, and some of the spaces behind it."""
        raw = self.path.read_bytes()[: self.prefix_bytes]
        text = len(raw.rstrip(b" "))
        return [*range(text), *range(text, self.prefix_bytes, 97), self.prefix_bytes - 1]

    def tensor_places(self):
        return list(range(self.prefix_bytes, self.path.stat().st_size))

    def unnoticed(self, places, path=None):
        """Places whose change a restore did not notice."""
        found, path = [], path or self.path
        for at in places:
            with flipped(path, at), contextlib.suppress(Corrupt):
                if self.engine.restore(blank(self.state)) is not None:
                    found.append(at)
        return found


@contextlib.contextmanager
def flipped(path, at, bit=0x01):
    with open(path, "r+b") as file:
        file.seek(at)
        before = file.read(1)
        file.seek(at)
        file.write(bytes([before[0] ^ bit]))
        file.flush()
        yield
        file.seek(at)
        file.write(before)


@pytest.fixture
def tier(folder, tmp_path):
    made = []

    def make(kind, state=None):
        made.append(Tier(kind, folder, tmp_path, state if state is not None else small()))
        return made[-1]

    yield make
    for one in made:
        one.stack.close()


def test_every_byte_in_memory(tier):
    """Header and tensors, by a restore."""
    one = tier("shm")
    places = one.header_places() + one.tensor_places()
    assert len(places) > 1000
    assert one.unnoticed(places) == []
    assert one.engine.restore(blank(one.state)).tier == "shm"


def test_every_byte_of_a_copy_held_for_a_peer(tier):
    one = tier("held for a peer")
    assert one.unnoticed([*one.header_places(), *one.tensor_places()]) == []
    assert one.engine.restore(blank(one.state)).tier == "peer"


def test_every_byte_in_another_nodes_memory(tier):
    """Read over the wire into the state."""
    one = tier("over the wire")
    assert one.unnoticed([*one.header_places()[::2], *one.tensor_places()]) == []
    assert one.engine.restore(blank(one.state)).tier == "peer"


def test_every_byte_on_storage(tier):
    """Of the shard and of its manifest."""
    one = tier("storage")
    assert one.unnoticed([*one.header_places(), *one.tensor_places()]) == []
    record = next(one.root.rglob(manifest.FILE_NAME))
    assert one.unnoticed(range(record.stat().st_size), record) == []
    assert one.engine.restore(blank(one.state)).tier == "storage"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shm", "held for a peer", "over the wire", "storage"])
def test_every_byte_with_every_space(tier, kind):
    one = tier(kind)
    assert one.unnoticed(range(one.path.stat().st_size)) == []


def test_every_bit_is_as_good_as_another(tier):
    """Eight bits of a few bytes, through verify as well."""
    one = tier("shm")
    for at in (0, 7, 9, 70, 200, one.prefix_bytes - 1, one.prefix_bytes, one.prefix_bytes + 30):
        for bit in range(8):
            with flipped(one.path, at, 1 << bit), pytest.raises(BadSegment):
                shm.verify(one.path)


def test_no_changed_byte_reaches_a_reader_of_weights(tier):
    one = tier("shm")
    for at in [*one.header_places()[::29], *one.tensor_places()]:
        with flipped(one.path, at), pytest.raises(BadSegment):
            read_weights(one.path)
    assert read_weights(one.path)[1]["a"].tolist() == [1.5, -2.0, 3.25]


def large_places(prefix_bytes, nbytes):
    """Both ends, both sides of each boundary between parts, and some in between."""
    inside = [
        0,
        1,
        PART_BYTES - 1,
        PART_BYTES,
        2 * PART_BYTES - 1,
        2 * PART_BYTES,
        nbytes - 1,
        *range(0, nbytes, nbytes // 5),
    ]
    return [prefix_bytes + at for at in inside]


@pytest.mark.parametrize("kind", ["shm", "storage"])
def test_a_large_tensor_is_found_damaged_wherever_it_is(tier, kind):
    one = tier(kind, {"w": torch.arange(9 << 20, dtype=torch.int32), "step": 4})
    assert one.unnoticed(large_places(one.prefix_bytes, 36 << 20)) == []
    with flipped(one.path, one.prefix_bytes + PART_BYTES):
        records = list_manifests(one.root) if kind == "storage" else []
        with pytest.raises(EasyckptError):
            verify_stored(one.root, records[0]) if records else shm.verify(one.path)
