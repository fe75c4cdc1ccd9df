"""Leases and completions: who generates what, until when, and what is admitted."""

import pytest

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.rollout import CompleteRequest, Completion, LeaseRequest, Offer, Partial, Piece, StreamRequest
from aimaster.wire.topology import Epoch
from rl_runtime.controller.account import Account, apply
from rl_runtime.controller.batches import make_batch, next_prompts
from rl_runtime.controller.errors import MessageError
from rl_runtime.controller.leases import key_of
from rl_runtime.controller.rollouts import ADOPTION_SECONDS, Rollouts
from rl_runtime.records import Began, EpochOpened
from tests.fakes.policy_arena import SimRows, small_settings

W0, W1, P0 = MemberId("rollout-0"), MemberId("rollout-1"), MemberId("policy-0")
START = Version(0, 0)
OFFER = Offer(version=START, state_digest="d", holders={P0: "node-0"})


class Bench:
    """A dispatcher over an account, and workers in one line each."""

    def __init__(self, account=None, **changes):
        self.settings = small_settings(steps=100, **changes)
        self.account = account or Account()
        self.now = 0.0
        if account is None:
            self.write(Began(rows=50, rows_digest="", rules="", seed=0, shuffle=True, n_generation=2, batch_samples=4))
            epoch = Epoch(number=1, members=(P0,), incarnations={P0: Incarnation(0)})
            self.write(EpochOpened(epoch=epoch, at=0.0))
        self.boot()

    def boot(self):
        self.rollouts = Rollouts(self.settings, self.account, self.write, SimRows(), boot=f"{self.now}", now=self.now)
        self.rollouts.leases._boot = self.rollouts.leases._boot.replace(".", "-")

    def write(self, record):
        apply(self.account, record)

    def lease(self, worker=W0, capacity=1, *, version=START, holding=(), incarnation=0, offer=OFFER):
        request = LeaseRequest(
            member=worker, incarnation=Incarnation(incarnation), node="n", version=version, capacity=capacity,
            holding=tuple(lease.lease_id for lease in holding),
        )  # fmt: skip
        return self.rollouts.lease(request, offer, self.now)

    def stream(self, lease, tokens, start=0, worker=W0, version=START, incarnation=0):
        piece = Piece(tokens=tuple(tokens), logprobs=(-1.0,) * len(tokens), versions=(version,) * len(tokens))
        partial = Partial(lease_id=lease.lease_id, start=start, prompt_tokens=(7, 8), piece=piece)
        request = StreamRequest(member=worker, incarnation=Incarnation(incarnation), partials=(partial,))
        return self.rollouts.stream(request, OFFER, self.now)

    def complete(self, lease, worker=W0, version=START, **changes):
        values = {
            "lease_id": lease.lease_id, "prompt_id": lease.prompt_id, "index": lease.index, "prompt_tokens": (7, 8),
            "piece": Piece(tokens=(1, 2), logprobs=(-1.0, -1.0), versions=(version, version)),
            "text": "x", "reward": float(lease.index), "finish": "stop",
        }  # fmt: skip
        completion = Completion(**(values | changes))
        request = CompleteRequest(member=worker, incarnation=Incarnation(0), completions=(completion,))
        return self.rollouts.complete(request).results[0]

    def deal(self):
        self.write(make_batch(self.account, self.settings, next_prompts(self.account, self.settings), self.now).dealt)


def test_a_group_goes_out_sample_by_sample_with_one_row_and_its_own_seeds():
    """Both samples of a prompt have its row; each has a seed of its own, the same at every grant."""
    bench = Bench()
    first, second = bench.lease(capacity=2).leases
    assert (first.prompt_id, first.index, second.prompt_id, second.index) == (0, 0, 0, 1)
    assert first.row == second.row
    assert first.seed != second.seed
    bench.rollouts.died(W0, Incarnation(0))
    assert bench.lease(W1).leases[0].seed == first.seed


def test_no_more_is_leased_than_may_become_stale():
    """Leased and not committed samples together never exceed (allowed_outdated_steps + 1) batches."""
    bench = Bench(allowed_outdated_steps=1)
    reply = bench.lease(capacity=100)
    assert len(reply.leases) == 8
    assert reply.wait_reason == "staleness bound"
    for lease in reply.leases[:4]:
        assert bench.complete(lease) == "admitted"
    assert bench.lease(capacity=100).leases == ()
    bench.deal()
    assert bench.lease(capacity=100).leases == (), (
        "a batch that is being trained still counts: it is not a new version yet"
    )


def test_nothing_is_leased_beyond_the_last_step():
    """The last batches are not followed by generations nobody trains."""
    bench = Bench(allowed_outdated_steps=4)
    bench.rollouts.settings = bench.settings = small_settings(steps=1, allowed_outdated_steps=4)
    reply = bench.lease(capacity=100)
    assert len(reply.leases) == bench.settings.batch_samples
    assert reply.wait_reason == "enough for the steps that are left"


