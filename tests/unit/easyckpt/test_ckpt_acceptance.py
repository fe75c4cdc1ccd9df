"""What goes wrong for users of other engines, and must not here: the cases that no other file proves. test_ckpt_cases names all of them."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import easyckpt
from easyckpt import shm
from easyckpt.errors import NoRoom, NotReady, SaveFailed
from easyckpt.saver import Saver
from easyckpt.shardserver import Peer, ShardServer
from easyckpt.storage import FolderStorage

HERE = Path(__file__).resolve().parent


def wait_for(condition, seconds=30.0):
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def filled(value, size=30_000):
    return {"w": torch.full((size,), float(value)), "t": torch.tensor(float(value)), "step": value}


def is_of(state, step):
    return state["step"] == step and state["t"].item() == step and state["w"].unique().tolist() == [float(step)]


def test_memory_unlinked_from_under_us_is_noticed_and_the_next_tier_is_taken(engine, folder, tmp_path):
    """By a cleaner of /dev/shm: the restore comes from storage, the next save makes its memory anew and says so."""
    checkpointer = engine(tmp_path)
    checkpointer.save(1, filled(1))
    checkpointer.wait()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    state = filled(0)
    assert checkpointer.restore(state).tier == "storage"
    assert is_of(state, 1)
    assert checkpointer.save(2, filled(2))
    checkpointer.wait()
    assert checkpointer.events.counts["segment_lost"] >= 1
    assert checkpointer.restore(state).tier == "shm"
    assert is_of(state, 2)
    shutil.rmtree(folder)
    assert checkpointer.restore(state).tier == "storage"
    assert checkpointer.save(3, filled(3))
    checkpointer.wait()
    assert checkpointer.restore(state).tier == "shm"
    assert is_of(state, 3)


def test_saves_to_memory_go_on_while_a_flush_hangs_and_neither_is_lost_or_mixed(engine, folder, tmp_path, monkeypatch):
    """The helper is stopped in the middle of its flush: saves use the other slot; let go, it commits that very step, then the newest."""
    checkpointer = engine(tmp_path)
    checkpointer.save(1, filled(1))
    checkpointer.wait()
    helper = checkpointer._flusher.sidecar.pid
    os.kill(helper, signal.SIGSTOP)
    pin = shm.pin(next(folder.glob("*.s0.safetensors")), helper, deadline=600)  # as its flush would hold it
    for step in range(2, 7):
        assert checkpointer.save(step, filled(step))
        checkpointer.ready()
    state = filled(0)
    assert checkpointer.restore(state).step == 6
    assert is_of(state, 6)
    shm.unpin(pin)
    os.kill(helper, signal.SIGCONT)
    checkpointer.wait()
    counts = checkpointer.events.counts
    assert counts["save_skipped"] == 0
    assert counts["save_exposed"] >= 3
    assert counts["flush_committed"] + counts["flush_superseded"] == 6
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert checkpointer.restore(state).step == 6
    assert is_of(state, 6)


def test_a_new_engine_in_the_same_process_takes_nothing_of_an_old_save_for_its_own(engine, folder, tmp_path):
    """After an abort the old engine is closed with a failure waiting; the new one neither raises it nor counts its flushes."""
    old = engine(tmp_path)
    old.save(1, filled(1))
    old.wait()
    old._fail(RuntimeError("of the old save"))
    with pytest.raises(SaveFailed, match="of the old save"):
        old.close()
    new = engine(tmp_path)
    state = filled(0)
    assert new.restore(state).step == 1
    assert new.save(2, filled(2))
    new.wait()
    assert new.newest.step == 2
    assert new.events.counts["flush_committed"] == 1


def test_memory_is_bounded_by_two_copies_and_refused_before_it_is_taken(engine, folder, monkeypatch):
    """Segments take twice the state and no more; a limit of the control group below the need refuses the save, and the old ones stay."""
    checkpointer = engine()
    state = {"w": torch.ones(3 << 20)}
    for step in range(1, 6):
        checkpointer.save(step, state)
    checkpointer.wait()
    used = sum(path.stat().st_blocks * 512 for path in folder.glob("*"))
    assert used <= 2.05 * state["w"].nbytes
    monkeypatch.setattr(shm, "free_bytes", lambda _fd: 1 << 20)
    with pytest.raises(NoRoom, match="shm-size"):
        checkpointer.save(6, {"w": torch.ones(4 << 20)})
    monkeypatch.undo()
    assert checkpointer.restore(state).step == 5


def test_a_low_limit_of_descriptors_is_no_limit_of_tensors(engine):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    state = {str(index): torch.full((2,), float(index)) for index in range(3000)}
    checkpointer = engine()
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 16, hard))
    try:
        checkpointer.save(1, state)
        checkpointer.wait()
        checkpointer.restore(state)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Counting(FolderStorage):
    """A storage that counts who asks it anything."""

    def __init__(self, root):
        super().__init__(root)
        self.calls = []

    def __getattribute__(self, name):
        if name in ("write_shard", "commit", "folders", "read_manifest", "open_shard", "delete", "age_seconds"):
            object.__getattribute__(self, "calls").append(name)
        return super().__getattribute__(name)


def test_only_one_process_touches_storage_and_no_rank_polls_for_anothers_file(engine, tmp_path):
    """Saving never reads or writes storage from a training process, and ranks other than the first have no helper."""
    ranks = [engine(tmp_path, rank=rank, ranks=2) for rank in (0, 1)]
    storages = []
    for one in ranks:
        one.restore(filled(0))
        one._storage = Counting(tmp_path)
        storages.append(one._storage)
        one._begun = True  # what was there before is known
    for step in range(1, 5):
        for one in ranks:
            one.save(step, filled(step))
        for one in ranks:
            one._saver.settle(30)  # ranks of one member step together
    for one in ranks:
        one.wait()
    assert [storage.calls for storage in storages] == [[], []]
    assert ranks[1]._flusher is None
    assert ranks[0].events.counts["flush_committed"] >= 1


def test_nothing_executable_is_written_or_read():
    """No module of the engine unpickles, evaluates or imports by a name that it read; the one that reads DCP's own format allows named types only."""
    for path in Path(easyckpt.__file__).parent.rglob("*.py"):
        text = path.read_text()
        found = set(re.findall(r"(?:import|from) (pickle|marshal|shelve)|\b(eval|exec|__import__)\(", text))
        assert found <= ({("pickle", "")} if path.name == "interchange.py" else set()), path


