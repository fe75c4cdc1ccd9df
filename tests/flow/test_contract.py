"""The contract: what happens when something dies. One real job with two nodes, two policy and two rollout members; its parts are
killed, stopped, hung and cut off one after the other, each at a random, seeded moment of a step, and training goes on each time.
"""

import os
import random
import signal
import time
from collections.abc import Iterator

import msgspec
import pytest

from tests.flow.jobs import SMALL, Job, alive, audit, job, until
from tests.flow.proxy import Proxy

pytestmark = pytest.mark.timeout(240)

MOMENTS = random.Random(20)
HANGS = "hang:policy-1@30,hang:rollout-1@60"


@pytest.fixture(scope="module")
def wires() -> Iterator[tuple[Proxy, Proxy]]:
    """The network between node-1 and the controller, and between node-1 and the master."""
    with Proxy() as to_controller, Proxy() as to_master:
        yield to_controller, to_master


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, wires: tuple[Proxy, Proxy]) -> Iterator[Job]:
    """The job, steady."""
    to_controller, to_master = wires
    run = tmp_path_factory.mktemp("contract") / "run"
    to_controller.target = lambda: address_in(run / "controller.json")
    to_master.target = lambda: address_in(run / "master.json")
    through = [
        *("--aimaster.env.node-1.AIMASTER_CONTROLLER_URL", to_controller.url),
        *("--aimaster.env.node-1.AIMASTER_URL", to_master.url),
    ]
    with job(run, *SMALL, "--train.max_num_steps", "1000000", "--drill", HANGS, *through) as one:
        one.at_step(2, seconds=120)
        yield one


def address_in(path: os.PathLike[str]) -> tuple[str, int]:
    with open(path, "rb") as file:
        host, _, port = str(msgspec.json.decode(file.read())["url"]).removeprefix("http://").rpartition(":")
    return host, int(port)


def at_a_random_moment(one: Job) -> None:
    """All members are in, and some random part of a step has gone by."""
    one.all_running()
    one.next_steps(1)
    time.sleep(MOMENTS.random() * 0.3)


def goes_on(one: Job, subject: str, count: int) -> None:
    """The subject's incident is over, all are back, and further steps are committed."""
    one.healed(subject, count)
    one.all_running()
    one.next_steps(2)


def test_a_rollout_member_with_a_true_hang_is_found_killed_and_started_again(running: Job) -> None:
    """The generating thread sleeps in C with the interpreter's lock held."""
    incident = running.healed("rollout-1", seconds=120)
    assert incident.verdict.category.startswith("hang."), incident
    assert incident.drill


def test_a_policy_member_with_a_true_hang_is_found_killed_and_joins_again(running: Job) -> None:
    """The training thread sleeps in C with the interpreter's lock held; nothing but a kill helps."""
    incident = running.healed("policy-1", seconds=120)
    assert incident.verdict.category.startswith("hang."), incident
    goes_on(running, "policy-1", 1)


def test_a_killed_rollout_member_costs_nothing(running: Job) -> None:
    at_a_random_moment(running)
    running.signal("rollout-0", signal.SIGKILL)
    running.next_steps(2)
    goes_on(running, "rollout-0", 1)


def test_a_stopped_rollout_member_is_found_killed_and_started_again(running: Job) -> None:
    at_a_random_moment(running)
    pid = running.signal("rollout-0", signal.SIGSTOP)
    goes_on(running, "rollout-0", 2)
    assert not alive(pid)


def test_the_step_goes_on_when_a_policy_member_is_killed(running: Job) -> None:
    """The survivor takes the dead member's shares and commits the same step; the member joins again later."""
    at_a_random_moment(running)
    before = running.next_steps(1)
    running.signal("policy-1", signal.SIGKILL)
    running.at_step(before.step + 2, seconds=20)
    goes_on(running, "policy-1", 2)
    after = until(running.status, "a master that answers", 30)
    assert after.lineage == before.lineage


def test_a_stopped_policy_member_is_found_killed_and_joins_again(running: Job) -> None:
    at_a_random_moment(running)
    pid = running.signal("policy-0", signal.SIGSTOP)
    goes_on(running, "policy-0", 1)
    assert not alive(pid)


