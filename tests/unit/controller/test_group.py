"""The policy members' state machine, one promise at a time."""

import msgspec
import pytest

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.topology import EpochProposal
from aimaster.wire.training import (
    Aborted,
    Begin,
    Candidate,
    Committed,
    Compute,
    Computed,
    Fresh,
    Held,
    Hold,
    Leave,
    Ready,
    Reduce,
    Reduced,
    Rehearse,
    Rehearsed,
    Restore,
    Stop,
    Take,
    Taken,
    Wait,
)
from rl_runtime.controller.errors import LedgerLostError, StateLostError
from rl_runtime.controller.waiting import waiting_for
from rl_runtime.records import Committed as CommittedRecord
from rl_runtime.records import Dealt, EpochOpened, Rewound
from tests.fakes.policy_arena import Arena, Memory, small_settings

P0, P1, P2 = (MemberId(f"policy-{number}") for number in range(3))


def arena_at(step, *, members=2, **changes):
    """A run whose members are all in and have committed `step`."""
    arena = Arena(small_settings(steps=30, **changes), members=members)
    arena.run_until(lambda: len(arena.account.epoch.members) == members and arena.account.head.step >= step)
    return arena


def arena_computing(*, members=2, **changes):
    """A run in which a batch is dealt and everybody is being told to compute."""
    arena = arena_at(1, members=members, **changes)
    arena.run_until(lambda: arena.account.open_deal is None)
    arena.run_until(lambda: arena.account.open_deal is not None)
    return arena


def tell(arena, name):
    """Return what the member would be told now, without obeying."""
    turn = arena.members[name].turn()
    arena.group.hear(turn, arena.now)
    return arena.group.word(turn, arena.now)


def settle(arena, name):
    """Let one member go on until it waits."""
    for _ in range(10):
        arena.ask(name)
        if arena.members[name].busy is None:
            return
        if isinstance(arena.members[name].busy, Reduce):
            return
        arena.work(name)


def both_reduce(arena):
    """Let all members compute and come into the reduction."""
    for _ in range(5):
        for name in arena.account.epoch.members:
            settle(arena, name)
    assert all(isinstance(arena.members[name].busy, Reduce) for name in arena.account.epoch.members)


# -- beginning ----------------------------------------------------------------------------------------------------------


def test_the_first_fresh_member_of_a_new_run_begins():
    """A new run's first member initialises the model; the next one rehearses."""
    arena = Arena(small_settings())
    assert tell(arena, P0) == Begin(lineage=0)
    assert tell(arena, P1) == Rehearse(version=None)
    assert tell(arena, P0) == Begin(lineage=0)


def test_a_new_run_waits_for_its_members_but_not_for_ever():
    """With one of two members there, nothing is dealt for half a minute, and then it is."""
    arena = Arena(small_settings())
    arena.kill(P1)
    arena.notify()
    arena.run_until(lambda: len(arena.account.waiting) >= 2, restarts=False)
    began = arena.now
    arena.run_until(lambda: arena.account.open_deal is not None, restarts=False)
    opened = next(record.at for record in arena.records if isinstance(record, EpochOpened))
    assert arena.now - opened > arena.settings.start_patience_seconds - 0.1
    assert arena.now - began < arena.settings.start_patience_seconds + 2


def test_a_resumed_run_waits_for_nobody():
    """Once something was dealt, one member is enough to go on."""
    arena = arena_at(2)
    arena.kill(P1)
    head = arena.account.head.step
    arena.run_until(lambda: arena.account.head.step > head + 1, restarts=False)


# -- a step -------------------------------------------------------------------------------------------------------------


def test_the_same_question_has_the_same_answer():
    """A turn may be resent any number of times, to a restarted controller too."""
    arena = arena_computing()
    first = tell(arena, P0)
    assert tell(arena, P0) == first
    arena.fsync()
    arena.boot()
    again = tell(arena, P0)
    assert isinstance(first, Compute)
    assert again == first


