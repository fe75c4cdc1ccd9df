"""The turn loop with a real state, real snapshots and a scripted controller: every stage of wire/training.py, and the ways back."""

import msgspec
import pytest
import torch

from aimaster.wire.checkpoint import FetchReply, Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.training import (
    Aborted,
    Begin,
    Committed,
    Compute,
    Computed,
    Fresh,
    Held,
    Hold,
    Host,
    Hosting,
    Leave,
    Ready,
    Reduce,
    Reduced,
    Rehearse,
    Rehearsed,
    Restore,
    Sample,
    Share,
    Stop,
    Take,
    Taken,
    Wait,
)
from easyckpt import Checkpointer, read_weights, shm
from rl_runtime.algo.loss import LossSettings
from rl_runtime.config import Evaluation, OptimizerChoice, PolicySettings, RewardChoice, WarmStart
from rl_runtime.drills import Drills
from rl_runtime.elastic import ElasticGroup
from rl_runtime.member import Identity
from rl_runtime.models.load import ModelChoice
from rl_runtime.models.tiny import Shape
from rl_runtime.policy.loop import PolicyLoop
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
    warm_start=WarmStart(steps=3, rows=8, learning_rate=1e-3, seed=0),
    evaluation=Evaluation(prompts=6, seed=1, temperature=1.0, most_tokens=3, slots=4),
    reward=RewardChoice(weights={"exact": 1.0}, workers=1, deadline_seconds=1.0),
    snapshot_slots=2,
    save_every=1,
    group_timeout_seconds=5.0,
    lease_factor=4.0,
    fence_leases=10.0,
)
V = Version


class Script:
    """A controller that answers a member's turns by a list of words, and keeps the turns."""

    def __init__(self, *words):
        self.words = list(words)
        self.turns = []

    def turn(self, turn):
        self.turns.append(turn)
        return self.words.pop(0)

    @property
    def stages(self):
        return [turn.stage for turn in self.turns]


class NoAgent:
    def __init__(self):
        self.asked = []

    def fetch(self, request):
        self.asked.append(request)
        return FetchReply(places=(), seconds=0.0)


@pytest.fixture
def member(tmp_path):
    """Make members that share one node's memory; each runs a script and returns it."""
    checkpointers = []

    def make(*words, name="policy-0", drop=None):
        for one in checkpointers:
            one.close()
        checkpointer = Checkpointer(
            tmp_path / "storage",
            member=name,
            role="policy",
            folder=tmp_path / "segments",
            flush_every=None,
            on_sealed=lambda _path, _header: None,
        )
        checkpointers.append(checkpointer)
        state = MemberState(
            SETTINGS, checkpointer, NoAgent(), rows=ROWS, heldout=ROWS, steps=3, device="cpu", beat=lambda _phase: None
        )
        script = Script(*words, Stop(reason="finished"))
        identity = Identity(member=MemberId(name), incarnation=Incarnation(0), node="node-0")
        group = ElasticGroup(host="127.0.0.1", beat=lambda: None)
        loop = PolicyLoop(
            identity, script, state, group, Drills((), member=name, incarnation=0), beat=lambda _phase: None
        )
        assert loop.run() == "finished"
        checkpointer.wait(10)
        script.state, script.loop, script.checkpointer = state, loop, checkpointer
        return script

    yield make
    for one in checkpointers:
        one.close()


def share(number):
    samples = tuple(
        Sample(
            prompt_id=number,
            index=index,
            prompt_tokens=(1, 4 + index, 9),
            tokens=(5 + number, 2),
            logprobs=(-2.0, -1.0),
            versions=(V(0, 0),) * 2,
            reward=float(index),
            advantage=1.0 if index else -1.0,
        )
        for index in range(2)
    )
    return Share(number=number, samples=samples)


def compute(step=1, *numbers, epoch=1, digest="d", lineage=0):
    return Compute(
        step=step,
        lineage=lineage,
        epoch=epoch,
        batch_digest=digest,
        shares=tuple(map(share, numbers)),
        loss_tokens=16,
        sequences=8,
        learning_rate=1e-2,
    )


def reduce(step=1, epoch=1):
    return Reduce(step=step, epoch=epoch, rank=0, world=1, address="", timeout_seconds=5.0)


def committed(step=1, epoch=1, chain="c", flush=False, lineage=0):
    return Committed(version=V(lineage, step), epoch=epoch, chain=f"{chain}{step}", flush=flush)


def one_step(step, *shares):
    return compute(step, *shares), reduce(step), committed(step)


