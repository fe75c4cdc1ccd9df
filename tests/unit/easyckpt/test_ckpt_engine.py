"""Saving off the training thread, and restoring from the nearest good copy."""

import contextlib
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from easyckpt import Checkpointer, read_weights, shm
from easyckpt.errors import Corrupt, EasyckptError, SaveFailed, Torn, Unsealed
from easyckpt.flush import Flusher
from easyckpt.replica import open_for_send, receive
from easyckpt.slot import Slot

LARGE = 300  # a square of this many floats is copied by the thread


class Held:
    """Holds the saving thread before its copy until it is let go."""

    def __init__(self, monkeypatch):
        from easyckpt.snapshot import Copy

        self.go, self.there = threading.Event(), threading.Event()
        copy = Copy.copy

        def wait_first(this, leaves):
            if leaves:
                self.there.set()
                assert self.go.wait(30)
            copy(this, leaves)

        monkeypatch.setattr(Copy, "copy", wait_first)


def trained(steps=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(LARGE, LARGE), nn.BatchNorm1d(LARGE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        backward(model)
        optimizer.step()
    return model, optimizer


def backward(model):
    model.zero_grad()
    model(torch.randn(4, LARGE)).square().mean().backward()


def wait_for(condition, seconds=30.0):
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def test_the_optimizer_waits_for_the_copy_and_nothing_else_does(engine, monkeypatch):
    """save returns while the large tensors are not copied yet; forward and backward go on; the step waits by itself and the snapshot is of the save."""
    held = Held(monkeypatch)
    model, optimizer = trained()
    checkpointer = engine()
    want = model[0].weight.clone()
    assert checkpointer.save(1, {"model": model, "optimizer": optimizer})
    assert held.there.wait(30)
    backward(model)
    stepping = threading.Thread(target=optimizer.step)
    stepping.start()
    wait_for(lambda: checkpointer._saver._job.copy.hurry)
    assert torch.equal(model[0].weight, want)
    assert stepping.is_alive()
    held.go.set()
    stepping.join(30)
    assert not torch.equal(model[0].weight, want)
    _, state = checkpointer.load()
    assert torch.equal(state["model"]["0.weight"], want)
    assert checkpointer.events.counts["save_waited"] == 1


def test_what_changes_before_the_optimizer_is_copied_at_once(engine, monkeypatch):
    """Buffers, counters, 0-dim tensors, Python values and tensors no optimizer knows may change the moment save returns."""
    held = Held(monkeypatch)
    model, optimizer = trained()
    average = torch.ones(LARGE, LARGE)
    state = {"model": model, "optimizer": optimizer, "ema": average, "data": {"at": [1, 2]}, "t": torch.tensor(1.0)}
    running = model[1].running_mean.clone()
    checkpointer = engine()
    checkpointer.save(1, state)
    backward(model)
    average.zero_()
    state["data"]["at"].append(3)
    state["t"].add_(1)
    held.go.set()
    _, loaded = checkpointer.load()
    assert torch.equal(loaded["model"]["1.running_mean"], running)
    assert not torch.equal(model[1].running_mean, running)
    assert loaded["ema"].sum() == LARGE * LARGE
    assert loaded["data"] == {"at": [1, 2]}
    assert loaded["t"] == 1


def test_ready_waits_for_loops_that_change_the_state_themselves(engine, monkeypatch):
    held = Held(monkeypatch)
    model, optimizer = trained()
    checkpointer = engine()
    want = model[0].weight.clone()
    checkpointer.save(1, {"model": model, "optimizer": optimizer})
    with pytest.raises(EasyckptError, match="not done"):
        checkpointer.ready(0.01)
    held.go.set()
    checkpointer.ready()
    with torch.no_grad():
        model[0].weight.zero_()
    _, state = checkpointer.load()
    assert torch.equal(state["model"]["0.weight"], want)


def test_a_tensor_that_something_else_changed_is_named_and_copied_at_once_from_then_on(engine, monkeypatch):
    """The torn snapshot is not sealed, the one before stays, the trainer hears of it on its next call, which still saves."""
    model, optimizer = trained()
    checkpointer = engine()
    state = {"model": model, "optimizer": optimizer}
    assert checkpointer.save(1, state)
    checkpointer.wait()
    held = Held(monkeypatch)
    checkpointer.save(2, state)
    with torch.no_grad():
        model[0].weight.mul_(2)
    held.go.set()
    with pytest.raises(SaveFailed, match=r"model/0\.weight"):
        checkpointer.save(3, state)
    assert checkpointer.events.counts["tensor_moved"] == 1
    checkpointer.wait()
    assert [one.step for one in checkpointer.candidates()] == [3, 1]
    checkpointer.save(4, state)
    with torch.no_grad():
        want = model[0].weight.clone()
        model[0].weight.mul_(2)
    checkpointer.wait()
    assert torch.equal(checkpointer.load()[1]["model"]["0.weight"], want)


def test_a_forked_child_waits_for_no_copy(engine, monkeypatch):
    """Its optimizers step at once: the thread that copies is its parent's."""
    held = Held(monkeypatch)
    model, optimizer = trained()
    checkpointer = engine()
    checkpointer.save(1, {"model": model, "optimizer": optimizer})
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(0)
    try:
        wait_for(lambda: os.waitpid(child, os.WNOHANG) != (0, 0))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        held.go.set()
    checkpointer.wait()


def test_a_change_after_the_copy_and_before_the_step_is_named_at_the_gate(engine):
    """The snapshot is good; the habit would tear one sooner or later, so the tensor is copied at once from then on."""
    model, optimizer = trained()
    checkpointer = engine()
    state = {"model": model, "optimizer": optimizer}
    heard = model[0].weight.clone()
    checkpointer.save(1, state)
    wait_for(lambda: checkpointer.newest is not None)
    model[0].weight.data.mul_(2)
    backward(model)
    optimizer.step()
    assert checkpointer.events.counts["tensor_moved"] == 1
    assert torch.equal(checkpointer.load()[1]["model"]["0.weight"], heard)
    with torch.no_grad():
        want = model[0].weight.clone()
        checkpointer.save(2, state)
        model[0].weight.mul_(2)
    checkpointer.wait()
    assert torch.equal(checkpointer.load()[1]["model"]["0.weight"], want)


def test_who_never_steps_an_optimizer_is_named_by_the_next_save(engine):
    """Parameters that an optimizer owns and something else rewrites, past torch's counters: seen before a slower copy is torn by it."""
    model, optimizer = trained()
    checkpointer = engine()
    state = {"model": model, "optimizer": optimizer}
    checkpointer.save(1, state)
    wait_for(lambda: checkpointer.newest is not None)
    model[0].weight.data.mul_(2)
    checkpointer.save(2, state)
    assert checkpointer.events.counts["tensor_moved"] == 1
    want = model[0].weight.detach().clone()
    model[0].weight.data.mul_(2)
    checkpointer.wait()
    assert torch.equal(checkpointer.load()[1]["model"]["0.weight"], want)


def test_the_gate_proves_nothing_about_what_may_change(engine):
    """After `wait`, `ready` or a restore the state is the user's: changes are no fault, and no save is slower for them."""
    model, optimizer = trained()
    checkpointer = engine()
    state = {"model": model, "optimizer": optimizer}
    for step, let_go in enumerate((checkpointer.wait, checkpointer.ready), 1):
        checkpointer.save(step, state)
        let_go()
        with torch.no_grad():
            model[0].weight.mul_(2)
        backward(model)
        optimizer.step()
    assert checkpointer.events.counts["tensor_moved"] == 0


def test_an_optimizer_of_a_tensor_without_elements_governs_nothing_else(engine, monkeypatch):
    """Its address is 0, as is that of what lies in no plain memory: that one is still copied at once."""
    held = Held(monkeypatch)
    model, empty = nn.Linear(LARGE, LARGE), nn.Parameter(torch.empty(0))
    optimizer = torch.optim.SGD([*model.parameters(), empty], lr=0.1)
    average = torch.ones(LARGE, LARGE).t()
    checkpointer = engine()
    checkpointer.save(1, {"model": model, "optimizer": optimizer, "average": average})
    average.zero_()
    held.go.set()
    checkpointer.wait()
    assert checkpointer.load()[1]["average"].sum() == LARGE * LARGE


def test_a_segment_removed_just_before_it_is_claimed_costs_one_save(engine, folder, monkeypatch):
    """As whoever finds it damaged removes it: no save goes to a file without a name."""
    checkpointer = engine()
    state = {"w": torch.ones(LARGE, LARGE)}
    for step in (1, 2):
        checkpointer.save(step, state)
        checkpointer.wait()
    with monkeypatch.context() as patch:
        fit = Slot.fit
        patch.setattr(Slot, "fit", lambda this, *sizes: (fit(this, *sizes), this.path.unlink()))
        assert not checkpointer.save(3, state)
    assert checkpointer.save(4, state)
    checkpointer.wait()
    assert [one.step for one in checkpointer.candidates()] == [4, 2]


def by_load(model):
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})