def test_a_segment_that_asks_for_code_holds_only_text(engine, folder):
    """What looks like a reference to a class comes back as the dict it is."""
    evil = {
        "$object": {"module": "os", "name": "system", "args": ["true"]},
        "$tensor": "w",
        "__reduce__": ["os.system"],
    }
    checkpointer = engine()
    checkpointer.save(1, {"w": torch.ones(2), "x": evil})
    assert checkpointer.load()[1]["x"] == evil


@pytest.mark.parametrize("mode", ["overlap", pytest.param("copy", marks=pytest.mark.long)])
def test_a_trainer_killed_at_each_of_its_calls_never_loses_or_mixes_a_step(folder, tmp_path, mode):
    """SIGKILL at every single copy, write, sync, rename, link and unlink of a save, a flush and a retention, one after the other."""
    script = [sys.executable, str(HERE / "ckpt_crash_points.py"), str(folder), str(tmp_path), mode]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent.parent)}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["wrong"] == []
    assert figures["rounds"] > 30
    assert figures["steps"] == figures["flushed"] > 10


@pytest.fixture
def small_shm(tmp_path):
    """A /dev/shm of 8 MiB, as a pod has one of 64."""
    place = tmp_path / "shm"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no tmpfs may be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_too_small_dev_shm_is_refused_when_memory_is_taken_and_never_a_sigbus_later(engine, small_shm):
    """With what is needed, what is there and how to mend it; one slot fits where two do not; what was refused takes no memory."""
    checkpointer = engine(folder=small_shm / "memory")
    with pytest.raises(NoRoom, match="shm-size") as caught:
        checkpointer.prepare({"w": torch.ones(5 << 20)})
    assert caught.value.needed_bytes > 20 << 20 > caught.value.free_bytes
    state = {"w": torch.ones(5 << 18)}
    with pytest.raises(NoRoom, match="slots=1"):
        checkpointer.prepare(state)
    checkpointer.close()
    shutil.rmtree(small_shm / "memory")
    single = engine(folder=small_shm / "memory", slots=1)
    for step in (1, 2):
        state["w"].fill_(step)
        single.save(step, state)
        single.wait()
        assert bool((single.load()[1]["w"] == step).all())


def test_one_slot_says_what_it_risks_and_a_kill_in_a_save_leaves_storage(engine, folder, tmp_path):
    """Half the memory: while a save overwrites the only slot there is no copy in memory, and the engine said so when it was opened."""
    heard = []
    checkpointer = engine(tmp_path, slots=1, on_event=heard.append)
    assert [event.kind for event in heard] == ["save_exposed"]
    assert "slots=1" in heard[0].text
    for step in (1, 2):
        checkpointer.save(step, filled(step))
        checkpointer.wait()
    assert len(list(folder.glob("*.safetensors"))) == 1
    slot = checkpointer._saver._slots[0]
    slot.claim()  # a save has begun, and is killed here
    checkpointer._saver._slots[0].close()
    state = filled(0)
    assert checkpointer.restore(state).tier == "storage"
    assert is_of(state, 2)


