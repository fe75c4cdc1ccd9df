"""From groups to batches: order of prompts, shares, advantages, filter, control, digests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.topology import Epoch
from rl_runtime.controller.account import Account, apply
from rl_runtime.controller.batches import FILTER_BATCHES, batch_digest, make_batch, next_prompts, to_filter
from rl_runtime.controller.prompts import PromptOrder, sampling_seed
from rl_runtime.controller.settings import learning_rate
from rl_runtime.controller.shares import assign, cut
from rl_runtime.controller.trouble import all_but_one, minority, named_by_evidence
from rl_runtime.records import Admitted, Began, EpochOpened, Leased, Payload, VersionRun
from tests.fakes.policy_arena import small_settings

P0, P1, P2 = (MemberId(f"policy-{number}") for number in range(3))

# -- order of prompts ---------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 300), seed=st.integers(0, 99), passes=st.integers(0, 3))
def test_each_pass_shows_each_row_once(rows, seed, passes):
    """A pass is a permutation of the data set, and a function of seed and position alone."""
    order = PromptOrder(rows=rows, seed=seed, shuffle=True)
    shown = [order.row(passes * rows + place) for place in range(rows)]
    assert sorted(shown) == list(range(rows))
    assert shown[rows // 2] == PromptOrder(rows=rows, seed=seed, shuffle=True).row(passes * rows + rows // 2)


def test_passes_and_seeds_differ_and_without_shuffling_rows_come_in_order():
    """The second pass is another permutation than the first, another seed gives another one, shuffle = false none."""

    def shown(seed, turn, shuffle=True):
        order = PromptOrder(rows=100, seed=seed, shuffle=shuffle)
        return [order.row(turn * 100 + place) for place in range(100)]

    assert shown(0, 0) != shown(0, 1)
    assert shown(0, 0) != shown(1, 0)
    assert shown(0, 3, shuffle=False) == list(range(100))


def test_sampling_seeds_belong_to_the_sample():
    """Whoever generates a sample, and however often, does so with its seed; it fits a signed 64-bit integer."""
    seeds = {sampling_seed(42, prompt, index) for prompt in range(50) for index in range(8)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)


# -- shares -------------------------------------------------------------------------------------------------------------


@given(
    tokens=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    per_share=st.integers(1, 20),
    members=st.integers(1, 5),
)
def test_shares_hold_each_sample_once(tokens, per_share, members):
    """No share is empty or too large, and there is one for each member where the samples allow it."""
    shares = cut(tokens, per_share=per_share, at_least=members)
    assert sorted(position for share in shares for position in share) == list(range(len(tokens)))
    assert all(1 <= len(share) <= per_share or len(shares) == members for share in shares)
    assert len(shares) >= min(members, len(tokens))


@given(tokens=st.lists(st.integers(1, 1000), min_size=4, max_size=40), data=st.data())
def test_who_leaves_gives_and_who_stays_keeps(tokens, data):
    """After any member left, every share has one member again, and nobody lost one."""
    members = [P0, P1, P2]
    before = assign(tokens, members, {})
    assert sorted(share for shares in before.values() for share in shares) == list(range(len(tokens)))
    gone = data.draw(st.sampled_from(members))
    stay = [member for member in members if member != gone]
    after = assign(tokens, stay, {member: before[member] for member in stay})
    assert sorted(share for shares in after.values() for share in shares) == list(range(len(tokens)))
    assert all(set(before[member]) <= set(after[member]) for member in stay)


def test_work_is_balanced_by_tokens():
    """One long share weighs as much as three short ones."""
    assert assign([30, 10, 10, 10], [P0, P1], {}) == {P0: (0,), P1: (1, 2, 3)}
    assert assign([5, 5], [], {}) == {}


# -- batches ------------------------------------------------------------------------------------------------------------


def account_with(rewards, n_generation=2, metrics=None):
    """An account in which groups with these rewards wait."""
    account = Account()
    apply(
        account,
        Began(rows=9, rows_digest="", rules="", seed=0, shuffle=True, n_generation=n_generation, batch_samples=4),
    )
    epoch = Epoch(number=1, members=(P0,), incarnations={P0: Incarnation(0)})
    apply(account, EpochOpened(epoch=epoch, at=0.0))
    groups = [rewards[start : start + n_generation] for start in range(0, len(rewards), n_generation)]
    apply(account, Leased(first=0, last=len(groups) - 1))
    import msgspec

    for prompt, group in enumerate(groups):
        for index, reward in enumerate(group):
            payload = Payload(
                (1, 2), (prompt, index, 5), (-0.1, -0.2, -0.3), (VersionRun(0, 0, 2), VersionRun(0, 1, 1))
            )
            apply(
                account,
                Admitted(
                    prompt_id=prompt, index=index, reward=reward, rewards=(metrics or {}), tokens=3, prompt_length=2,
                    oldest_step=0, member=P0, payload=msgspec.msgpack.encode(payload),
                ),
            )  # fmt: skip
    return account


def test_a_batch_is_whole_groups_in_order_of_completion():
    """Samples carry tokens, log-probs and the version of each token, as they were admitted."""
    account, settings = account_with([0.0, 1.0, 1.0, 0.0, 1.0, 1.0]), small_settings()
    prompts = next_prompts(account, settings)
    assert prompts == (0, 1)
    batch = make_batch(account, settings, prompts, now=1.0)
    assert [(sample.prompt_id, sample.index) for sample in batch.samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert batch.samples[2].tokens == (1, 0, 5)
    assert [version.step for version in batch.samples[0].versions] == [0, 0, 1]
    assert batch.loss_tokens == 12
    assert batch.reward_mean == 0.5
    assert batch.staleness_mean == pytest.approx(-1 / 3)
    assert batch.dealt.batch_digest == batch_digest(batch.samples)


def test_too_few_groups_are_no_batch():
    """Nothing is dealt before the whole batch is there, whatever the membership."""
    assert next_prompts(account_with([0.0, 1.0]), small_settings()) is None


def test_advantages_are_the_groups_own():
    """Mean zero in each group, by the deviation unless `unbiased`, clamped; a group without spread has none."""
    account = account_with([0.0, 1.0, 1.0, 1.0])
    batch = make_batch(account, small_settings(), (0, 1), now=0.0)
    assert [round(sample.advantage, 2) for sample in batch.samples] == [-1.0, 1.0, 0.0, 0.0]
    plain = make_batch(account, small_settings(unbiased_advantage=True), (0, 1), now=0.0)
    assert [sample.advantage for sample in plain.samples] == [-0.5, 0.5, 0.0, 0.0]
    low = make_batch(account, small_settings(advantage_low=-0.2), (0, 1), now=0.0)
    assert low.samples[0].advantage == -0.2


def test_beginnings_that_contradict_each_other_are_not_trained_nor_counted():
    """Both completions of the first group begin with token 0 and earned differently; the second group's earned alike."""
    account = account_with([0.0, 1.0, 1.0, 1.0])
    batch = make_batch(account, small_settings(min_prefix_tokens=1), (0, 1), now=0.0)
    assert [sample.untrained for sample in batch.samples] == [1, 1, 0, 0]
    assert batch.loss_tokens == 10
    longer = make_batch(account, small_settings(min_prefix_tokens=2), (0, 1), now=0.0)
    assert [sample.untrained for sample in longer.samples] == [0, 0, 0, 0]
    assert make_batch(account, small_settings(), (0, 1), now=0.0).loss_tokens == 12