def test_a_killed_controller_comes_back_with_its_ledger(running: Job) -> None:
    at_a_random_moment(running)
    before = until(running.status, "a master that answers", 30)
    running.signal("controller-0", signal.SIGKILL)
    goes_on(running, "controller-0", 1)
    after = until(running.status, "a master that answers", 30)
    assert after.step > before.step
    assert after.lineage == before.lineage


def test_training_does_not_notice_a_killed_master(running: Job) -> None:
    """Nobody is restarted, and the new master adopts the living."""
    at_a_random_moment(running)
    before = running.all_running()
    os.kill(running.master_pid(), signal.SIGKILL)
    after = until(
        lambda: s if (s := running.status()) and s.term > before.term and s.step > before.step else None,
        "the next master",
        60,
    )
    members = {one.member: one.process for one in before.members}
    assert {one.member: one.process for one in running.all_running().members} == members
    assert after.lineage == before.lineage


def test_training_does_not_notice_a_killed_agent(running: Job) -> None:
    """The agent's members live on, and the new agent adopts them and their memory."""
    at_a_random_moment(running)
    before = running.all_running()
    killed = running.agent_pid("node-1")
    os.kill(killed, signal.SIGKILL)
    running.next_steps(3)
    until(lambda: (new := running.agent_pid("node-1")) != killed and alive(new), "another agent", 60)
    after = running.all_running()
    assert {one.member: one.process for one in after.members} == {one.member: one.process for one in before.members}


def test_a_member_that_only_the_controller_cannot_reach_is_left_out_and_comes_back(
    running: Job, wires: tuple[Proxy, Proxy]
) -> None:
    """Its agent shows it asking in vain: the others go on without it, nobody is killed, and it is in again once the network heals."""
    at_a_random_moment(running)
    before = running.all_running()
    processes = {one.member: one.process for one in before.members}
    wires[0].cut()
    try:
        running.at_step(before.step + 4, seconds=60)
        without = until(running.status, "a master that answers", 30)
        assert [one.member for one in without.members if one.in_epoch] == ["policy-0"]
    finally:
        wires[0].heal()
    after = running.all_running()
    assert {one.member: one.process for one in after.members} == processes
    running.next_steps(2)
    incident = until(
        lambda: next((one for one in running.incidents("policy-1") if one.healed_at and not one.deaths), None),
        "an incident that is over",
        30,
        tell=running.story,
    )
    assert (incident.verdict.category, incident.verdict.culprit.node) == ("net.unreachable", "node-1")
    assert incident.action == "reform_without"


def test_a_lost_node_costs_nothing_that_was_trained(running: Job) -> None:
    """Its agent is stopped, its shims, members and agent are killed, both its folders deleted: its state comes from the peer copy."""
    at_a_random_moment(running)
    before = running.all_running()
    assert "policy-1" in [one.member for one in before.members if one.node == "node-1"]
    running.lose_node("node-1")
    running.next_steps(3, seconds=60)
    running.all_running(seconds=120)
    after = running.next_steps(2)
    assert after.lineage == before.lineage
    assert after.step > before.step


def test_a_side_that_is_cut_off_is_fenced_and_comes_back(running: Job, wires: tuple[Proxy, Proxy]) -> None:
    """Agent and members alike: the node is lost and its members start elsewhere; when the network heals those of before are ended,
    and no step was committed twice (the audit says so).
    """
    at_a_random_moment(running)
    before = until(running.status, "a master that answers", 30)
    for wire in wires:
        wire.cut()
    try:
        running.at_step(before.step + 4, seconds=90)
        without = until(running.status, "a master that answers", 30)
        assert not any(one.in_epoch for one in without.members if one.role == "policy" and one.node == "node-1")
    finally:
        for wire in wires:
            wire.heal()
    running.all_running(seconds=120)
    running.next_steps(2)


def test_at_the_end_nothing_is_lost_and_nothing_was_trained_twice(running: Job) -> None:
    """A stop flushes, leaves no process and no orphan, and the ledger adds up with every snapshot's chain."""
    running.interrupt()
    assert running.wait(60) == 130
    report = audit(running.run)
    assert report["lost"] == 0
    assert report["duplicate"] == 0
    assert report["trained"] > 0
    assert not report.get("problems"), report
