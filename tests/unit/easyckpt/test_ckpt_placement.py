"""Which nodes hold a node's peer copies."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from easyckpt.placement import Node, choose_peers


def nodes(count, racks=1):
    return [Node(name=f"n{i}", labels={"rack": f"r{i % racks}"}) for i in range(count)]


def test_another_rack_before_the_same_and_never_itself():
    every = nodes(6, racks=3)
    for node in every:
        (peer,) = choose_peers(node.name, every)
        assert peer != node.name
        assert int(peer[1:]) % 3 != int(node.name[1:]) % 3


def test_two_copies_lie_in_two_racks():
    every = nodes(9, racks=3)
    racks = {int(peer[1:]) % 3 for peer in choose_peers("n0", every, copies=2)}
    assert racks == {1, 2}


def test_nodes_without_room_or_without_labels():
    every = [Node(name="a"), Node(name="b", free_bytes=10), Node(name="c", free_bytes=100)]
    assert choose_peers("a", every, copies=5, need_bytes=50) == ["c"]
    assert choose_peers("a", [Node(name="a")]) == []


@given(st.integers(2, 40))
def test_the_load_is_spread_and_a_loss_moves_only_what_was_held(count):
    every = nodes(count)
    before = {node.name: choose_peers(node.name, every)[0] for node in every}
    assert max(Counter(before.values()).values()) <= 8
    left = every[1:]
    for node in left[1:] if len(left) > 1 else []:
        peer = choose_peers(node.name, left)[0]
        assert peer == before[node.name] or before[node.name] == "n0"