def weights_of(script):
    return {name: view.clone() for name, view in script.state.trainer.weights().items()}


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_life_from_begin_to_stop(member):
    """Fresh, begin, two steps, a hold, the last step: each stage is told, each committed state is sealed with its chain."""
    script = member(
        Wait(reason="others"),
        Begin(lineage=0),
        *one_step(1, 0, 1),
        *one_step(2, 0),
        Hold(version=V(0, 2)),
        Wait(reason="join"),
        *one_step(3, 1),
    )
    kinds = [type(stage) for stage in script.stages]
    assert kinds == [
        Fresh,
        Fresh,
        Ready,
        Computed,
        Reduced,
        Ready,
        Computed,
        Reduced,
        Ready,
        Held,
        Held,
        Computed,
        Reduced,
        Ready,
    ]
    assert [turn.version for turn in script.turns if isinstance(turn.stage, Ready)] == [
        V(0, 0),
        V(0, 1),
        V(0, 2),
        V(0, 3),
    ]
    assert script.stages[3].shares == (0, 1)
    assert script.turns[-1].chain == "c3"
    newest = script.checkpointer.newest
    assert (newest.lineage, newest.step, newest.chain) == (0, 3, "c3")
    assert script.stages[9].state_digest


def test_held_out_reward_is_told_before_and_after(member):
    """After the warm start and after the last step; it comes with the snapshot to whoever restores it."""
    script = member(Begin(lineage=0), *one_step(1, 0), *one_step(2, 0), *one_step(3, 0))
    assert "eval_before" in script.turns[1].figures
    assert "eval_after" not in script.turns[-2].figures
    assert "eval_after" in script.turns[-1].figures
    again = member(Restore(version=V(0, 2), lineage=0), name="policy-1")
    assert again.turns[-1].figures["eval_before"] == script.turns[1].figures["eval_before"]


def test_nothing_is_applied_before_committed(member):
    """With a vote cast and no commit, the weights are those of the step before."""
    before = weights_of(member(Begin(lineage=0)))
    script = member(Begin(lineage=0), compute(1, 0), reduce(), Wait(reason="votes"), Wait(reason="votes"))
    assert equal(weights_of(script), before)
    assert [type(stage) for stage in script.stages[-2:]] == [Reduced, Reduced]


def test_extra_shares_are_added_to_those_in_hand(member):
    """A dead peer's share is computed on top, in the next epoch; the sum is that of all shares at once."""
    script = member(
        Begin(lineage=0), compute(1, 0), reduce(), compute(1, 1, epoch=2), reduce(epoch=2), committed(epoch=2)
    )
    whole = member(Begin(lineage=0), compute(1, 0, 1), reduce(), committed())
    votes = [stage for stage in script.stages if isinstance(stage, Reduced)]
    assert [vote.shares for vote in votes] == [(0,), (0, 1)]
    assert [vote.epoch for vote in votes] == [1, 2]
    for name, weight in weights_of(whole).items():
        assert torch.allclose(weight, weights_of(script)[name], atol=1e-6)


def test_a_new_epoch_without_new_shares_keeps_the_gradient(member):
    """Compute with no shares: what is in hand is told again."""
    script = member(Begin(lineage=0), compute(1, 0), reduce(), compute(1, epoch=2), reduce(epoch=2), committed(epoch=2))
    votes = [stage for stage in script.stages if isinstance(stage, Reduced)]
    assert votes[0].digest == votes[1].digest


def test_another_batch_of_the_same_step_drops_what_is_in_hand(member):
    """Gradients belong to a step and a batch digest."""
    script = member(Begin(lineage=0), compute(1, 0, 1), compute(1, 1, digest="other"))
    assert [stage.shares for stage in script.stages if isinstance(stage, Computed)] == [(0, 1), (1,)]


def test_a_failed_reduction_keeps_the_gradient(member):
    """The store is not there: aborted, with the shares still in hand; the next epoch reduces them."""
    lost = msgspec.structs.replace(reduce(), world=2, rank=1, address="127.0.0.1:9")
    script = member(Begin(lineage=0), compute(1, 0), lost, compute(1, epoch=2), reduce(epoch=2), committed(epoch=2))
    aborted = [stage for stage in script.stages if isinstance(stage, Aborted)]
    assert [(one.shares, one.batch_digest, one.epoch) for one in aborted] == [((0,), "d", 1)]
    assert script.turns[-1].version == V(0, 1)


def test_the_first_rank_hosts_and_says_where(member):
    """Hosting tells an address; asked again by a restarted controller, the same one."""
    script = member(Begin(lineage=0), compute(1, 0), Host(epoch=1), Host(epoch=1))
    hosting = [stage for stage in script.stages if isinstance(stage, Hosting)]
    assert hosting[0] == hosting[1]
    assert hosting[0].address.startswith("127.0.0.1:")
    script.loop.close()


def test_a_repeated_reduce_gives_the_same_vote(member):
    """Votes are resent, never recomputed."""
    script = member(Begin(lineage=0), compute(1, 0), reduce(), reduce())
    votes = [stage for stage in script.stages if isinstance(stage, Reduced)]
    assert votes[0] is votes[1]


