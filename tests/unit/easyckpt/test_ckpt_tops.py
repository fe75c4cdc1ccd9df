"""Whatever is saved at a state's top comes back, as a new state or in place, and `only` reaches into lists and tuples."""

import contextlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from easyckpt import Checkpointer, sources
from easyckpt.adapters import interchange
from easyckpt.cli import cli
from easyckpt.errors import EasyckptError, Mismatch
from easyckpt.fitting import build
from easyckpt.target import look

QUIET = {"on_event": lambda _event: None}
LENGTH = 30_000
TOPS = {
    "list": lambda value: [torch.full((LENGTH,), value), {"w": torch.full((3,), value)}, 7, "text"],
    "tuple": lambda value: (torch.full((LENGTH,), value), [torch.full((2,), value)]),
    "tensor": lambda value: torch.full((LENGTH,), value),
    "dict": lambda value: {"a": [torch.full((LENGTH,), value), 1], 2: (torch.full((2,), value),)},
}


@pytest.fixture
def engine(folder):
    with_memory = Checkpointer(folder=folder, **QUIET)
    yield with_memory
    with_memory.close()


def same(a, b, *, in_order=True):
    """Types, bits and, where it was not given by a live dict, the order of keys."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        alike = isinstance(b, dict) and (list(a) == list(b) if in_order else a.keys() == b.keys())
        return alike and all(same(a[key], b[key], in_order=in_order) for key in a)
    if isinstance(a, list | tuple):
        alike = type(a) is type(b) and len(a) == len(b)
        return alike and all(same(one, other, in_order=in_order) for one, other in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("top", TOPS)
def test_any_top_is_loaded_as_it_was_saved(engine, top):
    """A list, tuple or tensor as well as a dict, with types, order and bits."""
    engine.save(1, TOPS[top](2.5))
    restored, state = engine.load()
    assert restored.step == 1
    assert same(state, TOPS[top](2.5))


def test_a_single_value_is_loaded_and_cannot_be_filled_in_place(engine):
    engine.save(1, 41)
    assert engine.load()[1] == 41
    with pytest.raises(Mismatch, match="int at its top"):
        engine.restore(40)


@pytest.mark.parametrize("top", TOPS)
def test_any_top_is_filled_in_place(engine, top):
    """The tensors are those of the state, not new ones."""
    state = TOPS[top](1.0)
    engine.save(1, state)
    other = TOPS[top](0.0)
    before = other if top == "tensor" else other["a"][0] if top == "dict" else other[0]
    assert engine.restore(other).step == 1
    assert same(other, state)
    assert before is (other if top == "tensor" else other["a"][0] if top == "dict" else other[0])


def test_a_list_in_the_state_becomes_as_long_as_the_saved_one(engine):
    """In place, at the top and below; the tensors that are there are filled."""
    engine.save(1, [torch.ones(2), torch.ones(3), {"inner": [1, 2]}])
    kept = torch.zeros(2)
    longer = [kept, torch.zeros(3), {"inner": [0]}, "more", 5]
    engine.restore(longer)
    assert same(longer, [torch.ones(2), torch.ones(3), {"inner": [1, 2]}])
    assert longer[0] is kept
    shorter: list = []
    engine.restore(shorter)
    assert same(shorter, longer)


def test_a_list_in_two_places_becomes_the_saved_one_once(engine):
    engine.save(1, {"a": [1, 2], "b": [1, 2]})
    shared = [7, 8, 9]
    state = {"a": shared, "b": shared}
    engine.restore(state)
    assert state == {"a": [1, 2], "b": [1, 2]}


def test_a_top_that_cannot_become_the_saved_one_is_told_and_unchanged(engine):
    engine.save(1, (torch.ones(2), 5))
    state = (torch.zeros(2), 4)
    with pytest.raises(Mismatch, match="tuple at its top"):
        engine.restore(state)
    assert same(state, (torch.zeros(2), 4))


def test_only_reaches_into_lists_and_tuples(engine):
    """What is not named keeps its bytes and is not read."""
    engine.save(1, {"list": [torch.ones(LENGTH), torch.ones(9), 5], "tuple": (torch.ones(4), torch.ones(8)), "n": 1})
    state = {"list": [torch.zeros(LENGTH), torch.zeros(9), 4], "tuple": (torch.zeros(4), torch.zeros(8)), "n": 0}
    assert engine.restore(state, only="list/1").nbytes == 36
    assert engine.restore(state, only=["tuple/0", "list/2"]).nbytes == 16
    assert same(
        state, {"list": [torch.zeros(LENGTH), torch.ones(9), 5], "tuple": (torch.ones(4), torch.zeros(8)), "n": 0}
    )


def test_only_takes_just_what_it_names_where_the_state_has_nothing_yet(engine):
    """A dict gets the named keys; a list the named places, None for the others; a live list gets no gaps."""
    engine.save(1, {"a": {"x": torch.ones(LENGTH), "y": torch.ones(3)}, "list": [torch.ones(LENGTH), torch.ones(5)]})
    state: dict = {}
    assert engine.restore(state, only=["a/y", "list/1"]).nbytes == 32
    assert same(state, {"a": {"y": torch.ones(3)}, "list": [None, torch.ones(5)]})
    with pytest.raises(Mismatch, match="'list/1' has no place"):
        engine.restore({"list": []}, only="list/1")


def test_only_leaves_the_other_moments_of_a_fresh_optimizer_alone(engine):
    """A moment that is not asked for is not made up."""

    def make():
        weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        return weights, torch.optim.AdamW(weights)

    weights, optimizer = make()
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    engine.save(1, {"optimizer": optimizer})
    _, fresh = make()
    engine.restore({"optimizer": fresh}, only="optimizer/state/0")
    state = fresh.state_dict()["state"]
    assert same(state[0], optimizer.state_dict()["state"][0])
    assert 1 not in state


class Counts:
    """Gives its state as a tuple, as a foreign object may."""

    def __init__(self):
        self.counts = torch.zeros(LENGTH)

    def state_dict(self):
        return (self.counts, "text")

    def load_state_dict(self, state):
        self.counts = state[0].clone()


def test_an_object_whose_state_is_no_dict_gets_the_bytes_that_were_saved(engine):
    owner = Counts()
    owner.counts += 3
    engine.save(1, {"owner": owner})
    fresh = Counts()
    engine.restore({"owner": fresh})
    assert torch.equal(fresh.counts, owner.counts)


plain = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(max_size=4)
)
kinds = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
tensors = st.tuples(kinds, st.lists(st.integers(0, 3), max_size=2)).map(
    lambda drawn: torch.ones(drawn[1], dtype=drawn[0])
)
keys = st.text("ab$/~", max_size=2) | st.integers(0, 3)
states = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3).filter(lambda drawn: len({str(key) for key in drawn}) == len(drawn))
    ),
    max_leaves=8,
)


def blank(state):
    """The same with other values in every place."""
    match state:
        case torch.Tensor():
            return torch.zeros_like(state)
        case dict():
            return {key: blank(value) for key, value in state.items()}
        case list() | tuple():
            return type(state)(map(blank, state))
    return "blank"


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(state=states, other=states)
def test_any_nesting_is_loaded_and_filled_as_it_was_saved(engine, state, other):
    """Whole, into its own like, and into whatever else stands in its place, as long as that is no tensor or dict where the saved one has none."""
    engine.save(1, state)
    assert same(engine.load()[1], state)
    like = {"place": blank(state)}
    engine.save(2, {"place": state})
    engine.restore(like)
    assert same(like["place"], state)
    unlike = {"place": other}
    with contextlib.suppress(Mismatch):
        engine.restore(unlike)
        assert same(unlike["place"], state, in_order=False)


# ------------------------------------------------------------------------------------------------------------ exports


@pytest.fixture
def layers(engine, folder):
    engine.save(1, [{"w": torch.ones(LENGTH)}, {"w": torch.full((4,), 2.0)}])
    engine.wait()
    return folder


def export(*argv):
    done = CliRunner().invoke(cli, ["export", *map(str, argv)], catch_exceptions=False)
    assert done.exit_code == 0, done.output


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_snapshot_of_a_list_is_exported_to_every_format(layers, tmp_path):
    """Where a format has names only, the places in the list are the names."""
    export(layers, tmp_path / "all.pt", "--format", "torch")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert same(found, [{"w": torch.ones(LENGTH)}, {"w": torch.full((4,), 2.0)}])
    export(layers, tmp_path / "hf", "--format", "hf", "--prefix", "")
    assert set(load_file(tmp_path / "hf/model.safetensors")) == {"0.w", "1.w"}
    export(layers, tmp_path / "dcp", "--format", "dcp")
    back = {"1": {"w": torch.zeros(4)}}
    dcp.load(back, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(back["1"]["w"], torch.full((4,), 2.0))


def test_a_part_of_a_list_is_exported_alone(layers, tmp_path):
    """And only its bytes are read."""
    export(layers, tmp_path / "one.pt", "--format", "torch", "--prefix", "1/w")
    assert torch.equal(torch.load(tmp_path / "one.pt", weights_only=True), torch.full((4,), 2.0))
    found = look(layers)
    heard = []
    candidate = found.one()
    with sources.open_source(candidate.of_rank(0)[0], found.storage) as shard:
        build([shard], only=["1"], advance=heard.append)
    assert sum(heard) == 16


def test_a_tensor_alone_goes_only_where_it_needs_no_name(engine, folder, tmp_path):
    engine.save(1, torch.ones(5))
    engine.wait()
    export(folder, tmp_path / "one.pt", "--format", "torch")
    assert torch.equal(torch.load(tmp_path / "one.pt", weights_only=True), torch.ones(5))
    with pytest.raises(EasyckptError, match="has no name"):
        interchange.export_huggingface(torch.ones(5), tmp_path / "hf")
    with pytest.raises(EasyckptError, match="has no name"):
        interchange.export_dcp(torch.ones(5), tmp_path / "dcp")
    assert not (tmp_path / "hf").exists()