def test_the_control_deals_the_same_rewards_to_other_samples():
    """shuffle_rewards permutes them over the whole batch, the same way at each replay, another way at each step."""
    rewards = [float(number) for number in range(8)]
    account, settings = account_with(rewards), small_settings(batch_samples=8, shuffle_rewards=True)
    first = make_batch(account, settings, (0, 1, 2, 3), now=0.0)
    assert first.dealt.batch_digest == make_batch(account, settings, (0, 1, 2, 3), now=9.0).dealt.batch_digest
    assert [sample.reward for sample in first.samples] == rewards
    true = make_batch(account, small_settings(batch_samples=8), (0, 1, 2, 3), now=0.0)
    assert [s.advantage for s in first.samples] != [s.advantage for s in true.samples]


def test_the_length_penalty_counts_before_the_advantages():
    """An answer that runs into the limit loses up to the factor; the reward shown stays the true one."""
    account = account_with([1.0, 1.0, 1.0, 1.0])
    settings = small_settings(overlong_buffer=2, overlong_factor=1.0, max_response_length=3)
    batch = make_batch(account, settings, (0, 1), now=0.0)
    assert [sample.reward for sample in batch.samples] == [1.0] * 4
    assert [sample.advantage for sample in batch.samples] == [0.0] * 4