def test_all_shares_are_dealt_and_balanced_by_tokens():
    """Every share has one member, and the members' tokens differ by at most one share's."""
    arena = arena_computing()
    deal = arena.account.open_deal
    assigned = [share for shares in arena.account.assignment.values() for share in shares]
    assert sorted(assigned) == list(range(len(deal.shares)))
    loads = [sum(deal.share_tokens[share] for share in shares) for shares in arena.account.assignment.values()]
    assert max(loads) - min(loads) <= max(deal.share_tokens)


def test_nobody_reduces_before_everybody_has_computed():
    """A member with its shares in hand waits for the others; a hang in compute breaks a lease, not a collective."""
    arena = arena_computing()
    first, second = arena.account.epoch.members
    settle(arena, first)
    arena.ask(first)
    word = tell(arena, first)
    assert isinstance(word, Wait)
    assert second in word.reason
    assert waiting_for(arena.group).startswith(second)


def test_a_vote_is_answered_from_the_ledger():
    """The vote for a committed step is answered `committed`, twice, after a restart, and even to one that was left out since."""
    arena = arena_computing()
    both_reduce(arena)
    step = arena.account.open_deal.step
    arena.collective(arena.account.epoch.number)
    for name in (P0, P1):
        arena.ask(name, lose_reply=True)
    assert arena.account.head.step == step
    for _ in range(2):
        assert isinstance(tell(arena, P0), Committed)
        arena.fsync()
        arena.boot()
    assert arena.propose(P1, arena.account.epoch.number)
    word = tell(arena, P1)
    assert isinstance(word, Committed)
    arena.members[P1].obey(word)
    arena.members[P1].work()
    assert isinstance(tell(arena, P1), Leave)


def test_no_commit_without_the_votes_of_all():
    """One vote of two commits nothing, however often it is sent."""
    arena = arena_computing()
    both_reduce(arena)
    step = arena.account.head.step
    arena.collective(arena.account.epoch.number, lucky=1)
    for _ in range(3):
        for name in (P0, P1):
            arena.ask(name, lose_reply=True)
    assert arena.account.head.step == step


def test_a_vote_of_a_past_epoch_does_not_count():
    """After a new epoch everybody reduces again; an old vote is sent back to compute, with nothing extra."""
    arena = arena_computing()
    both_reduce(arena)
    arena.collective(arena.account.epoch.number)
    voter = arena.members[P0]
    arena.propose(P1, arena.account.epoch.number)
    word = tell(arena, P0)
    assert isinstance(word, Compute)
    assert {share.number for share in word.shares} == set(arena.account.assignment[P0]) - set(voter.stage.shares)


def test_a_vote_on_another_state_does_not_count():
    """Who votes with a state that is not the head's would apply the sum to other weights: it is sent back instead."""
    arena = arena_computing()
    both_reduce(arena)
    step = arena.account.head.step
    arena.collective(arena.account.epoch.number)
    arena.ask(P0, lose_reply=True)
    wrong = msgspec.structs.replace(arena.members[P1].turn(), chain="another")
    arena.group.hear(wrong, arena.now)
    assert arena.account.head.step == step
    assert isinstance(arena.group.word(wrong, arena.now), Leave)


def test_a_vote_with_another_sum_than_the_committed_one_is_not_answered_committed():
    """A member that was cut off voted in its own epoch; the others have committed another sum since."""
    arena = arena_computing()
    both_reduce(arena)
    arena.collective(arena.account.epoch.number)
    late = arena.members[P1].turn()
    arena.propose(P1, arena.account.epoch.number)
    step = arena.account.head.step
    arena.run_until(lambda: arena.account.head.step == step + 1, restarts=False, rollouts=False)
    other_epoch = arena.group.word(late, arena.now)
    other_sum = msgspec.structs.replace(
        late, stage=msgspec.structs.replace(late.stage, epoch=arena.account.commits[step + 1].epoch, digest="other")
    )
    assert isinstance(other_epoch, Leave)
    assert isinstance(arena.group.word(other_sum, arena.now), Leave)


