"""A receiver that is killed in the middle of a copy: the next one goes on with what proves itself."""

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from easyckpt import Checkpointer, shm
from easyckpt.errors import EasyckptError
from easyckpt.events import Events
from easyckpt.shardserver import Peer, ShardServer
from easyckpt.shardwire import Bandwidth

ROOT = Path(__file__).resolve().parents[3]
SERVER = """
import sys
from pathlib import Path
from easyckpt.shardserver import ShardServer
print(ShardServer(Path(sys.argv[1])).address[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def far(folder):
    path = folder.with_name(folder.name + "-far")
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def source(folder):
    """A segment of one tensor of three parts and two small ones."""
    torch.manual_seed(0)
    engine = Checkpointer(folder=folder, on_sealed=lambda *_: None)
    engine.save(1, {"large": torch.randn(10 << 20), "b": torch.randn(50_000), "c": torch.randn(50_000)})
    engine.wait(30)
    engine.close()
    return shm.scan(folder)[0]


@pytest.fixture
def half(far, source):
    """The receiver has more than the first part when it is killed; returns the file that it leaves."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(far)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    peer = Peer(("127.0.0.1", int(server.stdout.readline())))

    def push():
        with suppress(OSError, EasyckptError):
            peer.push(source.path, bandwidth=Bandwidth(40 << 20), patience_seconds=0.1)

    pushing = threading.Thread(target=push)
    pushing.start()
    copy = far / "trainer-0.r0.peer.s0.safetensors"
    at = source.prefix_bytes + (17 << 20)
    with source.path.open("rb") as file:
        wanted = os.pread(file.fileno(), 64, at)
    give_up_at = time.monotonic() + 20
    while not copy.exists() or _read(copy, at) != wanted:
        assert time.monotonic() < give_up_at
        time.sleep(0.005)
    server.kill()
    server.communicate(timeout=10)
    pushing.join(20)
    assert shm.peek(copy) is None
    assert shm.reclaim(far) == [], "its sender comes back with the rest"
    return copy


def _read(path, at):
    with path.open("rb") as file:
        return os.pread(file.fileno(), 64, at)


def push_again(far, source):
    """To another process's server; returns the bytes that were sent, and what was told."""
    told = []
    server = ShardServer(far, events=Events(told.append))
    try:
        return Peer(server.address).push(source.path), [event.kind for event in told]
    finally:
        server.close()


def test_what_a_killed_receiver_had_is_not_sent_again(far, source, half):
    """The header and the part that proves itself stay; the copy is whole, proven and sealed in the end."""
    sent_bytes, told = push_again(far, source)
    assert sent_bytes <= source.nbytes - (16 << 20)
    assert told == ["copy_resumed", "copy_received"]
    assert half.read_bytes() == source.path.read_bytes()
    assert shm.verify(half).header == source.header


def test_what_does_not_prove_itself_is_sent_again(far, source, half):
    """A byte of the left-over has flipped in its first part: everything from there on comes over the wire."""
    with half.open("r+b") as file:
        file.seek(source.prefix_bytes + 1000)
        byte = file.read(1)
        file.seek(source.prefix_bytes + 1000)
        file.write(bytes([byte[0] ^ 1]))
    sent_bytes, _ = push_again(far, source)
    assert sent_bytes == source.nbytes - source.prefix_bytes
    assert shm.verify(half).header == source.header


def test_a_left_over_of_another_segment_is_written_over(far, folder, source, half, make_segment):
    """The owner has a newer step by now: nothing of the old one is mixed into it."""
    newer = shm.read_segment(make_segment(2, slot=1))
    sent_bytes, told = push_again(far, newer)
    assert sent_bytes == newer.nbytes
    assert told == ["copy_received"]
    (copy,) = shm.scan(far)
    assert copy.path.read_bytes() == newer.path.read_bytes()


def test_a_left_over_that_nobody_comes_back_for_is_reclaimed(far, half):
    os.utime(half, (0, 0))
    assert shm.reclaim(far) == [half]
