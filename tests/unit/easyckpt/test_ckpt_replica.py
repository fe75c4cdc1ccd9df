"""The peer tier: bytes from one node's memory into another's."""

import shutil

import pytest

from easyckpt import replica, shm
from easyckpt.errors import BadSegment, Corrupt, Foreign, Pinned
from easyckpt.replica import Incoming, open_for_send, receive


@pytest.fixture
def peer(folder):
    path = folder.with_name(folder.name + "-peer")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def pieces_of(path, size=1000):
    raw = path.read_bytes()
    return [raw[at : at + size] for at in range(0, len(raw), size)]


def test_a_copy_is_the_same_file_in_another_folder(folder, peer, make_segment):
    path = make_segment(3)
    header_bytes, total_bytes, pieces = open_for_send(path)
    got = receive(peer, pieces, path.name)
    assert got.path.name == "trainer-0.r0.peer.s0.safetensors"
    assert got.path.read_bytes() == path.read_bytes()
    assert (header_bytes, total_bytes) == (shm.read_segment(path).prefix_bytes, path.stat().st_size)
    assert [(one.tier, one.header.step) for one in shm.scan(peer)] == [("peer", 3)]
    assert shm.verify(got.path).header == shm.read_header(path)
    assert shm.pinned_names(folder) == set()
    assert sorted(p.name for p in peer.iterdir()) == [got.path.name]


def test_a_segment_is_pinned_while_it_is_sent(folder, make_segment):
    path = make_segment(1)
    _, _, pieces = open_for_send(path)
    assert shm.pinned_names(folder) == {path.name}
    next(pieces)
    pieces.close()
    assert shm.pinned_names(folder) == set()


@pytest.mark.parametrize("size", [1, 7, 4096, 10**6], ids=["byte-by-byte", "odd", "page", "all"])
def test_pieces_may_have_any_size(peer, make_segment, size):
    path = make_segment(1)
    raw = path.read_bytes()
    incoming = Incoming(peer, path.name)
    for at in range(0, len(raw), size):
        incoming.feed(raw[at : at + size])
    assert incoming.total_bytes == incoming.received_bytes == len(raw)
    assert incoming.commit().path.read_bytes() == raw


def test_a_cut_copy_is_no_candidate_and_harms_no_other(peer, make_segment):
    """Cut at any of many places, aborted or simply forgotten: the copy before it stays the newest."""
    receive(peer, iter(pieces_of(make_segment(1))))
    pieces = pieces_of(make_segment(2))
    for count in range(0, len(pieces), 5):
        incoming = Incoming(peer)
        for piece in pieces[:count]:
            incoming.feed(piece)
        with pytest.raises(BadSegment):
            incoming.commit()
        incoming.abort()
        assert [one.header.step for one in shm.scan(peer)] == [1]
    receive(peer, iter(pieces))
    assert [one.header.step for one in shm.scan(peer)] == [2, 1]


def test_a_flipped_byte_on_the_way_is_found(peer, make_segment):
    raw = make_segment(1).read_bytes()
    for at in [8, 60, 5000, len(raw) // 2, len(raw) - 1]:
        broken = raw[:at] + bytes([raw[at] ^ 4]) + raw[at + 1 :]
        with pytest.raises(BadSegment):
            receive(peer, iter([broken]))
    assert shm.scan(peer) == []
    with pytest.raises(Corrupt, match="more bytes"):
        receive(peer, iter([raw, b"x"]))


def test_the_newest_copy_is_kept_while_the_next_one_arrives(peer, make_segment):
    """Two slots a rank: each copy takes the older one, so three copies leave the last two."""
    for step in (1, 2, 3):
        receive(peer, iter(pieces_of(make_segment(step))))
    assert [one.header.step for one in shm.scan(peer)] == [3, 2]
    assert len(list(peer.iterdir())) == 2


def test_two_copies_at_once_take_two_slots(peer, make_segment):
    first, second, third = (pieces_of(make_segment(step, slot=step)) for step in (1, 2, 3))
    one, two = Incoming(peer), Incoming(peer)
    one.feed(b"".join(first))
    two.feed(b"".join(second))
    with pytest.raises(Pinned):
        receive(peer, iter(third))
    one.commit()
    two.commit()
    assert [got.header.step for got in shm.scan(peer)] == [2, 1]


def test_a_grown_segment_replaces_the_smaller_one(peer, make_segment):
    """Under a new file, so that a reader of the old one is not cut short."""
    for step, member in ((1, "t"), (2, "t"), (3, "t")):
        receive(peer, iter(pieces_of(make_segment(step, member=member, chain="x" * 5000 * (step == 3)))))
    assert [one.header.step for one in shm.scan(peer)] == [3, 2]
    for one in shm.scan(peer):
        shm.verify(one.path)


def test_a_copy_under_another_name_is_refused(peer, make_segment):
    path = make_segment(1)
    with pytest.raises(Foreign):
        receive(peer, iter(pieces_of(path)), "other.r0.s0.safetensors")
    with pytest.raises(Foreign):
        Incoming(peer, "../../etc/passwd")
    assert shm.scan(peer) == []


def test_sending_can_start_anywhere(make_segment):
    """After a cut the sender goes on where the receiver is."""
    path = make_segment(1)
    _, _, pieces = open_for_send(path, start=12_345)
    assert b"".join(pieces) == path.read_bytes()[12_345:]
    assert replica.PEER_SLOTS == 2
