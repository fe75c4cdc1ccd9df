"""Segments over plain sockets."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from easyckpt import Checkpointer, digest, shm
from easyckpt.errors import EasyckptError, Pinned
from easyckpt.events import Events
from easyckpt.shardserver import Peer, ShardServer
from easyckpt.shardwire import Bandwidth, Request


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
    """Forwards to an address, counts what goes each way, and cuts the first connections after so many bytes towards it.

    A silent cut leaves both ends open and moves nothing any more, as a lost link does.
    """

    def __init__(self, target, cut_after, *, silent=False):
        self.target, self.cuts, self.silent = target, list(cut_after), silent
        self.forwarded = []
        """Bytes towards the target, by connection."""
        self.sockets = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()
        threading.Thread(target=self.accept, daemon=True).start()

    def close(self):
        for one in (self.listener, *self.sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            self.sockets += [client, server]
            left = self.cuts.pop(0) if self.cuts else None
            self.forwarded.append(0)
            number = len(self.forwarded) - 1
            threading.Thread(target=self.move, args=(client, server, left, number), daemon=True).start()
            threading.Thread(target=self.move, args=(server, client, None, None), daemon=True).start()

    def move(self, source, target, left, number):
        try:
            while left is None or left > 0:
                block = source.recv(4096 if left is None else min(4096, left))
                if not block:
                    break
                target.sendall(block)
                if number is not None:
                    self.forwarded[number] += len(block)
                left = None if left is None else left - len(block)
        except OSError:
            pass
        if self.silent and left == 0:
            return
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def proxied():
    made = []

    def make(*arguments, **more):
        made.append(CuttingProxy(*arguments, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def request_bytes(segment):
    """Length of the line with which a put of this segment begins."""
    prefix = segment.read_bytes()[: shm.read_segment(segment).prefix_bytes]
    line = Request(
        verb="put",
        name=segment.name,
        nbytes=segment.stat().st_size,
        prefix_digest=digest.digest_bytes(prefix),
        prefix_bytes=len(prefix),
    )
    return len(msgspec.json.encode(line)) + 1


@pytest.mark.parametrize("cuts", [[15_000], [5_000, 30_000, 400], [700, 0, 20_000]], ids=["once", "thrice", "nothing"])
def test_a_cut_copy_goes_on_at_the_byte_where_it_stopped(far, make_segment, proxied, cuts):
    """Over all connections together each byte of the segment reaches the receiver exactly once; it says where it went on; the copy is the same file."""
    path, server, events = far
    heard = []
    events._listener = heard.append
    segment = make_segment(1)
    proxy = proxied(server.address, cuts)
    Peer(proxy.address).push(segment)
    (copy,) = shm.scan(path)
    assert copy.path.read_bytes() == segment.read_bytes()
    line = request_bytes(segment)
    reached = sum(max(0, count - line) for count in proxy.forwarded)
    assert reached == segment.stat().st_size
    assert len(proxy.forwarded) == len(cuts) + 1
    (resumed,) = [event for event in heard if event.kind == "copy_resumed"]
    assert resumed.nbytes == sum(max(0, count - line) for count in proxy.forwarded[:-1])


def test_a_copy_over_a_link_that_fell_silent_goes_on_over_the_next_one(far, make_segment, proxied):
    """Nobody is told of the cut: the sender's patience ends first, and its next connection takes over from the one that hangs."""
    path, server, events = far
    segment = make_segment(1)
    proxy = proxied(server.address, [20_000], silent=True)
    Peer(proxy.address, timeout_seconds=0.3).push(segment)
    assert shm.verify(shm.scan(path)[0].path).header.step == 1
    assert events.counts["copy_resumed"] == 1
    assert sum(proxy.forwarded) == segment.stat().st_size + len(proxy.forwarded) * request_bytes(segment)


def test_a_copy_that_stays_cut_is_told_and_leaves_no_candidate(far, make_segment, proxied):
    path, server, _ = far
    proxy = proxied(server.address, [10_000, *[0] * 1000])
    with pytest.raises(OSError, match=r".*"):
        Peer(proxy.address).push(make_segment(1), patience_seconds=0.3)
    assert shm.scan(path) == []
    assert Peer(server.address).push(make_segment(2)) > 0
    assert [one.header.step for one in shm.scan(path)] == [2]


def test_a_peer_that_is_not_there_is_told_at_once(make_segment):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with pytest.raises(OSError, match="refused"):
        Peer(address).push(make_segment(1))


def test_what_lies_there_already_is_not_sent_again(far, make_segment):
    """The very segment, known by its header's digest: no byte of it goes over the wire, and the copy before it stays."""
    path, server, events = far
    peer = Peer(server.address)
    peer.push(make_segment(1))
    second = make_segment(2)
    assert peer.push(second) == second.stat().st_size
    assert peer.push(second) == 0
    assert events.counts["copy_found"] == 1
    assert [one.header.step for one in shm.scan(path)] == [2, 1]
    assert peer.push(make_segment(2, seed=5)) > 0, "other bytes under the same number are another segment"


def test_one_segment_sent_by_many_at_once_is_kept_once(far, make_segment):
    path, server, _ = far
    Peer(server.address).push(make_segment(1))
    second = make_segment(2)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(_push_patiently, Peer(server.address), second) for _ in range(4)]
        assert sum(future.result(20) > 0 for future in futures) >= 1
    assert [one.header.step for one in shm.scan(path)] == [2, 1]
    for one in shm.scan(path):
        shm.verify(one.path)


def _push_patiently(peer, segment):
    give_up_at = time.monotonic() + 15
    while True:
        try:
            return peer.push(segment)
        except Pinned:
            assert time.monotonic() < give_up_at
            time.sleep(0.01)


def test_a_cap_holds_for_all_copies_that_share_it(far, make_segment):
    """Two copies at once, each of which alone would need a quarter second, take half a second at least."""
    _, server, _ = far
    segments = [make_segment(1), make_segment(1, member="trainer-1")]
    cap = Bandwidth(4 * segments[0].stat().st_size)
    started = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda segment: Peer(server.address).push(segment, bandwidth=cap), segments))
    assert time.monotonic() - started >= 0.49
    with pytest.raises(ValueError, match="nothing pass"):
        Bandwidth(0)


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


SERVER = """
import os, resource, sys
from pathlib import Path
from easyckpt.shardserver import ShardServer
server = ShardServer(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(server.address[1], flush=True)
sys.stdin.readline()
for fd in held:
    os.close(fd)
sys.stdin.readline()
"""


def test_a_server_without_a_free_descriptor_serves_again_when_there_is_one(folder, make_segment):
    """The process that holds the server has used up its descriptors for a while: who connects then is served afterwards."""
    make_segment(1)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    address = ("127.0.0.1", int(server.stdout.readline()))
    peer = Peer(address, timeout_seconds=0.5)
    # The descriptor for the next connection is taken before it comes: the one after that finds none.
    with socket.create_connection(address), pytest.raises(TimeoutError):
        peer.names()
    server.stdin.write("\n")
    server.stdin.flush()
    give_up_at = time.monotonic() + 20
    names: list[str] = []
    while not names:
        assert time.monotonic() < give_up_at
        with contextlib.suppress(OSError):
            names = peer.names()
    assert names == ["trainer-0.r0.s0.safetensors"]
    server.communicate("\n", timeout=20)