def test_groups_without_spread_are_filtered_where_that_is_asked_for():
    """DAPO: by the sum of rewards, or by the metrics named; never otherwise."""
    account = account_with([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert list(to_filter(account, small_settings())) == []
    assert [record.prompt_id for record in to_filter(account, small_settings(filter_groups=True))] == [0, 2]
    by_metric = small_settings(filter_groups=True, filter_metrics=("exact",))
    assert [record.prompt_id for record in to_filter(account, by_metric)] == [0, 1, 2]


def test_a_perfect_policy_is_not_filtered_for_ever():
    """After ten batches' worth of filtered groups in a row the next ones are dealt as they are: the run ends."""
    settings = small_settings(filter_groups=True)
    groups = FILTER_BATCHES * settings.groups + 3
    account = account_with([1.0] * 2 * groups)
    for record in list(to_filter(account, settings)):
        apply(account, record)
    assert len(account.waiting) == 3
    assert list(to_filter(account, settings)) == []
    assert next_prompts(account, settings) is not None


# -- small decisions ----------------------------------------------------------------------------------------------------


def test_the_learning_rate_is_a_function_of_the_step():
    """Ramp, plateau, decay over the last steps to the floor; every step has one, the last included."""
    settings = small_settings(
        steps=10, learning_rate=1.0, warmup_steps=4, decay_steps=4, decay_type="linear", min_rate_factor=0.1
    )
    rates = [learning_rate(settings, step) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:6] == [1.0, 1.0]
    assert rates[9] == pytest.approx(0.1)
    assert rates == sorted(rates[:4]) + sorted(rates[4:], reverse=True)
    for decay in ("cosine", "sqrt"):
        assert learning_rate(small_settings(steps=10, decay_steps=10, decay_type=decay, learning_rate=1.0), 10) < 1e-9


@pytest.mark.parametrize(
    ("silent", "reasons", "accused"),
    [
        ([P1], {P0: "timed out", P2: "timed out"}, P1),
        ([], {P0: "policy-1 closed the connection", P2: "policy-1 closed the connection"}, P1),
        ([], {P0: "policy-2 is gone", P2: "policy-2 is gone"}, P2),
        ([], {P0: "policy-1 gone", P1: "policy-0 gone"}, P2),
        ([], {P0: "timed out", P1: "timed out", P2: "timed out"}, P2),
        ([P0, P1, P2], {}, P2),
        ([], {P0: "policy-10 gone", P1: "policy-10 gone"}, P2),
    ],
)
def test_evidence_names_the_member_that_is_left_out(silent, reasons, accused):
    """Silence first, then what the others say of whom; without any, the one that came last."""
    assert named_by_evidence([P0, P1, P2], silent, reasons) == accused


def test_minorities():
    """Without a majority everybody is in the minority, and one may be spared."""
    assert minority({P0: "a", P1: "a", P2: "b"}) == (P2,)
    assert minority({P0: "a", P1: "b"}) == (P0, P1)
    assert all_but_one((P0, P1), [P0, P1]) == (P1,)
    assert all_but_one((P2,), [P0, P1, P2]) == (P2,)
