"""What a ledger tells of each step of the live lineage, under kills, rewinds and compaction."""

import pytest

from aimaster.wire.checkpoint import Version
from rl_runtime.controller.account import Account, apply
from rl_runtime.controller.history import read_history
from rl_runtime.records import Committed, Dealt
from tests.fakes.policy_arena import Arena, small_settings


def ended(arena):
    assert arena.run_fairly()
    return arena


def disturbed_run(*names):
    """A run whose nodes with these members were lost after a batch was dealt, and that went on to its end; and that step."""
    arena = Arena(small_settings(), seed=4)
    arena.run_until(lambda: arena.account.head.step == 3 and len(arena.account.epoch.members) == 2)
    arena.run_until(lambda: arena.account.open_deal is not None)
    step = arena.account.open_deal.step
    for name in names:
        arena.lose_node(name)
    return ended(arena), step


def test_an_undisturbed_step_has_one_epoch():
    """All steps are there, in order, each with the batch that was dealt, digest and all."""
    arena = ended(Arena(small_settings()))
    history = read_history(iter(arena.records))
    assert list(history.steps) == [1, 2, 3, 4, 5, 6]
    for number, step in history.steps.items():
        assert step.version == Version(0, number)
        assert not step.was_disturbed
        batch = step.batch(arena.settings)
        assert batch.dealt == step.dealt
        assert len(batch.samples) == arena.settings.batch_samples
        assert batch.dealt.batch_digest == step.committed.batch_digest


def test_a_member_that_died_within_a_step_shows():
    """The step has the epoch of its deal and the one that committed it, without the dead member."""
    arena, killed_at = disturbed_run("policy-1")
    history = read_history(iter(arena.records))
    (disturbed,) = [step for step in history.steps.values() if step.was_disturbed]
    assert disturbed.version == Version(0, killed_at)
    assert [epoch.members for epoch in disturbed.epochs] == [("policy-0", "policy-1"), ("policy-0",)]
    assert disturbed.committed.epoch == disturbed.epochs[-1].number


def test_only_the_live_lineage_is_told():
    """What a rewind made void is left out; its batches come again under the new lineage, the same ones."""
    arena, _ = disturbed_run("policy-0", "policy-1")
    history = read_history(iter(arena.records))
    (rewind,) = history.account.rewinds
    assert list(history.steps) == [1, 2, 3, 4, 5, 6]
    assert all(step.version.lineage == int(number > rewind.step) for number, step in history.steps.items())
    void = [one for one in arena.records if isinstance(one, Committed) and one.lineage == 0 and one.step > rewind.step]
    assert all(history.steps[one.step].committed.batch_digest == one.batch_digest for one in void)


def test_snapshots_of_a_void_path_are_known():
    """A snapshot of a dead lineage, or with another chain, is not of the run's past."""
    arena, _ = disturbed_run("policy-0", "policy-1")
    history = read_history(iter(arena.records))
    (rewind,) = history.account.rewinds
    chain = history.steps[6].committed.chain
    assert history.is_on_path(Version(1, 6), chain)
    assert not history.is_on_path(Version(1, 6), "another")
    assert not history.is_on_path(Version(0, 6), chain)
    assert history.is_on_path(
        Version(0, rewind.step), history.steps[rewind.step].committed.chain if rewind.step else ""
    )


@pytest.mark.parametrize("part", range(8))
def test_a_compacted_ledger_tells_what_it_still_has(part):
    """Begun at an account of any moment, the later steps are the same; those before it lack their epochs."""
    arena, _ = disturbed_run("policy-1")
    whole = read_history(iter(arena.records))
    cut = len(arena.records) * part // 8
    account = Account()
    for record in arena.records[:cut]:
        apply(account, record)
    history = read_history(iter([account.copy(), *arena.records[cut:]]))
    assert set(history.steps) <= set(whole.steps)
    since = {one.step for one in arena.records[cut:] if isinstance(one, Dealt)}
    assert all(history.steps[step] == whole.steps[step] for step in since)
    for number in set(history.steps) - since:
        assert history.steps[number].batch(arena.settings) == whole.steps[number].batch(arena.settings)
