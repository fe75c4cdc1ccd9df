"""Segments over plain sockets."""

import contextlib
import shutil
import socket
import threading

import pytest
import torch

from easyckpt import Checkpointer, shm
from easyckpt.errors import EasyckptError
from easyckpt.events import Events
from easyckpt.shardserver import Peer, ShardServer


@pytest.fixture
def far(folder):
    """The folder of another node and its server."""
    path = folder.with_name(folder.name + "-far")
    path.mkdir(mode=0o700)
    events = Events(lambda _event: None)
    server = ShardServer(path, events=events)
    yield path, server, events
    server.close()
    shutil.rmtree(path, ignore_errors=True)


def test_a_pushed_segment_is_proven_and_sealed_there(far, folder, make_segment):
    path, server, events = far
    segment = make_segment(3)
    assert Peer(server.address).push(segment) == segment.stat().st_size
    assert [(one.tier, one.header.step) for one in shm.scan(path)] == [("peer", 3)]
    assert events.counts["copy_received"] == 1
    assert Peer(server.address).names() == ["trainer-0.r0.peer.s0.safetensors"]
    assert shm.pinned_names(folder) == set()


class CuttingProxy:
    """Forwards to an address and cuts the first connections after some bytes."""

    def __init__(self, target, cut_after):
        self.target, self.cuts = target, list(cut_after)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            left = self.cuts.pop(0) if self.cuts else None
            threading.Thread(target=self.move, args=(client, server, left), daemon=True).start()
            threading.Thread(target=self.move, args=(server, client, None), daemon=True).start()

    def move(self, source, target, left):
        try:
            while left is None or left > 0:
                block = source.recv(1000 if left is None else min(1000, left))
                if not block:
                    break
                target.sendall(block)
                left = None if left is None else left - len(block)
        except OSError:
            pass
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def test_a_cut_push_goes_on_where_the_receiver_is(far, make_segment):
    """Cut twice: little more than the segment's bytes is sent, and the copy is the same file."""
    path, server, _ = far
    segment = make_segment(1)
    proxy = CuttingProxy(server.address, [15_000, 10_000])
    sent = Peer(proxy.address).push(segment)
    proxy.listener.close()
    (copy,) = shm.scan(path)
    assert copy.path.read_bytes() == segment.read_bytes()
    assert sent <= 3 * segment.stat().st_size


def test_a_push_that_stays_cut_is_told_and_leaves_no_candidate(far, make_segment):
    path, server, _ = far
    proxy = CuttingProxy(server.address, [10_000] * 9)
    with pytest.raises(OSError, match=r".*"):
        Peer(proxy.address).push(make_segment(1))
    proxy.listener.close()
    assert shm.scan(path) == []


def test_a_wrong_token_is_refused_and_a_wide_server_needs_one(folder, make_segment):
    server = ShardServer(folder, token="secret")
    make_segment(1)
    with pytest.raises(EasyckptError, match="token"):
        Peer(server.address, token="guess").names()
    assert Peer(server.address, token="secret").names()
    server.close()
    with pytest.raises(EasyckptError, match="needs a token"):
        ShardServer(folder, host="0.0.0.0")


@pytest.mark.parametrize("name", ["../../etc/passwd", "trainer-0.r0.writer.1.2", "trainer-9.r0.s0.safetensors"])
def test_only_segments_of_the_folder_are_served(far, name):
    _, server, _ = far
    with pytest.raises(EasyckptError, match="refused"), Peer(server.address).open(name):
        pass


def test_garbage_on_the_wire_ends_the_connection_only(far, make_segment):
    _, server, _ = far
    with socket.create_connection(server.address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        connection.settimeout(10)
        assert connection.recv(100) == b""
    assert Peer(server.address).names() == []


def test_a_bandwidth_cap_is_kept(far, make_segment):
    """A quarter second's worth of bytes at least takes that long; nothing is said about how much longer."""
    import time

    _, server, _ = far
    segment = make_segment(1)
    started = time.monotonic()
    Peer(server.address).push(segment, bytes_per_second=segment.stat().st_size * 4)
    assert time.monotonic() - started >= 0.24


def test_a_state_is_restored_straight_out_of_a_peers_memory(far, folder):
    """No segment is made here; a damaged copy there is found, and falls to the next tier; a dead peer is said and left out."""
    path, server, _ = far
    there = Checkpointer(folder=path)
    weights = torch.randn(2000, 1500)
    there.save(4, {"w": weights, "t": torch.tensor(4.0)})
    there.wait()
    peer = Peer(server.address)
    here = Checkpointer(folder=folder, member="new", peers=[peer])
    state = {"w": torch.zeros(2000, 1500), "t": torch.tensor(0.0)}
    restored = here.restore(state)
    assert (restored.tier, restored.step, restored.member) == ("peer", 4, "trainer-0")
    assert torch.equal(state["w"], weights)
    assert shm.scan(folder) == []
    assert peer.pull("trainer-0.r0.s0.safetensors", folder).header.step == 4
    server.close()
    assert here.restore(state).tier == "peer"
    assert here.events.counts["tier_refused"] >= 1
    there.close()
    here.close()
