"""A state that is walked again: what was seen before is a short cut, never an answer."""

import pytest
import torch

from easyckpt import snapshot, walk
from easyckpt.errors import Unsupported


def make_state():
    square = torch.arange(16.0).view(4, 4)
    model = torch.nn.Linear(4, 4)
    model.weight.data = torch.arange(16.0).view(4, 4)
    shared = torch.arange(64.0)
    return {
        "square": square, "weight": model.weight, "tied": square, "half": shared[:32], "count": torch.tensor(3),
        "complex": torch.complex(torch.arange(4.0), torch.ones(4)), "nested": [{"a": torch.ones(3)}, 5, "text"],
    }  # fmt: skip


def swap_memory(state):
    state["weight"].data = torch.full((4, 4), 7.0)


def transpose_in_place(state):
    state["weight"].data = state["weight"].data.t()


def shrink_in_place(state):
    state["nested"][0]["a"].resize_(2)


def other_type_same_memory(state):
    state["square"] = state["square"].view(torch.int32)
    state["tied"] = state["square"]


def conjugate(state):
    state["complex"] = state["complex"].conj()


def negate_lazily(state):
    state["nested"][0]["a"] = torch.view_as_real(torch.ones(3, dtype=torch.complex64)).view(-1)[:3]._neg_view()


def untie(state):
    state["tied"] = state["square"].clone()


def tie(state):
    state["weight"] = state["square"]


def take_away(state):
    del state["nested"][0]["a"]


def add(state):
    state["nested"][0]["b"] = torch.zeros(2)


def rename(state):
    state["renamed"] = state.pop("count")


def number_for_tensor(state):
    state["count"] = 3


def tensor_for_number(state):
    state["nested"][1] = torch.tensor(5)


CHANGES = [
    swap_memory, transpose_in_place, shrink_in_place, other_type_same_memory, conjugate, negate_lazily, untie, tie, take_away, add,
    rename, number_for_tensor, tensor_for_number,
]  # fmt: skip


def told(captured):
    """All that a snapshot would say and hold."""
    pairs = zip(captured.entries, captured.tensors, strict=True)
    held = {entry.name: tensor.detach().resolve_conj().resolve_neg().tolist() for entry, tensor in pairs}
    return captured.entries, captured.extra, held, [one.name for one in captured.small], len(captured.large)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_any_change_is_seen_as_if_for_the_first_time(change):
    state = make_state()
    before = walk.capture(state)
    change(state)
    assert told(walk.capture(state, before)) == told(walk.capture(state))


def test_new_values_in_the_same_memory_change_no_entry():
    """What is placed once stays placed: the header needs no new room and the slot no new file."""
    state = make_state()
    before = walk.capture(state)
    state["square"].add_(1)
    state["nested"][2] = "other text"
    again = walk.capture(state, before)
    assert again.entries is before.entries
    assert again.extra["nested"][2] == "other text"
    assert again.tensors[0].data_ptr() == before.tensors[0].data_ptr()


def test_a_tensor_that_became_sparse_is_refused_by_name():
    state = make_state()
    before = walk.capture(state)
    state["square"] = state["tied"] = state["square"].to_sparse()
    with pytest.raises(Unsupported, match="square"):
        walk.capture(state, before)


def test_the_one_name_that_safetensors_reserves_is_refused():
    with pytest.raises(Unsupported, match="__metadata__"):
        walk.capture({"__metadata__": torch.ones(3)})
    assert walk.capture({"model": {"__metadata__": torch.ones(3)}, "other": {"__metadata__": "text"}}).entries


def test_small_tensors_keep_their_bytes_whatever_holds_them():
    """Their memory is copied by address: one that a state_dict() makes anew lives until it is copied."""

    class Maker:
        def state_dict(self):
            return {"made": torch.arange(100.0)}

        def load_state_dict(self, state):
            pass

    captured = walk.capture({"maker": Maker()})
    block = memoryview(bytearray(400))
    copy = snapshot.Copy(block)
    copy.copy_small(captured.small, [block])
    copy.hash_rest()
    assert torch.frombuffer(block, dtype=torch.float32).tolist() == list(range(100))
    assert copy.digests["maker/made"] == snapshot.source_digest(torch.arange(100.0))