def by_hand(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)


@pytest.mark.parametrize("change", [by_load, by_hand])
def test_any_later_save_sees_what_else_changed_the_state_while_it_was_copied(engine, monkeypatch, change):
    """Not only the first two: best weights loaded back, an update by hand. None is sealed half and half; the next one is right."""
    model, optimizer = trained()
    checkpointer = engine()
    state = {"model": model, "optimizer": optimizer}
    for step in (1, 2, 3):
        checkpointer.save(step, state)
        backward(model)
        optimizer.step()
        checkpointer.wait()
    with monkeypatch.context() as patch:
        held = Held(patch)
        checkpointer.save(4, state)
        change(model)
        held.go.set()
        with pytest.raises(SaveFailed, match=r"model/0\.weight"):
            checkpointer.wait()
    want = model[0].weight.detach().clone()
    checkpointer.save(5, state)
    change(model)
    checkpointer.wait()
    assert torch.equal(checkpointer.load()[1]["model"]["0.weight"], want)


def test_copy_mode_returns_when_everything_may_change(engine, monkeypatch):
    held = Held(monkeypatch)
    held.go.set()
    tensors = {"w": torch.ones(LARGE, LARGE)}
    checkpointer = engine(mode="copy")
    checkpointer.save(1, tensors)
    tensors["w"].zero_()
    assert checkpointer.load()[1]["w"].sum() == LARGE * LARGE
    assert not held.there.is_set()