# -- deaths -------------------------------------------------------------------------------------------------------------


def test_a_dead_members_shares_go_to_the_survivors_who_keep_theirs():
    """The survivor is told to compute only what the dead one had; the batch stays the same."""
    arena = arena_computing()
    digest = arena.account.open_deal.batch_digest
    settle(arena, P0)
    had = set(arena.members[P0].in_hand)
    lost = set(arena.account.assignment[P1])
    arena.kill(P1)
    arena.notify()
    arena.pass_time(arena.settings.master_silence_seconds)
    word = tell(arena, P0)
    assert isinstance(word, Compute)
    assert {share.number for share in word.shares} == lost
    assert word.batch_digest == digest
    assert had.isdisjoint(lost)


def test_a_death_waits_for_the_master_two_seconds_at_most():
    """The master's proposal opens the epoch at once; without it the controller does so itself after two seconds."""
    arena = arena_at(1)
    epoch = arena.account.epoch.number
    arena.kill(P1)
    arena.notify()
    arena.pass_time(arena.settings.master_silence_seconds - 0.1)
    assert arena.account.epoch.number == epoch
    arena.pass_time(0.1)
    assert arena.account.epoch.members == (P0,) or arena.account.epoch.members == tuple(
        member for member in arena.account.epoch.members if member != P1
    )
    assert P1 not in arena.account.epoch.members

    other = arena_at(1)
    other.kill(P1)
    other.notify()
    assert other.propose(P1, other.account.epoch.number)
    assert P1 not in other.account.epoch.members


def test_a_proposal_for_a_past_epoch_or_of_a_past_master_is_refused():
    """A returning master takes the ledger's epoch; an older term has nothing to say."""
    arena = arena_at(1, members=3)
    epoch = arena.account.epoch.number

    def propose(replaces, term, leave):
        return arena.group.propose(EpochProposal(term=term, replaces=replaces, leave=(leave,), cause="x"), arena.now)

    assert not propose(epoch - 1, 1, P1)
    assert propose(epoch, 2, P1)
    assert not propose(epoch, 2, P2)
    assert not propose(epoch + 1, 1, P2)
    assert P2 in arena.account.epoch.members


def test_a_newer_start_of_a_member_is_news_of_the_older_ones_death():
    """Whoever started it anew knew: the epoch is opened at once, and the old one is fenced."""
    arena = arena_at(1)
    zombie = arena.members[P1].turn()
    arena.kill(P1)
    arena.restart(P1)
    arena.ask(P1)
    assert P1 not in arena.account.epoch.members
    assert isinstance(arena.group.word(zombie, arena.now), Leave)


def test_a_zombie_changes_nothing():
    """Turns of a dead start are not heard: neither its vote nor its state counts."""
    arena = arena_computing()
    zombie = arena.members[P1].turn()
    arena.kill(P1)
    arena.notify()
    before = msgspec.msgpack.encode(arena.account)
    arena.group.hear(zombie, arena.now)
    assert isinstance(arena.group.word(zombie, arena.now), Leave)
    assert msgspec.msgpack.encode(arena.account) == before


def test_a_member_that_lost_its_state_is_left_out_when_it_says_so_twice():
    """One such message may be late; the second one is meant."""
    arena = arena_at(1)
    late = msgspec.structs.replace(arena.members[P1].turn(), version=None, chain="", stage=Fresh())
    arena.group.hear(late, arena.now)
    assert P1 in arena.account.epoch.members
    assert isinstance(arena.group.word(late, arena.now), Leave)
    arena.group.hear(late, arena.now)
    assert P1 not in arena.account.epoch.members


# -- reductions that fail -----------------------------------------------------------------------------------------------


