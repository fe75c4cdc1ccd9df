"""The controller on one event loop: nothing is answered before it is durable."""

import asyncio
import contextlib
import resource
import signal

import pytest

from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.messages import DeathNotice
from aimaster.wire.rollout import CompleteRequest, Completion, LeaseRequest, Piece
from aimaster.wire.topology import EpochProposal
from aimaster.wire.training import Begin, Fresh, Ready, Turn, Wait
from rl_runtime.controller.desk import Desk, NotNowError
from rl_runtime.controller.ledger import Ledger
from rl_runtime.records import Began
from tests.fakes.policy_arena import SimRows, small_settings

P0, W0 = MemberId("policy-0"), MemberId("rollout-0")


@contextlib.asynccontextmanager
async def a_desk(folder, **changes):
    """A desk whose ledger is written and whose time passes."""
    ledger = Ledger.open(folder)
    settings = small_settings(n_init=1, **changes)
    ledger.begin(
        Began(rows=50, rows_digest="", rules=settings.rules(), seed=0, shuffle=True, n_generation=2, batch_samples=4)
    )
    desk = Desk(settings, ledger, SimRows(), boot="0")

    async def tick():
        while True:
            desk.tick()
            await asyncio.sleep(0.02)

    tasks = [asyncio.create_task(ledger.run()), asyncio.create_task(tick())]
    try:
        yield desk
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ledger.close()


