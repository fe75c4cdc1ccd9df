"""Restoring out of another process's memory over loopback, beside the bare socket. `python -m tests.bench.ckpt.wire give|take GIB OUT [PORTS]`."""

import json
import socket
import sys
import threading
import time
from pathlib import Path

import torch

from easyckpt import Checkpointer, shm
from easyckpt.shardserver import Peer, ShardServer
from tests.bench.ckpt.state import make, stamp, tensors, wrong

FOLDER = Path("/dev/shm/easyckpt-bench-wire")
STEP, ROUNDS = 7, 4
RECEIVE_BYTES = 16 << 20

now = time.perf_counter


def give(gib):
    """Saves a step, serves it, and serves the same bytes bare on a second port; prints both ports and the length."""
    state = make(int(gib * 2**30))
    stamp(state, STEP)
    engine = Checkpointer(None, folder=FOLDER, mode="copy", slots=1, on_event=lambda _event: None)
    engine.save(STEP, state)
    engine.wait()
    del state  # 4 GiB are there in the segment, in the taker's state and in its buffer already
    server = ShardServer(FOLDER)
    (segment,) = shm.scan(FOLDER)
    bare = socket.create_server(("127.0.0.1", 0))

    def serve():
        with open(segment.path, "rb") as file, shm.mapped(file.fileno(), segment.nbytes) as view:
            while True:
                connection, _ = bare.accept()
                with connection:
                    connection.sendall(view)

    threading.Thread(target=serve, daemon=True).start()
    print(server.address[1], bare.getsockname()[1], segment.nbytes, flush=True)
    sys.stdin.readline()


def receive(port, buffer):
    """The bare socket."""
    started = now()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        view, done = memoryview(buffer), 0
        while done < len(view):
            done += connection.recv_into(view[done : done + RECEIVE_BYTES])
    return now() - started


def copy_out(buffer, state):
    """The floor: one copy_ per tensor out of memory that is there."""
    started, at = now(), 0
    for _, tensor in tensors(state):
        tensor.copy_(torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel(), offset=at).view(tensor.shape))
        at += -(-tensor.nbytes // 8) * 8
    return now() - started


def take(gib, out, port, bare_port, nbytes):
    torch.set_num_threads(1)
    state = make(int(gib * 2**30))
    buffer = bytearray(nbytes)
    rounds = []
    engine = Checkpointer(
        None, folder=f"{FOLDER}-here", member="new", peers=[Peer(("127.0.0.1", port))], on_event=lambda _event: None
    )
    for _ in range(ROUNDS):
        raw, floor = receive(bare_port, buffer), copy_out(buffer, state)
        stamp(state, -1)
        started = now()
        restored = engine.restore(state)
        ours = now() - started
        complaint = wrong(state, STEP) or ("" if restored.tier == "peer" else f"came from {restored.tier}")
        rounds.append({"raw": raw, "floor": floor, "ours": ours, "wrong": complaint})
    engine.close()
    Path(out).write_text(json.dumps(rounds))


if __name__ == "__main__":
    mode, gib, *rest = sys.argv[1:]
    if mode == "give":
        give(float(gib))
    else:
        take(float(gib), rest[0], *map(int, rest[1:]))
