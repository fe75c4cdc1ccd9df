"""A member's state on its own, with real snapshots: where a run starts from, and flushes that are owed."""

import msgspec
import pytest
import torch

from aimaster.settings import load, to_json
from aimaster.wire.checkpoint import FetchReply, Version
from aimaster.wire.places import RunPlaces
from aimaster.wire.training import Committed
from easyckpt import Checkpointer, shm
from easyckpt.errors import SaveFailed
from rl_runtime.algo.loss import LossSettings
from rl_runtime.config import Evaluation, OptimizerChoice, PolicySettings, RewardChoice, WarmStart
from rl_runtime.models.load import ModelChoice
from rl_runtime.models.tiny import Shape
from rl_runtime.policy.origin import OriginError, find_segment
from rl_runtime.policy.state import MemberState

ROWS = [{"prompt": f"{number}=", "answer": str(number)[::-1]} for number in range(10, 40)]
SETTINGS = PolicySettings(
    model=ModelChoice(shape=Shape(vocab_size=96, hidden_size=16, intermediate_size=32), max_length=32, seed=1),
    engine="tiny",
    loss=LossSettings(),
    optimizer=OptimizerChoice(),
    micro_rows=4,
    seed=0,
    device="cpu",
    warm_start=WarmStart(steps=2, rows=4, learning_rate=1e-3, seed=0),
    evaluation=Evaluation(prompts=0, seed=1, temperature=1.0, most_tokens=3, slots=4),
    reward=RewardChoice(weights={"exact": 1.0}, workers=1, deadline_seconds=1.0),
    snapshot_slots=2,
    save_every=1,
    group_timeout_seconds=5.0,
    lease_factor=4.0,
    fence_leases=10.0,
)


class NoAgent:
    def fetch(self, _request):
        return FetchReply(places=(), seconds=0.0)


class Maker:
    """Makes members, each with memory and storage of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.marks = []
        """(step, whether it is to go to storage) of each sealed snapshot."""
        self._open = []

    def __call__(self, name, **changes):
        checkpointer = Checkpointer(
            self.folder / name / "storage",
            member="policy-0",
            role="policy",
            folder=self.folder / name / "segments",
            flush_every=None,
            on_sealed=lambda _path, header: self.marks.append((header.step, header.flush)),
        )
        self._open.append(checkpointer)
        settings = msgspec.structs.replace(SETTINGS, **changes)
        state = MemberState(
            settings, checkpointer, NoAgent(), rows=ROWS, heldout=ROWS, steps=9, device="cpu", beat=lambda _phase: None
        )
        return state, checkpointer

    def close(self):
        for one in self._open:
            one.close()


@pytest.fixture
def make(tmp_path):
    maker = Maker(tmp_path)
    yield maker
    maker.close()


def advance(state, step, *, flush=False, seed=0):
    """Commit a step with a random gradient."""
    generator = torch.Generator().manual_seed(100 * seed + step)
    word = Committed(version=Version(0, step), epoch=1, chain=f"c{step}", flush=flush)
    state.commit(word, torch.randn(state.trainer.gradient.shape, generator=generator), learning_rate=1e-2)


def tensors(state):
    return {
        f"{part}/{name}": view.clone() for part, views in state.trainer.state().items() for name, view in views.items()
    }


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def earlier(make, tmp_path):
    """A run folder with checkpoints of steps 1 and 2, and what it was at each."""
    plain = Checkpointer(
        tmp_path / "run" / "storage", member="policy-0", role="policy", folder=tmp_path / "aside", flush_every=1
    )
    state, _ = make("earlier")
    state.begin(0)
    kept = {}
    for step in (1, 2):
        advance(state, step)
        plain.save(step, state.trainer.state(), lineage=0, epoch=1)
        plain.wait(30)
        kept[step] = tensors(state)
    plain.close()
    return tmp_path / "run", kept


@pytest.mark.parametrize(
    ("where", "step"), [("", 2), ("storage", 2), ("storage/policy/l000-s000000001-e001", 1), ("file", 1)]
)
def test_a_new_run_starts_from_another_runs_state(make, earlier, root, where, step):
    """From a run folder, a storage, a checkpoint or its file: weights and moments are that run's, the version is a new run's."""
    run, kept = earlier
    resolved = load(str(root / "examples" / "tiny.toml"), [], {})
    RunPlaces(run).resolved.write_bytes(to_json(resolved))
    origin = run / "storage/policy/l000-s000000001-e001/policy-0.r0.safetensors" if where == "file" else run / where
    state, _ = make("new", origin=str(origin))
    state.begin(0)
    assert equal(tensors(state), kept[step])
    assert state.version == Version(0, 0)
    assert float(state.trainer.state()["optimizer"]["step"]) == step


def test_it_starts_there_again_when_it_begins_again(make, earlier):
    """A second word to begin, after a step that is void, leads to the same state: no trace of what was trained between."""
    run, kept = earlier
    state, _ = make("new", origin=str(run / "storage"))
    state.begin(0)
    advance(state, 1, seed=7)
    state.begin(1)
    assert equal(tensors(state), kept[2])
    assert state.version == Version(1, 0)


def test_what_is_no_origin_is_told(make, earlier, tmp_path):
    """A folder without a checkpoint, and one of another model, are told by name."""
    run, _ = earlier
    with pytest.raises(OriginError, match="holds no checkpoint"):
        find_segment(tmp_path / "aside")
    wider = ModelChoice(shape=Shape(vocab_size=96, hidden_size=32, intermediate_size=32), max_length=32, seed=1)
    state, _ = make("new", origin=str(run / "storage"), model=wider)
    with pytest.raises(OriginError, match="cannot be used"):
        state.begin(0)


def test_a_flush_that_falls_on_a_skipped_save_is_made_up_for(make, tmp_path):
    """With both slots held the save is skipped; the next one, marked or not, goes to storage in its place, and only that one."""
    state, checkpointer = make("one", save_every=4)
    state.begin(0)
    advance(state, 1, flush=True)
    checkpointer.wait(10)
    pins = [shm.pin(path) for path in (tmp_path / "one" / "segments").glob("*.safetensors")]
    advance(state, 2, flush=True)
    assert state.skipped_saves == 1
    for pin in pins:
        shm.unpin(pin)
    advance(state, 3)  # no step that is saved by itself
    advance(state, 4)
    checkpointer.wait(10)
    assert make.marks == [(0, False), (1, True), (3, True), (4, False)]


def test_a_flush_is_owed_when_its_save_fails_behind_the_scenes(make, monkeypatch):
    """The failure is heard of at the next save, which is under way by then: the one after it goes to storage."""
    state, checkpointer = make("one")
    state.begin(0)
    advance(state, 1, flush=True)
    checkpointer.wait(10)
    save = checkpointer.save

    def saves_and_tells(*args, **kwargs):
        save(*args, **kwargs)
        raise SaveFailed("the earlier one broke")

    monkeypatch.setattr(checkpointer, "save", saves_and_tells)
    advance(state, 2)
    monkeypatch.undo()
    advance(state, 3)
    advance(state, 4)
    checkpointer.wait(10)
    assert make.marks[-3:] == [(2, False), (3, True), (4, False)]