def abort_all(arena):
    """Let the reduction of the current epoch fail for all that live and are not hung."""
    for _ in range(6):
        for name in arena.account.epoch.members:
            settle(arena, name)
    arena.collective(arena.account.epoch.number, lucky=0)
    for name in arena.account.epoch.members:
        arena.ask(name)


def test_an_abort_without_a_known_death_is_tried_twice_with_the_same_members():
    """Two seconds after the abort the same members get a new epoch, twice; then one is left out and the step goes on."""
    arena = arena_computing(members=3)
    members, first = arena.account.epoch.members, arena.account.epoch.number
    for number in (1, 2):
        abort_all(arena)
        arena.pass_time(arena.settings.abort_settle_seconds - 0.1)
        assert arena.account.epoch.number == first + number - 1
        arena.pass_time(0.2)
        assert (arena.account.epoch.number, arena.account.epoch.members) == (first + number, members)
    abort_all(arena)
    arena.pass_time(arena.settings.abort_settle_seconds + 0.1)
    assert len(arena.account.epoch.members) == len(members) - 1
    assert arena.group.findings[-1].category == "reduction.fails"


def test_a_member_that_hangs_in_the_reduction_is_left_out_without_any_agent():
    """It says nothing in the new epoch while the others do: that is evidence once the group timeout has gone."""
    arena = arena_computing()
    both_reduce(arena)
    arena.members[P1].hung = True
    arena.run_until(lambda: P1 not in arena.account.epoch.members, restarts=False, rollouts=False)
    assert arena.account.epoch.members == (P0,)
    step = arena.account.head.step
    arena.run_until(lambda: arena.account.head.step > step, restarts=False)
    arena.members[P1].hung = False
    arena.members[P1].aborted()
    arena.run_until(lambda: len(arena.account.epoch.members) == 2)


def test_digests_that_differ_once_are_reduced_again():
    """A wrong bit is no commit but a new epoch with the same members."""
    arena = arena_computing()
    members, step = arena.account.epoch.members, arena.account.head.step
    arena.members[P1].flip = True
    both_reduce(arena)
    arena.collective(arena.account.epoch.number)
    for name in members:
        arena.ask(name)
    assert arena.account.head.step == step
    assert arena.account.epoch.members == members
    arena.run_until(lambda: arena.account.head.step == step + 1)


@pytest.mark.parametrize(("members", "stay"), [(3, 2), (2, 0)])
def test_digests_that_differ_twice_cost_the_minority_its_place(members, stay):
    """Twice in a row, the minority goes back to a snapshot; without a majority all do. The step is trained all the same."""
    arena = arena_computing(members=members)
    step, names = arena.account.head.step, arena.account.epoch.members
    for _ in range(2):
        arena.members[names[-1]].flip = True
        both_reduce(arena)
        arena.collective(arena.account.epoch.number)
        for name in names:
            arena.ask(name)
    assert len(arena.account.epoch.members) == stay
    assert arena.group.findings[-1].category == "reduction.differs"
    assert isinstance(arena.members[names[-1]].stage, Fresh)
    arena.run_until(lambda: arena.account.head.step > step and len(arena.account.epoch.members) == members)


def test_a_sum_that_misses_a_share_is_no_commit():
    """The votes name their shares; if these are not each share once, it is reduced again."""
    arena = arena_computing()
    both_reduce(arena)
    step = arena.account.head.step
    arena.collective(arena.account.epoch.number)
    member = arena.members[P0]
    member.stage = msgspec.structs.replace(member.stage, shares=member.stage.shares[1:])
    for name in (P0, P1):
        arena.ask(name)
    assert arena.account.head.step == step
    assert arena.group.findings[-1].category == "reduction.shares"


# -- joins --------------------------------------------------------------------------------------------------------------


