"""The re-formable reduction with real processes: a killed, a stopped, a missing peer."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("elastic_worker.py")
DEADLINE_SECONDS = 60.0


class Team:
    """Processes that reduce; each is told by a line what to do and answers by one."""

    def __init__(self, size):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
        self.members = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env=environment,
            )
            for rank in range(size)
        ]

    def tell(self, member, /, **order):
        self.members[member].stdin.write(json.dumps(order) + "\n")

    def hear(self, rank):
        return json.loads(self.members[rank].stdout.readline())

    def ask(self, member, /, **order):
        self.tell(member, **order)
        return self.hear(member)

    def sum(self, member):
        """The sum it answers, after its beat if it had to wait for one."""
        answer = self.hear(member)
        return (self.hear(member) if "beat" in answer else answer)["sum"]

    def reduce(self, ranks, *, epoch, address, timeout=10.0, wanted=True):
        for place, rank in enumerate(ranks):
            self.tell(
                rank,
                do="reduce",
                rank=place,
                world=len(ranks),
                epoch=epoch,
                address=address,
                timeout=timeout,
                wanted=wanted,
            )

    def close(self):
        for member in self.members:
            member.kill()
            member.wait()
            member.stdin.close()
            member.stdout.close()


@pytest.fixture
def team(request):
    made = Team(request.param)
    yield made
    made.close()


def of(size):
    return pytest.mark.parametrize("team", [size], indirect=True, ids=["team"])


@of(3)
def test_survivors_of_a_kill_re_form_and_reduce_the_same_sum(team):
    """SIGKILL in the middle of a reduction: both others are woken at once, form a new group in the same process, and sum what they kept."""
    address = team.ask(0, do="host", epoch=1)["address"]
    assert address.startswith("127.0.0.1:")
    team.reduce([0, 1, 2], epoch=1, address=address)
    answers = [team.hear(rank) for rank in range(3)]
    assert {answer["sum"] for answer in answers} == {6.0}
    assert len({answer["digest"] for answer in answers}) == 1
    # Rank 2 is not told to reduce: the others wait in the collective when it dies.
    for place in (0, 1):
        team.tell(place, do="reduce", rank=place, world=3, epoch=1, address=address, timeout=60.0, wanted=True)
    began = time.monotonic()
    for place in (0, 1):
        assert team.hear(place)["beat"] == "reduce"
    team.members[2].kill()
    for place in (0, 1):
        assert "aborted" in team.hear(place)
    assert time.monotonic() - began < 30.0  # not the group's timeout of 60
    address = team.ask(0, do="host", epoch=2)["address"]
    team.reduce([0, 1], epoch=2, address=address)
    assert {team.hear(rank)["sum"] for rank in (0, 1)} == {3.0}
    for rank in (0, 1):
        team.tell(rank, do="end")
        assert team.members[rank].wait(DEADLINE_SECONDS) == 0


@of(2)
def test_a_stopped_peer_is_given_up_at_the_timeout(team):
    """SIGSTOP wakes nobody: the group's timeout does, the other beats meanwhile, and goes on without it."""
    address = team.ask(0, do="host", epoch=1)["address"]
    team.reduce([0, 1], epoch=1, address=address)
    assert {team.hear(rank)["sum"] for rank in range(2)} == {3.0}
    address = team.ask(0, do="host", epoch=2)["address"]
    team.reduce([0, 1], epoch=2, address=address, timeout=2.0)
    assert {team.sum(rank) for rank in range(2)} == {3.0}
    os.kill(team.members[1].pid, signal.SIGSTOP)
    team.tell(0, do="reduce", rank=0, world=2, epoch=2, address=address, timeout=2.0, wanted=True)
    assert team.hear(0)["beat"] == "reduce"
    assert "aborted" in team.hear(0)
    team.tell(0, do="reduce", rank=0, world=1, epoch=3, address="", timeout=10.0, wanted=True)
    assert team.sum(0) == 1.0


@of(2)
def test_a_peer_that_died_before_the_group_costs_no_timeout(team):
    """Waiting for a peer to come, a member asks whether the reduction is still wanted, and stops when it is not."""
    address = team.ask(0, do="host", epoch=1)["address"]
    team.members[1].kill()
    team.tell(0, do="reduce", rank=0, world=2, epoch=1, address=address, timeout=60.0, wanted=False)
    assert team.hear(0)["beat"] == "reduce"
    assert "went on" in team.hear(0)["aborted"]


@of(2)
def test_a_store_that_is_gone_is_an_abort_at_once(team):
    """The member that hosts the store died: the others do not wait for it."""
    address = team.ask(0, do="host", epoch=1)["address"]
    team.members[0].kill()
    team.members[0].wait()
    team.tell(1, do="reduce", rank=1, world=2, epoch=1, address=address, timeout=60.0, wanted=True)
    assert team.hear(1)["beat"] == "reduce"
    assert "not there" in team.hear(1)["aborted"]


@of(1)
def test_alone_there_is_no_group_and_hosting_is_idempotent(team):
    """A world of one sums by itself into a copy; asked twice to host an epoch, a member gives the same address."""
    team.tell(0, do="reduce", rank=0, world=1, epoch=5, address="", timeout=10.0, wanted=True)
    answer = team.hear(0)
    assert answer["sum"] == 1.0
    assert answer["copy"]
    first = team.ask(0, do="host", epoch=6)["address"]
    assert team.ask(0, do="host", epoch=6)["address"] == first
    assert team.ask(0, do="host", epoch=7)["address"] != first
