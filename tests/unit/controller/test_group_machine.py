"""Whatever happens to members, workers and the controller, in whatever order: nothing is lost, nothing is trained twice, it ends."""

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rl_runtime.controller.account import Account, apply
from tests.fakes.policy_arena import Arena, small_settings

MEMBERS = st.integers(0, 2)
WORKERS = st.integers(0, 1)
PLACE = st.integers(0, 30)


class Machine(RuleBasedStateMachine):
    """Every rule is one event in the life of a run; the arena checks its invariants at each of them."""

    @initialize(members=st.integers(1, 3), seed=st.integers(0, 1000), dapo=st.booleans())
    def begin(self, members, seed, dapo):
        self.arena = Arena(small_settings(filter_groups=dapo, n_init=min(members, 2)), members=members, seed=seed)
        self.names = list(self.arena.memories)
        self.workers = list(self.arena.workers)

    def name(self, number):
        return self.names[number % len(self.names)]

    # -- members -------------------------------------------------------------------------------------------------------

    @rule(member=MEMBERS)
    def ask(self, member):
        self.arena.ask(self.name(member))

    @rule(member=MEMBERS)
    def ask_and_work(self, member):
        self.arena.ask(self.name(member))
        self.arena.work(self.name(member))

    @rule(member=MEMBERS)
    def reply_is_lost(self, member):
        self.arena.ask(self.name(member), lose_reply=True)

    @rule(place=PLACE)
    def an_old_turn_comes_again(self, place):
        self.arena.late(place)

    @rule(member=MEMBERS)
    def work(self, member):
        self.arena.work(self.name(member))

    @rule(lucky=st.sampled_from([-1, -1, -1, 0, 1, 2]))
    def reduction_ends(self, lucky):
        for epoch in sorted(self.arena.collectives):
            self.arena.collective(epoch, lucky=lucky)

    @rule(member=MEMBERS)
    def wrong_bit(self, member):
        if (one := self.arena.members.get(self.name(member))) is not None:
            one.flip = True

    @rule(member=MEMBERS)
    def hang(self, member):
        if (one := self.arena.members.get(self.name(member))) is not None:
            one.hung = True

    @rule(member=MEMBERS)
    def kill(self, member):
        self.arena.kill(self.name(member))

    @rule(member=MEMBERS)
    def lose_node(self, member):
        self.arena.lose_node(self.name(member))

    @rule(member=MEMBERS)
    def restart(self, member):
        self.arena.restart(self.name(member))

    @rule()
    def death_notices_arrive(self):
        self.arena.notify()

    @rule(member=MEMBERS, past=st.integers(0, 1))
    def master_proposes(self, member, past):
        self.arena.propose(self.name(member), self.arena.account.epoch.number - past)

    # -- controller ----------------------------------------------------------------------------------------------------

    @rule()
    def controller_restarts(self):
        self.arena.boot()

    @rule(member=MEMBERS)
    def controller_dies_before_its_fsync(self, member):
        self.arena.ask(self.name(member), crash=True)

    @rule(seconds=st.sampled_from([0.1, 0.7, 2.1, 6.0, 15.0, 130.0]))
    def time_goes_on(self, seconds):
        self.arena.pass_time(seconds)

    # -- rollouts ------------------------------------------------------------------------------------------------------

    @rule(worker=WORKERS, capacity=st.integers(1, 4))
    def lease(self, worker, capacity):
        self.arena.lease(self.workers[worker], capacity)

    @rule(worker=WORKERS)
    def stream(self, worker):
        self.arena.stream(self.workers[worker])

    @rule(worker=WORKERS, place=PLACE)
    def complete(self, worker, place):
        self.arena.complete(self.workers[worker], place)

    @rule(worker=WORKERS, place=PLACE, crash=st.booleans())
    def completion_is_not_acknowledged(self, worker, place, crash):
        self.arena.complete(self.workers[worker], place, lose_reply=True, crash=crash)

    @rule(worker=WORKERS)
    def kill_worker(self, worker):
        self.arena.kill_worker(self.workers[worker])

    @rule(worker=WORKERS)
    def lose_worker_without_notice(self, worker):
        self.arena.workers[self.workers[worker]] = []

    # -- always --------------------------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "arena"):
            self.arena.check()

    def teardown(self):
        if not hasattr(self, "arena"):
            return
        arena = self.arena
        assert arena.run_fairly(), (arena.account.head, arena.account.epoch, arena.members)
        replayed = Account()
        for record in arena.records:
            apply(replayed, record)
        assert replayed == arena.account
        assert replayed.copy() == replayed
        states = {member.state for member in arena.members.values() if member.version == arena.account.head}
        assert len(states) == 1, "replicas differ, or nobody has the last step"
        assert [step for step, _ in states.pop()] == list(range(1, arena.settings.steps + 1))


def test_any_order_of_events_keeps_every_sample_and_ends():
    """Kills, hangs, lost and late messages, wrong bits, restarts at any moment: each step commits once, with each share once."""
    run_state_machine_as_test(
        Machine, settings=hypothesis_settings(max_examples=60, stateful_step_count=50, deadline=None)
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_orders_of_events():
    """The same over thousands of histories."""
    run_state_machine_as_test(
        Machine,
        settings=hypothesis_settings(max_examples=3000, stateful_step_count=120, deadline=None, derandomize=False),
    )