def joiner_rehearsed(arena, name=P1, seconds=1.0):
    """Kill a member, restart it, and let it rehearse; the others are at a boundary."""
    arena.kill(name)
    arena.notify()
    arena.pass_time(arena.settings.master_silence_seconds)
    arena.restart(name)
    arena.ask(name)
    assert isinstance(arena.members[name].busy, Rehearse)
    arena.members[name].busy = None
    arena.members[name].stage = Rehearsed(seconds=seconds)
    arena.run_until(lambda: arena.account.open_deal is None, rollouts=False, seconds=0.0)
    arena.members[name].stage = Rehearsed(seconds=seconds)
    arena.members[name].busy = None


def test_the_others_hold_while_a_joiner_takes_the_state():
    """Hold to those in, Take to the joiner once all hold, a new epoch once it has taken the same state."""
    arena = arena_at(2)
    joiner_rehearsed(arena)
    arena.ask(P1)
    assert arena.group.joining.hold is not None
    assert isinstance(tell(arena, P0), Hold)
    assert isinstance(tell(arena, P1), Wait)
    settle(arena, P0)
    assert isinstance(arena.members[P0].stage, Held)
    word = tell(arena, P1)
    assert isinstance(word, Take)
    assert word.state_digest == arena.members[P0].stage.state_digest
    assert word.deadline_seconds == pytest.approx(arena.settings.join_hold_shortest_seconds)
    arena.members[P1].obey(word)
    arena.members[P1].work()
    arena.ask(P1)
    assert arena.account.epoch.members == (P0, P1)


def test_a_hold_lasts_as_long_as_the_rehearsal_and_half_of_it():
    """At least two seconds, at most join_hold_seconds; a need above that is a finding that names the setting."""
    arena = arena_at(2, join_hold_seconds=20.0)
    joining = arena.group.joining
    assert joining.allowance_seconds(0.1) == 2.0
    assert joining.allowance_seconds(4.0) == 6.0
    assert joining.allowance_seconds(100.0) == 20.0
    joiner_rehearsed(arena, seconds=100.0)
    arena.ask(P1)
    assert "join_hold_seconds = 20" in arena.group.findings[-1].text


def test_a_joiner_that_is_late_tries_again_later_each_time():
    """Training goes on when the hold ends; the interval between tries doubles."""
    arena = arena_at(2)
    joiner_rehearsed(arena)
    waits = []
    for _ in range(3):
        began = arena.now
        while arena.group.joining.hold is None:
            arena.ask(P1)
            arena.pass_time(0.25)
            assert arena.now - began < 60
        waits.append(arena.now - began)
        settle(arena, P0)
        arena.pass_time(arena.settings.join_hold_shortest_seconds + 0.1)
        assert arena.group.joining.hold is None
    assert waits[1] == pytest.approx(5.0, abs=1.0)
    assert waits[2] == pytest.approx(10.0, abs=1.0)
    step = arena.account.head.step
    arena.run_until(lambda: arena.account.head.step > step)


def test_a_joiner_that_dies_in_the_hold_ends_it():
    """The others go on at once."""
    arena = arena_at(2)
    joiner_rehearsed(arena)
    arena.ask(P1)
    settle(arena, P0)
    assert arena.group.joining.hold is not None
    arena.kill(P1)
    arena.notify()
    assert arena.group.joining.hold is None


def test_a_joiner_with_another_state_is_refused():
    """What it took is compared with what the others hold."""
    arena = arena_at(2)
    joiner_rehearsed(arena)
    arena.ask(P1)
    settle(arena, P0)
    arena.ask(P1)
    arena.work(P1)
    member = arena.members[P1]
    member.stage = Taken(version=member.stage.version, state_digest="another")
    word = tell(arena, P1)
    assert arena.account.epoch.members == (P0,)
    assert isinstance(word, Rehearse)
    assert "join.refused" in [found.category for found in arena.group.findings]


# -- going back ---------------------------------------------------------------------------------------------------------