def test_a_tensor_that_moved_between_saves_is_saved_from_its_new_place(engine):
    """Offloading and `p.data =` give a parameter other memory."""
    model, optimizer = trained()
    checkpointer = engine()
    checkpointer.save(1, {"model": model, "optimizer": optimizer})
    checkpointer.wait()
    model[0].weight.data = torch.full((LARGE, LARGE), 7.0)
    checkpointer.save(2, {"model": model, "optimizer": optimizer})
    assert checkpointer.load()[1]["model"]["0.weight"].unique().tolist() == [7.0]


def test_save_tells_the_agent_after_the_seal(engine):
    """The callback gets the path and header of a segment that verifies."""
    heard = []
    checkpointer = engine(on_sealed=lambda path, header: heard.append((shm.verify(path).header, header)))
    checkpointer.save(4, {"w": torch.ones(3)}, lineage=2, epoch=5, chain="abc", flush=True)
    checkpointer.wait()
    ((found, told),) = heard
    assert found == told
    assert (told.lineage, told.step, told.epoch, told.chain, told.flush) == (2, 4, 5, "abc", True)
    newest = checkpointer.newest
    assert (newest.lineage, newest.step, newest.chain, newest.state_digest) == (2, 4, "abc", told.state_digest)


def test_replicas_have_the_same_digest_and_others_do_not(engine):
    first, second = engine(member="a"), engine(member="b")
    first.save(1, {"w": torch.ones(3), "x": torch.zeros(2), "mine": 1})
    second.save(1, {"x": torch.zeros(2), "w": torch.ones(3), "mine": 2})
    first.wait()
    second.wait()
    assert first.newest.state_digest == second.newest.state_digest
    second.save(2, {"x": torch.zeros(2), "w": torch.tensor([1.0, 1.0, 1.0 + 1e-7])})
    second.wait()
    assert first.newest.state_digest != second.newest.state_digest


