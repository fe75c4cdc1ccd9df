"""The flush of a node that is lost, by whoever holds copies: once, by one, and never of what is dead or uncommitted."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from easyckpt import claims, replica, shm
from easyckpt.claims import Claims, Holder
from easyckpt.errors import AlreadyFlushed, BeingFlushed, StorageFull
from easyckpt.flush import Flusher, flush_segment, verify_stored
from easyckpt.layout import Rewind
from easyckpt.storage import Files, FolderStorage, list_manifests
from easyckpt.takeover import is_due, take_over

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def peer(folder):
    """Another node's memory, which holds copies."""
    path = folder.with_name(folder.name + "-peer")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def copy(peer, make_segment):
    """Makes a segment on the node that is lost later, and its copy on the peer."""

    def make(step, **fields):
        path = make_segment(step, **fields)
        return replica.receive(peer, replica.open_for_send(path)[2], path.name)

    return make


def stored(storage):
    return [(record.lineage, record.step, record.member) for record in list_manifests(storage)]


def test_a_peer_flushes_the_newest_copy_of_a_lost_node(tmp_path, folder, peer, copy):
    """Marked for storage or not, byte for byte, and no other member's."""
    copy(3)
    copy(4, flush=False)
    copy(9, member="trainer-9")
    shutil.rmtree(folder)
    (record,) = take_over(peer, tmp_path, ["trainer-0"])
    assert stored(tmp_path) == [(0, 4, "trainer-0")]
    verify_stored(tmp_path, record)
    assert take_over(peer, tmp_path, ["trainer-0"]) == []


def test_what_storage_has_already_is_not_flushed_again(tmp_path, peer, copy):
    segment = copy(4)
    flush_segment(segment, tmp_path)
    assert take_over(peer, tmp_path, ["trainer-0"]) == []
    copy(3, member="trainer-1")
    assert take_over(peer, tmp_path, ["trainer-1"]) == [], "an older step than storage has"


def test_a_damaged_copy_gives_way_to_the_one_before(tmp_path, peer, copy):
    copy(3)
    broken = copy(4).path
    with open(broken, "r+b") as file:
        file.seek(-9, os.SEEK_END)
        file.write(b"?")
    take_over(peer, tmp_path, ["trainer-0"])
    assert stored(tmp_path) == [(0, 3, "trainer-0")]


def test_only_a_whole_member_is_flushed(tmp_path, peer, copy):
    copy(4, rank=0, ranks=2)
    assert take_over(peer, tmp_path, ["trainer-0"]) == []
    copy(4, rank=1, ranks=2)
    (record,) = take_over(peer, tmp_path, ["trainer-0"])
    assert len(record.shards) == 2


@pytest.mark.parametrize(
    ("version", "rewinds", "newest", "due"),
    [
        ((0, 5), [], None, True),
        ((0, 5), [], (0, 5), True),
        ((0, 6), [], (0, 5), False),  # sealed, and never committed
        ((0, 5), [], (1, 9), False),  # of a lineage that is past
        ((1, 9), [], (0, 20), False),  # of one that the controller has not begun
        ((0, 5), [(1, 4)], None, False),  # a later lineage began behind it
        ((0, 4), [(1, 4)], None, True),
        ((1, 5), [(1, 4)], (1, 5), True),
    ],
)
def test_what_is_dead_or_uncommitted_is_not_due(version, rewinds, newest, due):
    assert is_due(version, [Rewind(lineage=at, step=step) for at, step in rewinds], newest) is due


def test_a_dead_branch_is_fenced_by_what_storage_and_memory_know(tmp_path, peer, copy):
    """Storage has a checkpoint of a lineage that went back to step 2: the copy of step 5 of the old one stays where it is."""
    copy(5)
    lived_on = copy(3, member="trainer-1", lineage=1, rewinds=(Rewind(lineage=1, step=2),))
    assert take_over(peer, tmp_path, ["trainer-0"]) == [], "the living member's header, in memory, says so"
    flush_segment(lived_on, tmp_path)
    lived_on.path.unlink()
    assert take_over(peer, tmp_path, ["trainer-0"]) == [], "the manifest says so"
    assert stored(tmp_path) == [(1, 3, "trainer-1")]


class SlowFiles(Files):
    """A disk whose first write waits until it is told to go on."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.written_bytes = 0

    def write(self, fd, block, at):
        if len(block) > 1000:
            self.begun.set()
            assert self.go_on.wait(20)
            self.written_bytes += len(block)
        return super().write(fd, block, at)


def test_two_who_would_flush_the_same_write_it_once(tmp_path, peer, copy):
    """While one writes, the other is told so and writes nothing; when the first is done, there is nothing left to do."""
    segment = copy(4)
    files = SlowFiles()
    first = threading.Thread(target=take_over, args=(peer, FolderStorage(tmp_path, files), ["trainer-0"]))
    first.start()
    assert files.begun.wait(20)
    second = Claims()
    for _ in range(3):
        with pytest.raises(BeingFlushed):
            take_over(peer, tmp_path, ["trainer-0"], claims=second)
    assert Flusher(peer, tmp_path).flush_newest() is None, "the owner itself, back too early, lets it as well"
    files.go_on.set()
    first.join(20)
    assert files.written_bytes == segment.nbytes
    assert take_over(peer, tmp_path, ["trainer-0"], claims=second) == []
    (record,) = list_manifests(tmp_path)
    verify_stored(tmp_path, record)
    assert sorted(path.name for path in (tmp_path / "trainer" / "l000-s000000004-e000").iterdir()) == [
        "manifest.json",
        "trainer-0.r0.safetensors",
    ]


FLUSHER = """
import sys
from pathlib import Path
from easyckpt.errors import BeingFlushed
from easyckpt.takeover import take_over
print("ready", flush=True)
for _ in sys.stdin:
    while True:
        try:
            done = take_over(Path(sys.argv[1]), sys.argv[2], ["trainer-0"])
            break
        except BeingFlushed:
            pass
    print(len(done), flush=True)