def everything_dies(arena, *, memory=False):
    for name in list(arena.memories):
        arena.kill(name)
        if not memory:
            arena.memories[name] = Memory()
    arena.boot()
    arena.notify()
    arena.pass_time(arena.settings.master_silence_seconds + 0.1)
    assert arena.account.epoch.members == ()
    for name in list(arena.memories):
        arena.restart(name)


def test_a_restore_below_the_head_is_recorded_and_replays_the_same_batches():
    """rewind(S, lineage + 1), then the steps after S from the batches in the ledger, and only then new ones."""
    arena = arena_at(5)
    stored = max(snapshot.version.step for snapshot in arena.storage)
    head = arena.account.head
    batches = {step: deal.batch_digest for step, deal in arena.account.batches.items()}
    assert stored < head.step
    everything_dies(arena)
    arena.run_until(lambda: arena.account.head.step > head.step)
    rewinds = [record for record in arena.records if isinstance(record, Rewound)]
    assert [(rewind.step, rewind.lineage) for rewind in rewinds] == [(stored, 1)]
    again = {r.step: r.batch_digest for r in arena.records if isinstance(r, Dealt) and r.lineage == 1}
    for step in range(stored + 1, head.step + 1):
        assert again[step] == batches[step]
    assert arena.account.head.lineage == 1


def test_with_the_newest_state_in_memory_nothing_is_rewound():
    """A process death costs no step: its snapshot outlives it."""
    arena = arena_at(4)
    arena.run_until(lambda: any(s.version == arena.account.head for m in arena.memories.values() for s in m.snapshots))
    head = arena.account.head
    everything_dies(arena, memory=True)
    arena.run_until(lambda: arena.account.head.step > head.step)
    assert arena.account.head.lineage == head.lineage


def test_without_any_snapshot_a_young_run_begins_anew_and_replays_all():
    """As long as nothing was let go, step 0 can be made again."""
    arena = arena_at(3, flush_every=0)
    head, chain = arena.account.head.step, arena.account.chain
    everything_dies(arena)
    arena.run_until(lambda: arena.account.head == Version(1, 0))
    arena.run_until(lambda: arena.account.head.step >= head)
    assert arena.account.chains[head] == chain


def test_without_any_snapshot_an_old_run_says_so_waits_a_while_and_gives_up():
    """Nothing is invented: the finding tells what is missing; who may still bring it has twenty seconds, then the run is refused."""
    arena = arena_at(8)
    assert arena.account.floor > 0
    arena.storage.clear()
    everything_dies(arena)
    for _ in range(10):
        arena.round()
    assert arena.account.epoch.members == ()
    assert arena.group.findings[-1].category == "data.corrupt"
    assert arena.group.refusal is None
    floor, head = arena.account.floor, arena.account.head
    for _ in range(100):
        arena.pass_time(1.0)
        arena.round()
        if arena.group.refusal is not None:
            break
    assert isinstance(arena.group.refusal, StateLostError)
    assert f"between step {floor} and {head.step}" in str(arena.group.refusal)
    assert "bring back the storage folder" in str(arena.group.refusal)
    assert arena.account.head == head


def test_who_brings_a_snapshot_back_in_time_is_restored():
    """The wait is for just that: a member that comes with a snapshot goes on from it."""
    arena = arena_at(8)
    storage = list(arena.storage)
    arena.storage.clear()
    everything_dies(arena)
    for _ in range(10):
        arena.round()
    assert arena.account.epoch.members == ()
    arena.storage.extend(storage)
    for member in arena.members.values():
        member._fresh()
    arena.run_until(lambda: arena.account.epoch.members != ())
    assert arena.group.refusal is None