def test_no_free_slot_skips_the_save_and_counts_it(engine, folder):
    checkpointer = engine()
    for step in (1, 2):
        assert checkpointer.save(step, {"w": torch.full((4,), float(step))})
        checkpointer.wait()
    pins = [shm.pin(path) for path in folder.glob("*.safetensors")]
    assert not checkpointer.save(3, {"w": torch.ones(4)})
    assert checkpointer.events.counts["save_skipped"] == 1
    shm.unpin(pins[0])
    assert checkpointer.save(4, {"w": torch.ones(4)})
    checkpointer.wait()
    assert {one.step for one in checkpointer.candidates()} > {4}


def test_the_size_of_a_state_may_change(engine):
    checkpointer = engine()
    for step, size in enumerate([10, 100_000, 3, 3, 70_000, 0], 1):
        checkpointer.save(step, {"w": torch.full((size,), float(step)), "text": "x" * size})
        restored, state = checkpointer.load()
        assert restored.step == step
        assert state["w"].tolist() == [float(step)] * size
        assert len(state["text"]) == size


def test_a_flushed_step_is_on_storage_when_wait_returns_and_a_clean_end_leaves_no_memory(engine, folder, tmp_path):
    checkpointer = engine(tmp_path, keep=2)
    for step in range(1, 5):
        checkpointer.save(step, {"w": torch.full((5,), float(step))})
        checkpointer.wait()
        assert checkpointer.events.counts["flush_committed"] == step
    checkpointer.close()
    assert not folder.exists()
    assert sorted(p.name for p in (tmp_path / "trainer").iterdir()) == ["l000-s000000003-e000", "l000-s000000004-e000"]
    again = engine(tmp_path)
    state = {"w": torch.zeros(5)}
    assert again.restore(state).tier == "storage"
    assert state["w"].tolist() == [4.0] * 5


def test_the_last_state_is_flushed_at_the_end_whatever_the_interval(engine, tmp_path):
    checkpointer = engine(tmp_path, flush_every=3)
    for step in range(1, 6):
        checkpointer.save(step, {"w": torch.full((5,), float(step))})
        checkpointer.wait()
    assert checkpointer.events.counts["flush_committed"] == 2
    checkpointer.close()
    assert [one.step for one in engine(tmp_path).candidates()] == [5, 4, 1]


def test_a_marked_step_that_was_overwritten_before_its_flush_passes_its_mark_on(engine, tmp_path):
    """The helper is stopped while steps 1 to 4 are saved and only step 1 is marked: a later one goes to storage in its place, and wait ends."""
    checkpointer = engine(tmp_path, flush_every=100)
    checkpointer._flusher.sidecar.start()
    os.kill(checkpointer._flusher.sidecar.pid, signal.SIGSTOP)
    for step in range(1, 5):
        checkpointer.save(step, {"w": torch.ones(3)})
        checkpointer._saver.settle(30)
    os.kill(checkpointer._flusher.sidecar.pid, signal.SIGCONT)
    checkpointer.wait(30)
    assert checkpointer.events.counts["flush_committed"] == 1
    assert checkpointer.events.counts["flush_superseded"] == 1
    assert [path.name for path in (tmp_path / "trainer").iterdir()] == ["l000-s000000003-e000"]