"""


def test_processes_that_race_for_a_dead_nodes_flush_commit_it_exactly_once(tmp_path, peer, copy):
    """Three at a time, five times: each time one commits and the others find it done; every checkpoint proves itself."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", FLUSHER, str(peer), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for step in range(1, 6):
            copy(step)
            for racer in racers:
                racer.stdin.write("go\n")
                racer.stdin.flush()
            assert sorted(racer.stdout.readline() for racer in racers) == ["0\n", "0\n", "1\n"]
    finally:
        for racer in racers:
            racer.communicate(timeout=60)
    assert [step for _, step, _ in stored(tmp_path)] == [5, 4, 3, 2, 1]
    for record in list_manifests(tmp_path):
        verify_stored(tmp_path, record)


KILLED = """
import os, signal, stat, sys
from pathlib import Path
from easyckpt.storage import Files, FolderStorage
from easyckpt.takeover import take_over

class Deadly(Files):
    def fsync(self, fd):
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.kill(os.getpid(), signal.SIGKILL)

take_over(Path(sys.argv[1]), FolderStorage(Path(sys.argv[2]), Deadly()), ["trainer-0"])
"""


def test_a_claim_of_a_killed_process_ends_with_it(tmp_path, peer, copy):
    """Killed in the middle of the flush: the next one on the machine does it at once, under names of its own, and tidies up."""
    copy(4)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(peer), str(tmp_path)], env=environment, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    folder = tmp_path / "trainer" / "l000-s000000004-e000"
    assert (folder / ".claim.1").exists()
    (record,) = take_over(peer, tmp_path, ["trainer-0"])
    assert [shard.file for shard in record.shards] == ["trainer-0.r0.2.safetensors"]
    verify_stored(tmp_path, record)
    assert not list(folder.glob(".claim*"))


def test_a_claim_of_another_machine_ends_when_nothing_moves(tmp_path, peer, copy, monkeypatch):
    """Its process cannot be seen from here: as long as the folder changes it is left alone, then it has its time, by our own clock."""
    copy(4)
    storage = FolderStorage(tmp_path)
    folder = "trainer/l000-s000000004-e000"
    foreign = Holder(machine="another boot", pid=1, start=1, mark="x")
    assert storage.create(folder, ".claim.1", msgspec.json.encode(foreign))
    now = [1000.0]
    monkeypatch.setattr(claims.time, "monotonic", lambda: now[0])
    watcher = Claims()
    for seconds in (0, claims.CLAIM_SECONDS - 1):
        now[0] += seconds
        with pytest.raises(BeingFlushed):
            take_over(peer, tmp_path, ["trainer-0"], claims=watcher)
    (tmp_path / folder / ".trainer-0.r0.safetensors.ab.part").write_bytes(b"it goes on")
    now[0] += 2
    with pytest.raises(BeingFlushed):
        take_over(peer, tmp_path, ["trainer-0"], claims=watcher)
    now[0] += claims.CLAIM_SECONDS + 1
    assert len(take_over(peer, tmp_path, ["trainer-0"], claims=watcher)) == 1


def test_a_writer_that_wakes_up_after_it_was_given_up_does_no_harm(tmp_path, peer, copy):
    """It holds other bytes under the same version: what it writes is in no manifest, and its commit is refused."""
    segment = copy(4)
    files = SlowFiles()
    outcome = []

    def sleeper():
        try:
            flush_segment(segment, FolderStorage(tmp_path, files))
        except AlreadyFlushed as error:
            outcome.append(error)

    thread = threading.Thread(target=sleeper)
    thread.start()
    assert files.begun.wait(20)
    folder = tmp_path / "trainer" / "l000-s000000004-e000"
    gone = Holder(machine=claims._machine(), pid=os.getpid(), start=1, mark="x")
    (folder / ".claim.1").write_bytes(msgspec.json.encode(gone))
    (record,) = take_over(peer, tmp_path, ["trainer-0"])
    files.go_on.set()
    thread.join(20)
    assert outcome
    assert list_manifests(tmp_path) == [record]
    verify_stored(tmp_path, record)


def test_a_full_storage_leaves_no_claim_behind(tmp_path, peer, copy):
    copy(4)

    class Full(Files):
        def write(self, fd, block, at):
            if len(block) > 1000:
                raise OSError(28, "No space left on device")
            return super().write(fd, block, at)

    with pytest.raises(StorageFull):
        take_over(peer, FolderStorage(tmp_path, Full()), ["trainer-0"])
    assert not list(tmp_path.rglob(".claim*"))
    assert len(take_over(peer, tmp_path, ["trainer-0"])) == 1
    assert shm.pinned_names(peer) == set()