def test_an_empty_ledger_beside_a_later_snapshot_is_a_lost_one():
    """Beginning again from zero would drop committed steps in silence."""
    arena = Arena(small_settings())
    candidate = Candidate(version=Version(0, 7), chain="c", state_digest="d", tier="memory")
    arena.members[P0].stage = Fresh(candidates=(candidate,))
    assert not isinstance(tell(arena, P0), Begin)
    assert isinstance(arena.group.refusal, LedgerLostError)
    assert "step 7" in str(arena.group.refusal)


def test_the_best_candidate_of_all_members_is_restored():
    """Members are compared for a moment, so that the one with the newest snapshot is chosen, not the first to come."""
    arena = arena_at(5)
    newest = max((s.version for m in arena.memories.values() for s in m.snapshots), key=lambda v: v.step)
    holder = next(name for name, memory in arena.memories.items() if any(s.version == newest for s in memory.snapshots))
    other = P0 if holder == P1 else P1
    everything_dies(arena, memory=True)
    arena.memories[other] = Memory()
    arena.members[other].stage = Fresh(candidates=())
    assert isinstance(tell(arena, other), Wait)
    word = tell(arena, holder)
    assert word == Restore(version=newest, lineage=arena.account.head.lineage)


def test_a_founder_that_was_on_its_way_from_an_earlier_word_is_not_waited_for():
    """Chosen by its last message while it rehearsed, it comes back without state: it is sent to show its candidates again."""
    arena = arena_at(3)
    arena.kill(P1)
    arena.notify()
    arena.pass_time(arena.settings.master_silence_seconds + 0.1)
    arena.restart(P1)
    arena.ask(P1)
    assert isinstance(arena.members[P1].busy, Rehearse)
    arena.kill(P0)
    arena.notify()
    arena.pass_time(arena.settings.master_silence_seconds + 0.1)
    arena.pass_time(arena.settings.gather_seconds)
    assert arena.group.founder is not None
    assert arena.group.founder.member == P1
    arena.work(P1)
    assert isinstance(tell(arena, P1), Leave)
    arena.run_until(lambda: arena.account.epoch.members == (P1,), restarts=False)


def test_a_candidate_that_cannot_be_read_gives_way_to_the_next():
    """Back with fewer candidates, the member is told to restore the next one."""
    arena = arena_at(5)
    everything_dies(arena, memory=True)
    arena.kill(P1)
    tell(arena, P0)
    arena.pass_time(arena.settings.gather_seconds)
    first = tell(arena, P0)
    assert isinstance(first, Restore)
    member = arena.members[P0]
    member.failed.add(first.version)
    member._fresh()
    tell(arena, P0)
    arena.pass_time(arena.settings.gather_seconds + 0.1)
    second = tell(arena, P0)
    assert isinstance(second, Restore)
    assert second.version != first.version


# -- the end ------------------------------------------------------------------------------------------------------------


def test_the_run_ends_with_a_sealed_snapshot_of_its_last_step():
    """The last step is sealed by force if need be; only then is it finished, and everybody is told to stop."""
    arena = Arena(small_settings(steps=2))
    arena.random.random = lambda: 1.0  # no save of its own ever finds a free slot
    arena.run_until(lambda: arena.account.head.step == 2)
    assert not arena.account.finished
    settle(arena, P0)
    assert arena.account.finished
    assert isinstance(arena.members[P0].stage, Held)
    assert isinstance(tell(arena, P0), Stop)
    assert arena.memories[P0].snapshots[-1].version.step == 2


def test_a_stop_reaches_everybody_but_a_committed_vote_is_answered_first():
    """Who voted for a committed step still learns that it may apply it."""
    arena = arena_computing()
    both_reduce(arena)
    arena.collective(arena.account.epoch.number)
    for name in (P0, P1):
        arena.ask(name, lose_reply=True)
    arena.group.stop("the operator stops the run", arena.now)
    assert isinstance(tell(arena, P0), Committed)
    arena.ask(P0)
    arena.work(P0)
    assert tell(arena, P0) == Stop(reason="the operator stops the run")


