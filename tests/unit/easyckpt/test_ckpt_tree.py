"""The state without its tensors."""

import math
from collections import OrderedDict
from enum import Enum, IntEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyckpt import tree
from easyckpt.errors import Unsupported


class Point(NamedTuple):
    x: int


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
keys = st.text(max_size=4) | st.integers(-3, 3) | st.sampled_from(["$tensor", "$dict", "a/b", "~", "~1"])
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3).filter(lambda d: len({tree.part(k) for k in d}) == len(d))
    ),
    max_leaves=12,
)


def same(a, b):
    if isinstance(a, float) and math.isnan(a):
        return isinstance(b, float) and math.isnan(b)
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(states)
def test_every_value_comes_back_with_its_type(state):
    """Through real JSON text: tuples stay tuples, integer keys integers, nan nan, and keys that look like our marks stay keys."""
    text = msgspec.json.encode(tree.encode(state, lambda _path, value: value))
    assert same(state, tree.decode(msgspec.json.decode(text), lambda name: name))


class Mode(str, Enum):  # noqa: UP042 - a StrEnum says its value, this its name
    COSINE = "cosine"


class Level(IntEnum):
    HIGH = 3


def test_a_subclass_of_a_plain_type_comes_back_as_the_plain_value():
    """Whatever its own str() says, as a value and as a key."""
    state = {"mode": Mode.COSINE, "level": Level.HIGH, "by": {Mode.COSINE: 1, Level.HIGH: 2}}
    document = tree.encode(state, lambda _path, value: value)
    assert same({"mode": "cosine", "level": 3, "by": {"cosine": 1, 3: 2}}, tree.decode(document, lambda name: name))


def test_paths_of_tensors_cannot_collide():
    """A "/" inside a key is told from one between keys."""

    class Tensor:
        pass

    seen = []

    def leaf(path, value):
        if isinstance(value, Tensor):
            seen.append(path)
            return tree.TensorAt(seen[-1])
        return value

    tree.encode({"a/b": Tensor(), "a": {"b": Tensor()}, "a~1b": [Tensor()]}, leaf)
    assert seen == ["a~1b", "a/b", "a~01b/0"]


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {"b": Path()}}, "a/b"),
        ({"a": [1, {2}]}, "a/1"),
        ({"a": Point(1)}, "a"),
        ({"f": print}, "f"),
        ({(1, 2): 3}, "key"),
        ({1: 2, "1": 3}, "read '1'"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_its_path(state, named):
    with pytest.raises(Unsupported, match=named):
        tree.encode(state, lambda _path, value: value)


def test_ordered_dicts_keep_their_order():
    state = OrderedDict([("b", 1), ("a", 2)])
    assert list(tree.decode(tree.encode(state, lambda _p, v: v), str)) == ["b", "a"]