def test_a_step_that_another_writer_flushed_is_done(engine, tmp_path, folder):
    """Two helpers on one storage: the slower one finds the step there and says so, and nobody waits for it in vain."""
    checkpointer = engine(tmp_path)
    checkpointer._flusher.sidecar.start()
    os.kill(checkpointer._flusher.sidecar.pid, signal.SIGSTOP)
    checkpointer.save(1, {"w": torch.ones(3)})
    checkpointer._saver.settle(30)
    assert Flusher(folder, tmp_path).flush_newest().step == 1
    os.kill(checkpointer._flusher.sidecar.pid, signal.SIGCONT)
    checkpointer.wait(30)
    assert checkpointer.events.counts["flush_committed"] == 0


def test_a_failed_flush_is_raised_by_the_next_save_which_still_saves(engine, tmp_path):
    """The trainer hears of it once; memory keeps the state; once mended, the next flush works."""
    checkpointer = engine(tmp_path / "ckpts")
    (tmp_path / "ckpts").write_text("a file is in the way")
    checkpointer.save(1, {"w": torch.ones(3)})
    with pytest.raises(SaveFailed, match="ckpts"):
        checkpointer.wait()
    checkpointer.save(2, {"w": torch.ones(3)}, flush=False)
    (tmp_path / "ckpts").unlink()
    checkpointer.save(3, {"w": torch.ones(3)})
    checkpointer.wait()
    assert checkpointer.candidates()[0].step == 3
    assert (tmp_path / "ckpts" / "trainer" / "l000-s000000003-e000" / "manifest.json").exists()


def test_a_killed_helper_is_replaced_at_the_next_save(engine, tmp_path):
    checkpointer = engine(tmp_path)
    checkpointer.save(1, {"w": torch.ones(3)})
    checkpointer.wait()
    first = checkpointer._flusher.sidecar.pid
    os.kill(first, 9)
    checkpointer._flusher.sidecar._process.wait()
    checkpointer.save(2, {"w": torch.ones(3)})
    checkpointer.wait()
    assert checkpointer._flusher.sidecar.pid != first
    assert checkpointer.events.counts["flush_committed"] == 2


def flip(path, at=-3):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(bytes(raw))


def test_a_damaged_copy_falls_to_the_next_tier_and_says_so(engine, folder, tmp_path, make_segment):
    """shm, then the peer copy, then storage, then an older step; each refusal is counted; with nothing good left it is an error."""
    checkpointer = engine(tmp_path)
    for step in (1, 2):
        checkpointer.save(step, {"w": torch.full((2000,), float(step))})
        checkpointer.wait()
    shards = sorted(tmp_path.rglob("*.safetensors"))
    (newest,) = [one.path for one in shm.scan(folder) if one.header.step == 2]
    copy = receive(folder, open_for_send(newest)[2]).path
    state = {"w": torch.zeros(2000)}
    seen = [(checkpointer.restore(state).tier, checkpointer.restore(state).step)]
    for path in (newest, copy, shards[1]):
        flip(path)
        restored = checkpointer.restore(state)
        seen.append((restored.tier, restored.step))
        assert state["w"].unique().tolist() == [float(restored.step)]
    assert seen == [("shm", 2), ("peer", 2), ("storage", 2), ("shm", 1)]
    assert checkpointer.events.counts["tier_refused"] == 1 + 2 + 3
    for path in [*folder.glob("*.safetensors"), shards[0]]:
        if path not in (newest, copy):
            flip(path)
    with pytest.raises(Corrupt, match="half filled"):
        checkpointer.restore(state)