def test_a_commit_without_a_vote_is_not_applied(member):
    """A member that did not vote comes back fresh."""
    script = member(Begin(lineage=0), compute(1, 0), committed())
    assert isinstance(script.stages[-1], Fresh)
    assert script.turns[-1].version is None


def test_a_step_that_does_not_follow_is_refused(member):
    """Asked for step 5 after step 0, a member drops its state rather than guess."""
    script = member(Begin(lineage=0), compute(5, 0))
    assert isinstance(script.stages[-1], Fresh)


def test_a_restarted_member_restores_what_was_sealed(member):
    """Fresh tells its candidates; the restored state continues bit by bit as the first would have."""
    first = member(Begin(lineage=0), *one_step(1, 0), *one_step(2, 1))
    second = member(Restore(version=V(0, 1), lineage=0), *one_step(2, 1))
    assert {candidate.version for candidate in second.stages[0].candidates} == {V(0, 1), V(0, 2)}
    assert {candidate.chain for candidate in second.stages[0].candidates} == {"c1", "c2"}
    assert equal(weights_of(first), weights_of(second))


def test_a_restore_behind_the_head_goes_on_in_a_new_lineage(member):
    """The state of step 1 becomes (1, 1), and is sealed as such, so that rollouts can be offered it."""
    member(Begin(lineage=0), *one_step(1, 0), *one_step(2, 1))
    second = member(
        Restore(version=V(0, 1), lineage=1), Wait(reason="x"), Hold(version=V(1, 1)), compute(2, 0, lineage=1)
    )
    assert second.turns[1].version == V(1, 1)
    assert second.turns[-2].sealed == V(1, 1)
    assert isinstance(second.stages[-1], Computed)


def test_a_damaged_candidate_is_given_up(member, tmp_path):
    """A snapshot whose bytes are wrong cannot be restored: the member comes back fresh without it."""
    member(Begin(lineage=0), *one_step(1, 0))
    for path in [segment.path for segment in shm.scan(tmp_path / "segments")]:
        content = bytearray(path.read_bytes())
        content[-8:] = b"\xff" * 8
        path.write_bytes(content)
    second = member(Restore(version=V(0, 1), lineage=0), name="policy-1")
    assert isinstance(second.stages[1], Fresh)
    assert V(0, 1) not in {candidate.version for candidate in second.stages[1].candidates}


def test_a_joiner_rehearses_takes_and_computes(member):
    """It copies an older snapshot, waits, takes the state of the hold, and proves by its digest that it is the others'."""
    first = member(Begin(lineage=0), *one_step(1, 0), *one_step(2, 1), Hold(version=V(0, 2)))
    (held,) = [stage for stage in first.stages if isinstance(stage, Held)]
    take = Take(version=V(0, 2), lineage=0, state_digest=held.state_digest, deadline_seconds=2.0)
    second = member(Rehearse(version=V(0, 1)), Wait(reason="boundary"), take, *one_step(3, 0), name="policy-1")
    rehearsed, waited, taken = second.stages[1:4]
    assert isinstance(rehearsed, Rehearsed)
    assert rehearsed.seconds > 0.0
    assert second.turns[2].version is None
    assert waited == rehearsed
    assert taken == Taken(version=V(0, 2), state_digest=held.state_digest)
    assert second.turns[-1].version == V(0, 3)
    alone = member(Restore(version=V(0, 2), lineage=0), *one_step(3, 0))
    assert equal(weights_of(second), weights_of(alone))


def test_a_state_that_cannot_be_taken_is_said(member):
    """Nothing of that version to be had: the joiner stays rehearsed and is asked again."""
    member(Begin(lineage=0))
    take = Take(version=V(0, 9), lineage=0, state_digest="x", deadline_seconds=0.1)
    second = member(Rehearse(version=None), take, name="policy-1")
    assert [type(stage) for stage in second.stages] == [Fresh, Rehearsed, Rehearsed]


def test_leave_drops_everything(member):
    """Fenced: no version, no gradient, candidates shown."""
    script = member(Begin(lineage=0), Hold(version=V(0, 0)), compute(1, 0), Leave(reason="not in epoch 2"))
    assert isinstance(script.stages[-1], Fresh)
    assert script.turns[-1].version is None
    assert not script.state.trainer.gradient.any()
    assert script.stages[-1].candidates


def test_rollouts_find_the_weights_under_their_checkpoint_names(member, tmp_path):
    """A snapshot holds the model under `model/` as a checkpoint names it."""
    script = member(Begin(lineage=0), *one_step(1, 0))
    (newest,) = [one.path for one in shm.scan(tmp_path / "segments") if one.header.step == 1]
    _, weights = read_weights(newest, prefix="model/")
    assert equal(weights_of(script), weights)
    assert "model.layers.0.self_attn.q_proj.weight" in weights
