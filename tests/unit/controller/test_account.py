"""What the ledger's records add up to."""

import random

import msgspec
import pytest

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.topology import Epoch
from rl_runtime.controller.account import GENESIS, Account, apply, next_chain
from rl_runtime.controller.errors import LedgerBrokenError
from rl_runtime.records import (
    Admitted,
    Began,
    Committed,
    Dealt,
    EpochOpened,
    Filtered,
    Flushed,
    Leased,
    Rewound,
)
from tests.fakes.policy_arena import Arena, small_settings

P0, P1 = MemberId("policy-0"), MemberId("policy-1")


def began(n_generation=2):
    return Began(rows=9, rows_digest="", rules="", seed=0, shuffle=True, n_generation=n_generation, batch_samples=2)


def admitted(prompt, index, reward=1.0):
    return Admitted(
        prompt_id=prompt, index=index, reward=reward, tokens=3, prompt_length=2, oldest_step=0, member=P0, payload=b""
    )


def epoch(number, *members):
    incarnations = dict.fromkeys(members, Incarnation(0))
    return EpochOpened(epoch=Epoch(number=number, members=members, incarnations=incarnations), at=0.0)


class Story:
    """An account and the shortest way to tell it something."""

    def __init__(self):
        self.account = Account()
        self.tell(began(), epoch(1, P0, P1))

    def tell(self, *records):
        for record in records:
            apply(self.account, record)

    def fill(self, prompt):
        if prompt >= self.account.cursor:
            self.tell(Leased(first=self.account.cursor, last=prompt))
        self.tell(admitted(prompt, 0), admitted(prompt, 1))

    def deal(self, prompt, digest=None):
        head = self.account.head
        self.tell(
            Dealt(
                step=head.step + 1, lineage=head.lineage, batch_digest=digest or f"batch-{prompt}", prompts=(prompt,),
                shares=((0,), (1,)), share_tokens=(5, 5), at=0.0,
            )
        )  # fmt: skip

    def commit(self):
        deal = self.account.open_deal
        chain = next_chain(self.account.chain, deal.step, deal.batch_digest)
        self.tell(
            Committed(
                lineage=deal.lineage, step=deal.step, epoch=self.account.epoch.number, gradient_digest="g",
                batch_digest=deal.batch_digest, chain=chain, flusher=None, at=0.0,
            )
        )  # fmt: skip

    def step(self, prompt):
        self.fill(prompt)
        self.deal(prompt)
        self.commit()


def test_a_prompt_is_in_one_place_at_any_time():
    """Leased, waiting, dealt, past: each prompt is in exactly one of them."""
    story = Story()
    story.tell(Leased(first=0, last=2))
    assert list(story.account.open) == [0, 1, 2]
    story.tell(admitted(1, 0))
    assert story.account.samples_waiting == 1
    story.tell(admitted(1, 1))
    assert (list(story.account.open), list(story.account.waiting)) == ([0, 2], [1])
    story.deal(1)
    assert (list(story.account.waiting), story.account.open_deal.prompts) == ([], (1,))
    story.commit()
    assert (story.account.head, story.account.open_deal) == (Version(0, 1), None)


def test_a_key_is_held_from_its_admission_for_ever():
    """Also when its payload was let go long ago."""
    story = Story()
    for prompt in range(4):
        assert not story.account.holds(prompt, 0)
        story.step(prompt)
    story.tell(Flushed(version=Version(0, 2)), Flushed(version=Version(0, 3)))
    assert story.account.floor == 2
    assert 0 not in story.account.groups
    assert all(story.account.holds(prompt, index) for prompt in range(4) for index in range(2))
    assert not story.account.holds(4, 0)


def test_batches_are_kept_down_to_the_second_newest_flush():
    """One unreadable flush must still replay: what the newest flush covers is kept until the next."""
    story = Story()
    for prompt in range(6):
        story.step(prompt)
    story.tell(Flushed(version=Version(0, 5)))
    assert sorted(story.account.batches) == [1, 2, 3, 4, 5, 6]
    story.tell(Flushed(version=Version(0, 3)))
    assert sorted(story.account.batches) == [4, 5, 6]
    assert [past.step for past in story.account.past] == [1, 2, 3]


def test_a_rewind_makes_the_later_steps_due_again_in_order_and_nothing_else():
    """S+1 to C are dealt again from the same batches, the batch that was open too; another batch is refused."""
    story = Story()
    for prompt in range(4):
        story.step(prompt)
    story.fill(4)
    story.deal(4)
    story.tell(Rewound(step=2, lineage=1, cause="", at=0.0))
    assert story.account.head == Version(1, 2)
    assert story.account.next_new_step == 6
    story.fill(5)
    with pytest.raises(LedgerBrokenError, match="due again"):
        story.deal(5)
    for prompt in (2, 3, 4):
        assert story.account.due_again.prompts == (prompt,)
        story.deal(prompt)
        story.commit()
    story.deal(5)
    assert list(story.account.batches) == [1, 2, 3, 4, 5, 6]