def test_a_worker_without_weights_or_with_too_old_ones_gets_none():
    """What it made would be refused; it is told why, and with the reply which weights to load."""
    bench = Bench(allowed_outdated_steps=0)
    assert bench.lease(version=None).wait_reason == "no weights yet"
    bench.account.head = Version(0, 3)
    newer = Offer(version=Version(0, 3), state_digest="d", holders={})
    reply = bench.lease(version=Version(0, 2), offer=newer)
    assert (reply.leases, reply.wait_reason, reply.offer) == ((), "weights too old", newer)
    assert bench.lease(version=Version(0, 3), offer=newer).leases


def test_a_dead_workers_samples_go_to_others_from_the_streamed_token_on():
    """Long generations continue with the tokens, log-probs and versions already streamed, the prompt's tokens included."""
    bench = Bench()
    (lease,) = bench.lease().leases
    bench.stream(lease, [11, 12, 13])
    bench.stream(lease, [13, 14], start=2)
    bench.rollouts.died(W0, Incarnation(0))
    (again,) = bench.lease(W1).leases
    assert (again.prompt_id, again.index) == (lease.prompt_id, lease.index)
    assert again.prefix.tokens == (11, 12, 13, 14)
    assert len(again.prefix.logprobs) == len(again.prefix.versions) == 4
    assert again.prefix_prompt_tokens == (7, 8)


def test_a_stream_with_a_gap_or_of_old_news_changes_nothing():
    """Pieces may come twice or out of order; what is kept is always a prefix."""
    bench = Bench()
    (lease,) = bench.lease().leases
    bench.stream(lease, [5], start=3)
    bench.stream(lease, [1, 2])
    bench.stream(lease, [1], start=0)
    bench.rollouts.died(W0, Incarnation(0))
    assert bench.lease(W1).leases[0].prefix.tokens == (1, 2)


def test_the_news_of_an_older_starts_death_does_not_touch_the_new_one():
    """A death notice names the start that died."""
    bench = Bench()
    bench.lease(incarnation=1)
    bench.rollouts.died(W0, Incarnation(0))
    assert bench.rollouts.leases.held_by() == {W0: 1}


def test_a_lease_passes_on_when_its_deadline_passes_and_lives_while_it_is_renewed():
    """Every question of the holder renews; silence until the deadline gives the sample to another."""
    bench = Bench(prompt_lease_seconds=10.0)
    (lease,) = bench.lease().leases
    for _ in range(3):
        bench.now += 9.0
        assert bench.lease(holding=[lease], capacity=0).dropped == ()
        bench.rollouts.tick(bench.now)
    bench.now += 10.0
    bench.rollouts.tick(bench.now)
    (again,) = bench.lease(W1).leases
    assert (again.prompt_id, again.index) == (lease.prompt_id, lease.index)
    assert bench.lease(holding=[lease], capacity=0).dropped == (lease.lease_id,)


def test_an_older_lease_of_the_same_worker_is_no_longer_its_own():
    """Leased again after its deadline, to the same worker even, a sample has one lease that counts."""
    bench = Bench(prompt_lease_seconds=10.0)
    (lease,) = bench.lease().leases
    bench.now += 11.0
    bench.rollouts.tick(bench.now)
    (again,) = bench.lease().leases
    assert bench.lease(holding=[lease, again], capacity=0).dropped == (lease.lease_id,)


def test_an_expired_lease_that_nobody_took_is_simply_renewed():
    """A slow worker that comes back in time for its sample keeps it."""
    bench = Bench(prompt_lease_seconds=10.0)
    (lease,) = bench.lease().leases
    bench.now += 11.0
    bench.rollouts.tick(bench.now)
    assert bench.lease(holding=[lease], capacity=0).dropped == ()


def test_the_first_completion_of_a_sample_is_admitted_and_the_other_told_so():
    """The loser of an expired lease hears `duplicate`, as does a resent request; that is no error."""
    bench = Bench(prompt_lease_seconds=10.0)
    (lease,) = bench.lease().leases
    bench.now += 11.0
    bench.rollouts.tick(bench.now)
    (again,) = bench.lease(W1).leases
    assert bench.complete(lease) == "admitted"
    assert bench.complete(again, worker=W1) == "duplicate"
    assert bench.complete(lease) == "duplicate"
    assert bench.account.admitted == 1
    assert bench.lease(W1, holding=[again], capacity=0).dropped == (again.lease_id,)