@contextlib.contextmanager
def no_space(beyond):
    """No file of this process can grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (beyond, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def turn(stage, version=None, incarnation=0, sealed=None):
    return Turn(
        member=P0, incarnation=Incarnation(incarnation), node="n", version=version, stage=stage, sealed=sealed,
        sealed_digest="d" if sealed else "",
    )  # fmt: skip


async def brought_up(desk):
    """Let policy-0 begin and be in."""
    word = await desk.turn(turn(Fresh()))
    assert isinstance(word, Begin)
    head = desk.ledger.account.head
    await desk.turn(turn(Ready(), version=head, sealed=head))
    assert desk.ledger.account.epoch.members == (P0,)


async def lease(desk, capacity=1):
    head = desk.ledger.account.head
    request = LeaseRequest(member=W0, incarnation=Incarnation(0), node="n", version=head, capacity=capacity)
    return (await desk.lease(request)).leases


def completed(lease, version):
    return CompleteRequest(
        member=W0,
        incarnation=Incarnation(0),
        completions=(
            Completion(
                lease_id=lease.lease_id, prompt_id=lease.prompt_id, index=lease.index, prompt_tokens=(1,),
                piece=Piece(tokens=(2,), logprobs=(-1.0,), versions=(version,)), text="", reward=1.0, finish="stop",
            ),
        ),
    )  # fmt: skip


async def test_a_question_is_held_until_there_is_an_answer(tmp_path):
    """A member that waits gets its word the moment it exists, not at its next question."""
    async with a_desk(tmp_path) as desk:
        await brought_up(desk)
        head = desk.ledger.account.head
        waiting = asyncio.create_task(desk.turn(turn(Ready(), version=head, sealed=head)))
        for one in await lease(desk, 4):
            assert not waiting.done()
            await desk.complete(completed(one, head))
        word = await waiting
        assert type(word).__name__ == "Compute"


async def test_nothing_is_said_before_the_records_it_rests_on_are_durable(tmp_path):
    """With a disk that takes its time the member is told to wait, not what the records say."""
    ledger = Ledger.open(tmp_path)
    settings = small_settings(n_init=1)
    ledger.begin(Began(rows=50, rows_digest="", rules="", seed=0, shuffle=True, n_generation=2, batch_samples=4))
    desk = Desk(settings, ledger, SimRows(), boot="0")
    try:
        assert isinstance(await desk.turn(turn(Fresh())), Wait)
        writer = asyncio.create_task(ledger.run())
        assert isinstance(await desk.turn(turn(Fresh())), Begin)
        writer.cancel()
    finally:
        ledger.close()


async def test_a_full_disk_answers_wait_and_takes_nothing_in(tmp_path):
    """Members are told to wait and why, completions are sent again, the pulse has a finding; with space it all goes on."""
    async with a_desk(tmp_path) as desk:
        await brought_up(desk)
        head = desk.ledger.account.head
        first, second = await lease(desk, 2)
        with no_space(desk.ledger.size_bytes + 10):
            with pytest.raises(NotNowError, match="space"):
                await desk.complete(completed(first, head))
            with pytest.raises(NotNowError):
                await desk.complete(completed(second, head))
            word = await desk.turn(turn(Ready(), version=head, sealed=head))
            assert isinstance(word, Wait)
            assert word.reason.startswith("disk full")
            assert desk.finding()[0] == "storage.full"
            assert desk.ledger.account.admitted == 1, "the second was not taken in at all"
        assert await desk.ledger.durable(5.0)
        assert (await desk.complete(completed(first, head))).results == ("duplicate",)
        assert (await desk.complete(completed(second, head))).results == ("admitted",)
        assert desk.finding() == ("", "")


async def test_a_death_notice_is_taken_once_its_consequence_is_durable(tmp_path):
    """Until then the agent sends it again, so that a controller that dies meanwhile loses no notice."""
    async with a_desk(tmp_path, master_silence_seconds=0.3) as desk:
        await brought_up(desk)
        notice = DeathNotice(node="node-0", member=P0, incarnation=Incarnation(0), at=0.0)
        telling = asyncio.create_task(desk.death(notice))
        await asyncio.sleep(0.05)
        assert not telling.done()
        assert await telling
        assert desk.ledger.account.epoch.members == ()
        assert await desk.death(notice)


async def test_a_proposal_is_answered_with_the_epoch_that_is_current(tmp_path):
    """Taken: the new one; refused: the one to look at."""
    async with a_desk(tmp_path) as desk:
        await brought_up(desk)
        number = desk.ledger.account.epoch.number
        stale = EpochProposal(term=1, replaces=number - 1, leave=(P0,), cause="x")
        assert await desk.propose(stale) == (False, desk.ledger.account.epoch)
        taken, epoch = await desk.propose(EpochProposal(term=1, replaces=number, leave=(P0,), cause="x"))
        assert (taken, epoch.number, epoch.members) == (True, number + 1, ())


async def test_commits_epochs_and_ends_are_news(tmp_path):
    """The pulse need not wait for its second."""
    async with a_desk(tmp_path) as desk:
        assert not desk.news.is_set()
        await brought_up(desk)
        assert desk.news.is_set()


async def test_a_stop_lets_workers_and_members_go(tmp_path):
    """The run can be resumed: nothing is recorded of a stop."""
    async with a_desk(tmp_path) as desk:
        await brought_up(desk)
        desk.stop("the operator stops the run")
        head = desk.ledger.account.head
        assert type(await desk.turn(turn(Ready(), version=head))).__name__ == "Stop"
        request = LeaseRequest(member=W0, incarnation=Incarnation(0), node="n", version=head, capacity=3)
        assert (await desk.lease(request)).stop
        assert not desk.ledger.account.finished


async def test_an_idle_worker_is_held_a_moment_and_served_at_once(tmp_path):
    """With nothing to give its question waits; what frees room answers it."""
    async with a_desk(tmp_path, allowed_outdated_steps=0) as desk:
        await brought_up(desk)
        head = desk.ledger.account.head
        mine = await lease(desk, 4)
        other = LeaseRequest(
            member=MemberId("rollout-1"), incarnation=Incarnation(0), node="n", version=head, capacity=1
        )
        asking = asyncio.create_task(desk.lease(other))
        await asyncio.sleep(0.05)
        assert not asking.done()
        desk.rollouts.died(W0, Incarnation(0))
        reply = await asking
        assert [one.prompt_id for one in reply.leases] == [mine[0].prompt_id]