def test_a_helper_that_cannot_live_or_does_not_answer_is_told_and_never_a_hang(engine, folder, tmp_path, monkeypatch):
    """Training and memory go on; who waits for storage is told when his time is up; once it can live, it flushes."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    checkpointer = engine(tmp_path)
    checkpointer.save(1, filled(1))
    with pytest.raises(NotReady, match="not on storage yet"):
        checkpointer.wait(1.5)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    checkpointer.save(2, filled(2))
    with pytest.raises(SaveFailed, match="absent"):
        checkpointer.wait(30)
    monkeypatch.undo()
    checkpointer.save(3, filled(3))
    checkpointer.wait()
    os.kill(checkpointer._flusher.sidecar.pid, signal.SIGSTOP)
    checkpointer.save(4, filled(4))
    with pytest.raises(NotReady):
        checkpointer.wait(0.5)
    state = filled(0)
    assert checkpointer.restore(state).step == 4
    os.kill(checkpointer._flusher.sidecar.pid, signal.SIGCONT)
    checkpointer.wait()


FORKED = """
import os, sys, torch
from easyckpt import Checkpointer
from easyckpt.errors import EasyckptError
ckpt = Checkpointer(sys.argv[2], folder=sys.argv[1])
state = {"w": torch.ones(30_000)}
ckpt.save(1, state)
ckpt.wait()
child = os.fork()
if child == 0:
    try:
        ckpt.save(2, state)
    except EasyckptError as error:
        print("said", error, flush=True)
    sys.exit(0)  # runs what the parent registered for its own exit
assert os.waitpid(child, 0)[1] == 0
assert [one.tier for one in ckpt.candidates()] == ["shm"], "the child took the memory away"
ckpt.save(2, state)
ckpt.wait()
assert ckpt.events.counts["segment_lost"] == 0
"""


def test_a_forked_child_that_ends_takes_nothing_of_its_parents(folder, tmp_path):
    """Neither memory nor the helper; a save in the child is refused by name, not a hang."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent.parent.parent)}
    script = [sys.executable, "-c", FORKED, str(folder), str(tmp_path)]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "said this checkpointer is that of process" in done.stdout


def test_stale_names_in_memory_are_no_error(engine, folder):
    """Marks of dead processes, a file that is no segment under a segment's name, an empty one, one of another size: saves go on over them."""
    (folder / "trainer-0.r0.s0.safetensors").write_bytes(b"garbage" * 5000)
    (folder / "trainer-0.r0.s1.safetensors").touch()
    (folder / "trainer-0.r0.writer.999999999.1").touch()
    (folder / "trainer-0.r0.s0.safetensors.pin.999999999.1.99999999999999").touch()
    checkpointer = engine()
    for step in (1, 2, 3):
        checkpointer.save(step, filled(step))
        checkpointer.wait()
    state = filled(0)
    assert checkpointer.restore(state).step == 3
    assert is_of(state, 3)
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [
        "trainer-0.r0.s0.safetensors", "trainer-0.r0.s1.safetensors",
    ]  # fmt: skip


def test_a_name_that_leads_elsewhere_is_not_followed(engine, folder, tmp_path):
    """A link under a segment's name is replaced: what it leads to is not overwritten."""
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine" * 50_000)
    (folder / "trainer-0.r0.s0.safetensors").symlink_to(precious)
    checkpointer = engine()
    for step in (1, 2, 3):
        checkpointer.save(step, filled(step))
        checkpointer.wait()
    assert is_of(checkpointer.load()[1], 3)
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert precious.read_bytes() == b"mine" * 50_000


@pytest.mark.long
@pytest.mark.timeout(600)
def test_one_tensor_of_more_than_four_gibibytes(engine, folder, tmp_path, monkeypatch):
    """Through memory, a socket, storage and back: no call is trusted to move more than 2 GiB at once, no offset has 32 bits."""
    size = (1 << 30) + 12_345
    state = {"w": torch.full((size,), 1.0)}
    state["w"][-1] = 7.0
    state["w"][1 << 29] = 5.0

    def is_whole():
        total = sum(part.double().sum().item() for part in state["w"].split(1 << 24))
        return state["w"][-1] == 7.0 and state["w"][1 << 29] == 5.0 and total == size + 6 + 4

    checkpointer = engine(tmp_path, slots=1, mode="copy")
    checkpointer.save(1, state)
    checkpointer.wait()
    monkeypatch.setattr(Saver, "prepare_later", lambda _this, _header: None)  # memory for saves that do not come
    server = ShardServer(folder)
    near = folder.with_name(folder.name + "-near")
    try:
        state["w"].zero_()
        other = engine(folder=near, member="new", peers=[Peer(server.address)], slots=1)
        assert other.restore(state).tier == "peer"
        assert is_whole()
        other.close()
    finally:
        server.close()
        shutil.rmtree(near, ignore_errors=True)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    state["w"].zero_()
    assert checkpointer.restore(state).tier == "storage"
    assert is_whole()