def test_a_completion_too_old_to_train_is_generated_anew():
    """It is not admitted, and the sample goes out again without the old tokens."""
    bench = Bench(allowed_outdated_steps=1)
    (lease,) = bench.lease().leases
    bench.stream(lease, [1, 2])
    bench.account.head = Version(0, 5)
    assert bench.complete(lease) == "stale"
    (again,) = bench.lease(W1, version=Version(0, 5)).leases
    assert (again.prompt_id, again.index) == (lease.prompt_id, lease.index)
    assert again.prefix.tokens == ()


def test_a_streamed_prefix_that_became_too_old_is_dropped_at_the_next_grant():
    """Continuing it would be work for nothing."""
    bench = Bench(allowed_outdated_steps=1)
    (lease,) = bench.lease().leases
    bench.stream(lease, [1, 2])
    bench.rollouts.died(W0, Incarnation(0))
    bench.account.head = Version(0, 5)
    assert bench.lease(W1, version=Version(0, 5)).leases[0].prefix.tokens == ()


def test_a_late_stale_completion_does_not_disturb_the_new_holder():
    """The sample is another worker's by now, with its own tokens."""
    bench = Bench(prompt_lease_seconds=10.0)
    (lease,) = bench.lease().leases
    bench.now += 11.0
    bench.rollouts.tick(bench.now)
    bench.account.head = Version(0, 5)
    (again,) = bench.lease(W1, version=Version(0, 5)).leases
    bench.stream(again, [9], worker=W1, version=Version(0, 5))
    assert bench.complete(lease) == "stale"
    assert bench.lease(W1, holding=[again], capacity=0).dropped == ()


def test_a_restarted_controller_adopts_what_workers_hold():
    """Leases are not in the ledger: the workers show them, and nothing generated is thrown away."""
    bench = Bench()
    mine = bench.lease(capacity=3).leases
    assert bench.complete(mine[0]) == "admitted"
    bench.boot()
    reply = bench.lease(W1, capacity=1)
    assert reply.leases[0].prompt_id > 1, "inherited samples wait for their holders for a moment"
    assert bench.lease(W0, holding=mine[1:], capacity=0).dropped == ()
    assert bench.complete(mine[1]) == "admitted"
    bench.now += ADOPTION_SECONDS
    keys = {(lease.prompt_id, lease.index) for lease in bench.lease(W1, capacity=8, holding=reply.leases).leases}
    assert (mine[2].prompt_id, mine[2].index) not in keys
    assert (1, 1) in keys


def test_inherited_samples_wait_no_longer_than_for_the_workers_of_late():
    """Once all of them have shown what they hold, what nobody shows goes out again at once."""
    bench = Bench()
    mine, others = bench.lease(capacity=2).leases, bench.lease(W1, capacity=2).leases
    assert bench.complete(mine[0]) == bench.complete(others[0], worker=W1) == "admitted"
    bench.boot()
    assert all(lease.prompt_id > 1 for lease in bench.lease(W0, holding=mine[1:], capacity=2).leases)
    again = bench.lease(W1, capacity=1).leases
    assert [(lease.prompt_id, lease.index) for lease in again] == [(others[1].prompt_id, others[1].index)]


def test_a_sample_never_leased_is_unknown():
    """A worker of another run, or of a ledger that is gone, is told so."""
    bench = Bench()
    (lease,) = bench.lease().leases
    assert bench.complete(lease, prompt_id=77, lease_id="77.0.x.1") == "unknown"


@pytest.mark.parametrize(
    "changes",
    [
        {"lease_id": "nonsense"},
        {"lease_id": "5.0.x.1"},
        {"index": 9, "lease_id": "0.9.x.1"},
        {"piece": Piece(tokens=(1, 2), logprobs=(-1.0,), versions=(START, START))},
        {"piece": Piece()},
        {"prompt_tokens": ()},
        {"reward": float("nan")},
        {"reward": float("inf")},
    ],
)
def test_an_impossible_completion_is_the_senders_fault(changes):
    """It is refused by name, and nothing of its request is admitted."""
    bench = Bench()
    (lease,) = bench.lease().leases
    with pytest.raises(MessageError, match=r"."):
        bench.complete(lease, **changes)
    assert bench.account.admitted == 0


def test_lease_ids_carry_their_key():
    """That is what lets a restarted controller know them."""
    bench = Bench()
    (lease,) = bench.lease().leases
    assert key_of(lease.lease_id) == (lease.prompt_id, lease.index)


def test_a_worker_that_starts_again_frees_what_it_held_before():
    """When a node is lost nobody tells of its worker's death; the worker's next start is news enough."""
    bench = Bench()
    held = bench.lease(capacity=2).leases
    assert len(held) == 2
    again = bench.lease(incarnation=1, capacity=2).leases
    assert [(lease.prompt_id, lease.index) for lease in again] == [(lease.prompt_id, lease.index) for lease in held]
    assert bench.lease(holding=held, capacity=0).dropped == tuple(lease.lease_id for lease in held)