def test_after_a_rewind_later_steps_of_older_lineages_are_void():
    """rewind(S, L): nothing above S of a lineage below L is a candidate, whatever its chain."""
    story = Story()
    for prompt in range(4):
        story.step(prompt)
    chain = dict(story.account.chains)
    story.tell(Rewound(step=2, lineage=1, cause="", at=0.0))
    for prompt in (2, 3):
        story.deal(prompt)
        story.commit()
    live = story.account.is_live
    assert live(Version(0, 2), chain[2])
    assert not live(Version(0, 3), chain[3])
    assert live(Version(1, 3), chain[3])
    assert not live(Version(1, 5))
    assert not live(Version(1, 3), "another chain")
    assert not live(Version(2, 1))


def test_the_chain_is_the_same_after_a_replay():
    """The lineage is no part of it, so a snapshot proves which batches it has seen, however often they were computed."""
    story = Story()
    for prompt in range(3):
        story.step(prompt)
    chain = story.account.chain
    story.tell(Rewound(step=0, lineage=1, cause="", at=0.0))
    assert story.account.chain == GENESIS
    for prompt in range(3):
        story.deal(prompt)
        story.commit()
    assert story.account.chain == chain


def test_survivors_keep_their_shares_and_take_the_dead_ones():
    """An epoch within a step moves only the shares of those that left; a new start of a member has none."""
    story = Story()
    story.fill(0)
    story.deal(0)
    assert story.account.assignment == {P0: (0,), P1: (1,)}
    story.tell(epoch(2, P0))
    assert story.account.assignment == {P0: (0, 1)}
    again = Epoch(number=3, members=(P0, P1), incarnations={P0: Incarnation(1), P1: Incarnation(0)})
    story.tell(EpochOpened(epoch=again, at=0.0))
    assert story.account.assignment == {P0: (0,), P1: (1,)}


@pytest.mark.parametrize(
    "record",
    [
        Leased(first=5, last=6),
        admitted(7, 0),
        admitted(0, 9),
        Filtered(prompt_id=0),
        epoch(7, P0),
        Rewound(step=3, lineage=1, cause="", at=0.0),
        Rewound(step=0, lineage=0, cause="", at=0.0),
        Flushed(version=Version(0, 3)),
        Dealt(step=2, lineage=0, batch_digest="", prompts=(0,), shares=(), share_tokens=(), at=0.0),
        Dealt(step=1, lineage=0, batch_digest="", prompts=(0,), shares=(), share_tokens=(), at=0.0),
        Committed(
            lineage=0, step=1, epoch=1, gradient_digest="", batch_digest="", chain="", flusher=None, at=0.0
        ),
    ],
    ids=lambda record: type(record).__name__,
)  # fmt: skip
def test_a_record_that_cannot_follow_is_refused_and_changes_nothing(record):
    """A defect is never repaired in silence."""
    story = Story()
    story.tell(Leased(first=0, last=0))
    before = msgspec.msgpack.encode(story.account)
    with pytest.raises(LedgerBrokenError):
        apply(story.account, record)
    assert msgspec.msgpack.encode(story.account) == before


def test_a_commit_needs_the_current_epoch_the_dealt_batch_and_the_chain():
    """Each of them is checked where the record becomes true, not only where it is made."""
    story = Story()
    story.fill(0)
    story.deal(0)
    good = Committed(
        lineage=0, step=1, epoch=1, gradient_digest="g", batch_digest="batch-0", chain=next_chain(GENESIS, 1, "batch-0"),
        flusher=None, at=0.0,
    )  # fmt: skip
    for wrong in ({"epoch": 2}, {"batch_digest": "other"}, {"chain": "other"}, {"lineage": 1}, {"step": 2}):
        with pytest.raises(LedgerBrokenError):
            apply(story.account, msgspec.structs.replace(good, **wrong))
    apply(story.account, good)


@pytest.mark.parametrize("seed", range(6))
def test_replay_equals_the_live_state(seed):
    """From any prefix of a disturbed run's records, through an encoded copy at any place, the same account comes out."""
    arena = Arena(small_settings(filter_groups=bool(seed % 2)), members=2, seed=seed)
    dice = random.Random(seed)
    for _ in range(40):
        arena.round(restarts=dice.random() < 0.5)
        if dice.random() < 0.1:
            arena.kill(dice.choice([P0, P1]))
        if dice.random() < 0.05:
            arena.boot()
    replayed = Account()
    for record in arena.records:
        apply(replayed, msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=type(record)))
        if dice.random() < 0.1:
            replayed = replayed.copy()
    assert replayed == arena.account
    assert msgspec.msgpack.encode(replayed) == msgspec.msgpack.encode(arena.account)
