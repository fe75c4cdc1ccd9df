"""A job of several ranks that meet in a collective over sockets, without torch: `python ring_job.py MODE PORT`, told by RANK and WORLD_SIZE.

At step RING_AT (40) rank 2 does what MODE says: sleep, spin, file (blocks on a pipe), die; or all ranks do: evaluate (a long first evaluation
that says nothing), announced (the same, said in the log); or rank 0 alone goes on while the others wait for it: uneven (computes), save (writes).
With RING_REPORT every rank reports its steps itself.
"""

import os
import socket
import sys
import tempfile
import time

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
MODE, PORT = sys.argv[1], int(sys.argv[2])
AT = int(os.environ.get("RING_AT", "40"))
PAUSE_SECONDS = float(os.environ.get("RING_PAUSE", "4"))


def connect():
    """Rank 0 hears all others; every other hears rank 0."""
    if RANK == 0:
        server = socket.create_server(("127.0.0.1", PORT))
        return [server.accept()[0] for _ in range(WORLD - 1)]
    deadline = time.monotonic() + 60
    while True:
        try:
            return [socket.create_connection(("127.0.0.1", PORT))]
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def exchange(peers):
    if RANK == 0:
        for peer in peers:
            if not peer.recv(1):
                raise ConnectionError("Connection closed by peer")
    for peer in peers:
        peer.sendall(b"x")
    if RANK != 0 and not peers[0].recv(1):
        raise ConnectionError("Connection closed by peer")


def all_reduce(peers):
    exchange(peers)


def sleep_long():
    time.sleep(600)


def spin():
    number = 0
    while True:
        number += 1


def read_file():
    folder = tempfile.mkdtemp()
    os.mkfifo(f"{folder}/data")
    os.read(os.open(f"{folder}/data", os.O_RDONLY), 1)


def evaluate():
    time.sleep(PAUSE_SECONDS)


def compute(until):
    """Goes in and out of functions, as a program that works does."""

    def first(depth):
        return sum(range(1000)) if depth == 0 else first(depth - 1)

    def second():
        return first(int(time.monotonic() * 50) % 40)

    while time.monotonic() < until:
        second()


def save(until):
    """Writes on and on from one place, as a checkpoint does."""
    with open(os.devnull, "wb", buffering=0) as file:
        while time.monotonic() < until:
            file.write(bytes(4096))
            time.sleep(0.001)


def trouble():
    if MODE == "announced" and RANK == 0:
        print("Running evaluation on the validation set", flush=True)
    if MODE in ("evaluate", "announced"):
        evaluate()
    elif MODE in ("uneven", "save"):
        if RANK == 0:
            {"uneven": compute, "save": save}[MODE](time.monotonic() + PAUSE_SECONDS)
    elif RANK == 2:
        {"sleep": sleep_long, "spin": spin, "file": read_file, "die": lambda: os.kill(os.getpid(), 9)}[MODE]()


report = None
if "RING_REPORT" in os.environ:
    from aimaster.client import report_progress as report

peers = connect()
for step in range(100_000):
    if step == AT:
        trouble()
    all_reduce(peers)
    if report is not None:
        report(step)
    time.sleep(0.02)
    if RANK == 0:
        print(f"step {step} loss 1.0", flush=True)