def test_members_take_turns_in_flushing():
    """Each flush_every-th step one member writes to storage, and the last step is always written."""
    arena = Arena(small_settings(steps=9, flush_every=2))
    assert arena.run_fairly()
    flushers = {r.step: r.flusher for r in arena.records if isinstance(r, CommittedRecord)}
    assert [step for step, member in flushers.items() if member] == [2, 4, 6, 8, 9]
    assert {flushers[4], flushers[6]} == {P0, P1}


def test_rollouts_that_wait_for_newer_weights_force_a_seal():
    """When a member's save was skipped and rollouts wait, the head is sealed by force: else nobody would ever go on."""
    arena = arena_at(2)
    arena.run_until(lambda: arena.account.open_deal is None, rollouts=False, seconds=0.0)
    for name in arena.members:
        settle(arena, name)
    arena.group.roll.seals.clear()
    for member in arena.members.values():
        member.sealed = None
    arena.pass_time(1.0)
    assert isinstance(tell(arena, P0), Wait)
    arena.pass_time(3.0)
    assert isinstance(tell(arena, P0), Hold)


def test_replicas_that_sealed_different_states_are_found_and_mended_a_few_times():
    """One of them restores the other's snapshot; after three times it is only reported."""
    arena = arena_at(2)
    arena.run_until(
        lambda: all(isinstance(m.stage, Ready) for m in arena.members.values()), seconds=0.0, rollouts=False
    )
    for name in (P0, P1):
        member = arena.members[name]
        member._seal()
    member.state = (*member.state[:-1], (member.state[-1][0], "corrupt"))
    member._seal()
    arena.ask(P0)
    arena.ask(P1)
    assert len(arena.account.epoch.members) == 1
    assert "replica.diverged" in [found.category for found in arena.group.findings]
    arena.run_until(lambda: len(arena.account.epoch.members) == 2)
    arena.run_until(lambda: len({m.state for m in arena.members.values()}) == 1)


def test_waiting_names_a_member_only_when_others_have_done_their_part():
    """The master takes the name as evidence of a hang, so nobody is named while all compute."""
    arena = arena_computing(members=3)
    assert waiting_for(arena.group) == ""
    first, *rest = arena.account.epoch.members
    settle(arena, first)
    arena.ask(first)
    assert set(waiting_for(arena.group).replace(",", "").split()) & set(arena.account.epoch.members) == set(rest)


def test_an_abort_keeps_the_gradients_in_hand():
    """After an abort and a new epoch the member computes nothing again."""
    arena = arena_computing()
    abort_all(arena)
    arena.pass_time(arena.settings.abort_settle_seconds + 0.1)
    member = arena.members[P0]
    assert isinstance(member.stage, Aborted)
    word = tell(arena, P0)
    assert isinstance(word, Compute)
    assert word.shares == ()
    member.obey(word)
    member.work()
    assert isinstance(member.stage, Computed)
    assert not isinstance(tell(arena, P0), Compute)


def test_who_asks_inside_a_reduction_that_failed_learns_that_it_is_over():
    """A member that waits in the collective asks now and then; once another has aborted, it is no longer told to reduce."""
    arena = arena_computing()
    both_reduce(arena)
    inside = arena.members[P1].turn()
    assert isinstance(arena.group.word(inside, arena.now), Reduce)
    arena.members[P0].aborted()
    arena.ask(P0)
    assert isinstance(arena.group.word(inside, arena.now), Wait)


def test_incarnations_are_part_of_the_epoch():
    """A new start of a member that is in is not in."""
    arena = arena_at(1)
    assert arena.group.is_in(P0, Incarnation(0))
    assert not arena.group.is_in(P0, Incarnation(1))
    vote = Reduced(step=9, epoch=1, digest="x", shares=())
    turn = msgspec.structs.replace(arena.members[P0].turn(), stage=vote, version=Version(7, 8))
    assert isinstance(arena.group.word(turn, arena.now), Leave)