def test_any_members_whole_snapshot_of_the_role_will_do(engine):
    first = engine(member="policy-0", role="policy")
    first.save(3, {"w": torch.full((3,), 3.0)})
    first.wait()
    other_role = engine(member="critic-0", role="critic")
    assert other_role.restore({"w": torch.zeros(3)}) is None
    second = engine(member="policy-1", role="policy")
    state = {"w": torch.zeros(3)}
    assert second.restore(state, member="policy-1") is None
    restored = second.restore(state)
    assert (restored.member, restored.step) == ("policy-0", 3)
    assert second.restore(state, at=(0, 2)) is None


def test_a_step_is_restored_only_when_all_ranks_have_it(engine):
    ranks = [engine(rank=rank, ranks=2) for rank in (0, 1)]
    for step in (1, 2):
        for rank, one in enumerate(ranks):
            if (step, rank) != (2, 1):
                one.save(step, {"w": torch.tensor([step, rank])})
                one.wait()
    for rank, one in enumerate(ranks):
        state = {"w": torch.zeros(2, dtype=torch.int64)}
        assert one.restore(state).step == 1
        assert state["w"].tolist() == [1, rank]


def test_going_back_leaves_a_branch_that_is_never_restored_again(engine, tmp_path):
    """Restored at step 2 of 4 and saved on: the newest is the new step 3, and the dead 3 and 4 are no candidates on any tier."""
    checkpointer = engine(tmp_path, keep=10)
    for step in range(1, 5):
        checkpointer.save(step, {"w": torch.full((3,), float(step))})
        checkpointer.wait()
    state = {"w": torch.zeros(3)}
    assert checkpointer.restore(state, at=(0, 2)).step == 2
    state["w"].fill_(30)
    checkpointer.save(3, state)
    checkpointer.wait()
    assert [one.version for one in checkpointer.candidates()] == [(1, 3), (0, 2), (0, 1)]
    assert checkpointer.restore({"w": torch.zeros(3)}).lineage == 1


def test_weights_are_read_without_a_pin_and_never_torn(engine, folder):
    """A reader that is overtaken by the writer is told so; what it gets is always one step's."""
    checkpointer = engine()
    checkpointer.save(1, {"model": {"w": torch.ones(500_000)}})
    checkpointer.wait()
    segment = shm.scan(folder)[0]
    header, weights = read_weights(segment, prefix="model/")
    assert header.step == 1
    assert weights["w"].sum() == 500_000
    into = {"w": torch.zeros(500_000)}
    assert read_weights(segment.path, ["w"], prefix="model/", into=into)[1]["w"] is into["w"]
    assert into["w"].sum() == 500_000
    assert not list(folder.glob("*.pin.*"))
    for step in (2, 3):
        checkpointer.save(step, {"model": {"w": torch.full((500_000,), float(step))}})
        checkpointer.wait()
    with pytest.raises(Torn):
        read_weights(segment, prefix="model/")
    with open(segment.path, "r+b") as file:
        file.write(bytes(8))
    with pytest.raises(Unsealed):
        read_weights(segment.path)


def test_a_name_that_is_not_there_is_told(engine, folder):
    checkpointer = engine()
    checkpointer.save(1, {"model": {"w": torch.ones(3)}})
    checkpointer.wait()
    with pytest.raises(EasyckptError, match="bias"):
        read_weights(shm.scan(folder)[0], ["w", "bias"], prefix="model/")


def test_a_second_trainer_of_the_same_member_is_refused(engine, folder, make_segment):
    engine()
    mark = next(folder.glob("*.writer.*"))
    mark.rename(mark.with_name(f"trainer-0.r0.writer.{os.getppid()}.{shm.start_time(os.getppid())}"))
    with pytest.raises(EasyckptError, match=str(os.getppid())):
        shm.claim_writer(folder, "trainer-0.r0", wait_seconds=0)


def test_bad_arguments_are_refused(folder):
    for fields in ({"member": "a/b"}, {"rank": 2, "ranks": 2}, {"slots": 0}, {"keep": 0}, {"flush_every": 0}):
        with pytest.raises(ValueError, match=r"may have|out of range"):
            Checkpointer(folder=folder, **fields)
