"""What does not change is copied once for each slot and proven in every save; what does change is never taken for still."""

import threading

import pytest
import torch
from torch import nn

from easyckpt import memory, shm
from easyckpt.errors import SaveFailed
from easyckpt.snapshot import Copy

WIDTH = 400


class Lora:
    """A frozen base with a small trained part, and the bytes of large tensors that the engine copied in each save."""

    def __init__(self, monkeypatch, engine, **options):
        base, adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 60)
        base.requires_grad_(False)
        self.base, self.adapter = base, adapter
        self.model = nn.Sequential(base, adapter)
        self.optimizer = torch.optim.SGD(adapter.parameters(), lr=0.1)
        self.engine = engine(**options)
        self.copied = []
        self.number = 0
        copy = memory.copy

        def watch(target, source, nbytes):
            self.copied[-1] += nbytes
            copy(target, source, nbytes)

        monkeypatch.setattr(memory, "copy", watch)

    def train(self):
        self.model(torch.randn(2, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, state):
        self.number += 1
        self.copied.append(0)
        self.engine.save(self.number, state)
        self.engine.wait()
        copied = self.copied[-1]
        loaded = self.engine.load()[1]
        self.copied[-1] = copied
        return loaded


def of_objects(one):
    return {"model": one.model, "optimizer": one.optimizer}


def of_state_dicts(one):
    return {"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict()}


def of_parameters(one):
    return {"model": dict(one.model.named_parameters())}


@pytest.mark.parametrize("mode", ["overlap", "copy"])
@pytest.mark.parametrize("state_of", [of_objects, of_state_dicts, of_parameters])
def test_a_frozen_base_is_copied_once_for_each_slot_and_proven_in_every_save(
    engine, folder, monkeypatch, state_of, mode
):
    """From the third save on only the trained part is copied, however the state is given, and each snapshot is whole all the same."""
    one = Lora(monkeypatch, engine, mode=mode)
    for _ in range(5):
        one.train()
        loaded = one.save(state_of(one))["model"]
        assert torch.equal(loaded["0.weight"], one.base.weight)
        assert torch.equal(loaded["1.weight"], one.adapter.weight)
    assert max(one.copied[2:]) < one.adapter.weight.nbytes + 10_000
    for segment in shm.scan(folder):
        shm.verify(segment.path)
    assert one.engine.events.counts["tensor_moved"] == 0


def test_one_slot_is_enough(engine, monkeypatch):
    one = Lora(monkeypatch, engine, slots=1)
    for _ in range(4):
        one.train()
        assert torch.equal(one.save(of_objects(one))["model"]["0.weight"], one.base.weight)
    assert max(one.copied[2:]) < one.adapter.weight.nbytes + 10_000


def test_what_changes_in_place_is_copied_again_and_then_still_again(engine, monkeypatch):
    """Thawed layers, a table that is edited now and then: no save fails, none is stale."""
    one = Lora(monkeypatch, engine)
    for number in range(1, 12):
        if number in (5, 6, 9):
            with torch.no_grad():
                one.base.weight.add_(1)
        assert torch.equal(one.save(of_state_dicts(one))["model"]["0.weight"], one.base.weight)
    weight = one.base.weight.nbytes
    assert [copied >= weight for copied in one.copied] == [number in (1, 2, 5, 6, 7, 9, 10) for number in range(1, 12)]


def past_data(weight):
    weight.data.add_(1)


def past_numpy(weight):
    weight.detach().numpy()[:] += 1


@pytest.mark.parametrize("change", [past_data, past_numpy])
def test_what_changes_past_its_counter_between_saves_is_never_still(engine, monkeypatch, change):
    """An average kept by `.data`, a table filled by numpy: its two first digests differ, so it is copied at once for ever."""
    one = Lora(monkeypatch, engine)
    for number in range(1, 7):
        if number != 5:
            change(one.base.weight)
        assert torch.equal(one.save(of_state_dicts(one))["model"]["0.weight"], one.base.weight)
    assert min(one.copied) >= one.base.weight.nbytes


@pytest.mark.parametrize("change", [past_data, past_numpy])
def test_what_was_still_and_changes_past_its_counter_is_named_and_copied_from_then_on(engine, monkeypatch, change):
    """The stale snapshot is not sealed; the next one is right."""
    one = Lora(monkeypatch, engine)
    for _ in range(4):
        one.save(of_state_dicts(one))
    change(one.base.weight)
    with pytest.raises(SaveFailed, match=r"model/0\.weight"):
        one.save(of_state_dicts(one))
    assert [candidate.step for candidate in one.engine.candidates()] == [4]
    for _ in range(4):
        change(one.base.weight)
        assert torch.equal(one.save(of_state_dicts(one))["model"]["0.weight"], one.base.weight)


def test_a_tensor_made_anew_for_each_save_is_never_still(engine, monkeypatch):
    """A copy on the host of what lies on a device: equal twice by chance, in memory that was freed and taken again, and then another."""
    one = Lora(monkeypatch, engine)
    for step in (0, 0, 0, 1, 1, 2):
        weight = torch.full((WIDTH, WIDTH), float(step))
        loaded = one.save({"copy": weight})
        assert torch.equal(loaded["copy"], torch.full((WIDTH, WIDTH), float(step)))
        del weight
    assert min(one.copied) == WIDTH * WIDTH * 4


def test_what_a_restore_fills_is_copied_again(engine, monkeypatch, tmp_path):
    """It is written by address, past what torch sees; the counter says so all the same."""
    one = Lora(monkeypatch, engine, storage=tmp_path, keep=9)
    first = one.base.weight.detach().clone()
    for _ in range(4):
        one.save(of_objects(one))
    with torch.no_grad():
        one.base.weight.zero_()
    for _ in range(3):
        one.save(of_objects(one))
    one.engine.restore(of_objects(one), at=(0, 1))
    assert torch.equal(one.base.weight, first)
    assert torch.equal(one.save(of_objects(one))["model"]["0.weight"], first)


def test_what_an_optimizer_takes_up_later_is_no_longer_still(engine, monkeypatch):
    """Gradual thawing: a second optimizer trains what was frozen."""
    one = Lora(monkeypatch, engine)
    for _ in range(4):
        one.train()
        one.save(of_state_dicts(one))
    one.base.requires_grad_(True)
    later = torch.optim.SGD(one.base.parameters(), lr=0.1)
    for _ in range(4):
        one.model(torch.randn(2, WIDTH)).sum().backward()
        later.step()
        assert torch.equal(one.save(of_state_dicts(one))["model"]["0.weight"], one.base.weight)
    assert one.engine.events.counts["tensor_moved"] == 0


def past_nothing(weight):
    with torch.no_grad():
        weight.add_(1)


class Slow:
    """Holds the saving thread before it proves what it did not copy."""

    def __init__(self, monkeypatch):
        self.go, keep = threading.Event(), Copy.keep
        here = threading.current_thread()
        monkeypatch.setattr(
            Copy,
            "keep",
            lambda this, leaves: (threading.current_thread() is here or self.go.wait(30), keep(this, leaves)),
        )


@pytest.mark.parametrize("change", [past_data, past_numpy, past_nothing])
def test_what_was_still_may_change_right_after_a_save(engine, monkeypatch, tmp_path, change):
    """An average whose updates begin late: the one snapshot that cannot be proven is none, which is counted and told to who waits for it;
    training is not disturbed, the next save is right and goes to storage in its place.
    """
    one = Lora(monkeypatch, engine, storage=tmp_path, flush_every=5)
    one.copied.append(0)
    for step in range(1, 6):
        one.engine.save(step, of_state_dicts(one))
        one.engine.wait()
    slow = Slow(monkeypatch)
    assert one.engine.save(6, of_state_dicts(one))
    change(one.base.weight)
    slow.go.set()
    with pytest.raises(SaveFailed, match=r"model/0\.weight"):
        one.engine.wait()
    assert one.engine.newest.step == 5
    assert one.engine.events.counts["save_skipped"] == 1
    one.number = 6
    assert torch.equal(one.save(of_state_dicts(one))["model"]["0.weight"], one.base.weight)
    assert [candidate.step for candidate in one.engine.candidates() if candidate.sources[-1].tier == "storage"] == [
        7,
        1,
    ]


def test_after_ready_what_was_still_may_change_as_well(engine, monkeypatch):
    """LoRA merged into its base, by the book: the save is whole. An optimizer's step need not wait so long: it owns nothing of that."""
    one = Lora(monkeypatch, engine)
    for _ in range(4):
        one.train()
        one.save(of_state_dicts(one))
    slow = Slow(monkeypatch)
    want = one.base.weight.detach().clone()
    one.engine.save(5, of_state_dicts(one))
    one.train()
    threading.Timer(0.2, slow.go.set).start()
    one.engine.ready()
    past_nothing(one.base.weight)
    one.engine.wait()
    assert torch.equal(one.engine.load()[1]["model"]["0.weight"], want)


@pytest.mark.parametrize("mode", ["copy", "protect"])
@pytest.mark.parametrize("change", [past_data, past_numpy, past_nothing])
def test_where_everything_may_change_at_once_no_save_is_lost(engine, monkeypatch, mode, change):
    """Also when a tensor that was still changes right after the save, or changed right before it, past its counter."""
    one = Lora(monkeypatch, engine, mode=mode)
    slow = Slow(monkeypatch)
    for step in range(1, 9):
        if step == 6:
            change(one.base.weight)
        want = one.base.weight.detach().clone()
        one.copied.append(0)
        one.engine.save(step, of_state_dicts(one))
        if step == 7:
            change(one.base.weight)
        slow.go.set()
        one.engine.wait()
        assert torch.equal(one.engine.load()[1]["model"]["0.weight"], want)
    assert one.engine.events.counts["save_skipped"] == 0
