"""One writer for each rank's segments, whoever comes at the same moment."""

import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from easyckpt import shm
from easyckpt.errors import Pinned

ROOT = Path(__file__).resolve().parents[3]
ROUNDS = 60
RACER = """
import sys, time
from pathlib import Path
from easyckpt import shm
from easyckpt.errors import Pinned
folder, start = Path(sys.argv[1]), float(sys.argv[2])
for number in range({rounds}):
    while time.monotonic() < start + number * 0.004:
        pass
    try:
        shm.claim_writer(folder, f"trainer-{{number}}.r0", wait_seconds=0)
        print(number, flush=True)
    except Pinned:
        pass
sys.stdin.read()
"""


def test_of_processes_that_start_together_under_one_name_one_writes(folder):
    """Three processes claim the same writer at the same moment, many times: each time one gets it, and the others are told."""
    words = [sys.executable, "-c", RACER.format(rounds=ROUNDS), str(folder), str(time.monotonic() + 1.0)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    racers = [
        subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    time_limit = time.monotonic() + 30
    while len({name.partition(".writer.")[0] for name in os.listdir(folder)}) < ROUNDS:
        assert time.monotonic() < time_limit
        time.sleep(0.01)
    said = [racer.communicate(timeout=30)[0] for racer in racers]
    won = [int(word) for text in said for word in text.split()]
    assert sorted(won) == list(range(ROUNDS))


def test_of_engines_of_one_process_that_open_together_one_writes(folder):
    """The same for threads."""
    for number in range(30):
        barrier = threading.Barrier(4)
        won = []

        def claim(stem=f"trainer-{number}.r0", barrier=barrier, won=won):
            barrier.wait()
            with suppress(Pinned):
                won.append(shm.claim_writer(folder, stem, wait_seconds=0))

        threads = [threading.Thread(target=claim) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1


def test_a_process_that_was_stopped_in_the_middle_of_a_claim_ends_the_wait_of_others_with_words(folder):
    """The lock on the folder is held for microseconds; a holder that does not go on is told, and nobody waits for it for ever."""
    import fcntl

    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(Pinned, match="does not go on"):
            shm.claim_writer(folder, "trainer-0.r0", wait_seconds=0)
    finally:
        os.close(held)
    shm.unpin(shm.claim_writer(folder, "trainer-0.r0"))
