"""The engine told story by story: what happens, what is ordered, what the incident says."""

import msgspec
import pytest
from msgspec.structs import replace

from aimaster.brain.events import (
    AgentConnected,
    ControllerPulsed,
    DrillMarked,
    FrontGone,
    MasterStarted,
    StopRequested,
)
from aimaster.brain.picture import picture
from aimaster.wire import PROTOCOL_VERSION
from aimaster.wire.actions import KillMember, PeerAddress, SetPeers, StartMember, StopMember, StopNode, TakeOverFlush
from aimaster.wire.checkpoint import SnapshotPlace, Version
from aimaster.wire.health import REFUSED, refusal
from aimaster.wire.messages import Found, HangSuspected, Hello, MemberExited, Progress, SnapshotMoved, SnapshotsDeleted
from tests.fakes.world import RANKS, RL, World, finding, plan_of, process


@pytest.fixture
def rl() -> World:
    world = World(plan_of(RL))
    world.connect()
    world.pass_time(30, commit=True)
    assert world.state.phase == "running"
    return world


@pytest.fixture
def ranks() -> World:
    world = World(plan_of(RANKS, kind="command", restart_scope="job"))
    world.connect()
    world.pass_time(30)
    assert world.state.phase == "running"
    return world


def orders(world: World, kind: type) -> list:
    return [(node, order.action) for node, order in world.sent if isinstance(order.action, kind)]


def states(world: World) -> dict[str, str]:
    return {name: member.state for name, member in world.state.members.items()}


def the_incident(world: World):
    (incident,) = world.state.incidents.values()
    return incident


# -- members one by one ---------------------------------------------------------------------------------------------------


def test_a_killed_policy_member_is_restarted_and_left_out_of_the_epoch(rl):
    """Restarted in place as the next incarnation, proposed out of the epoch, resumed at the next commit, healed when it is back in."""
    killed_at = rl.now
    rl.die("policy-1")
    assert rl.proposals[-1].leave == ("policy-1",)
    assert rl.started()[-1] == ("policy-1", 1)
    rl.pass_time(3, commit=True)
    incident = the_incident(rl)
    assert (incident.verdict.category, incident.action) == ("process.killed", "restart_process")
    assert incident.occurred_at == killed_at == incident.decided_at
    assert incident.resumed_at == killed_at + 1
    assert incident.healed_at is not None
    assert picture(rl.state, rl.view, rl.now).state == "running"


def test_a_rollout_is_resumed_by_its_own_first_word(rl):
    """No commit is waited for where training went on."""
    rl.die("rollout-0")
    rl.pass_time(2, commit=False)
    assert the_incident(rl).resumed_at is not None
    assert not rl.proposals


def test_a_users_exception_stops_the_job_at_once(rl):
    """No restart; every node is stopped, and the reason is the verdict."""
    rl.die("rollout-0", signal=None, exit_code=1, findings=(finding("app.exception", text="ValueError: bad reward"),))
    assert {node for node, _ in orders(rl, StopNode)} == {"node-0", "node-1"}
    assert rl.state.phase == "failed"
    assert "raised an exception" in rl.state.ending.reason
    assert the_incident(rl).action == "stop_job"
    assert ("rollout-0", 1) not in rl.started()


def test_a_member_out_of_budget_is_done_without_while_others_of_its_role_live(rl):
    """The fourth death within the window: the job goes on without it, and is shown as degraded."""
    for number in range(4):
        rl.die("rollout-0")
        rl.pass_time(30, commit=True)
        assert len(rl.state.incidents) == number + 1
    assert [start for start in rl.started() if start[0] == "rollout-0"] == [
        ("rollout-0", number) for number in range(4)
    ]
    assert list(rl.state.incidents.values())[-1].action == "reform_without"
    assert picture(rl.state, rl.view, rl.now).state == "degraded"
    rl.pass_time(3600, commit=True, turn=30)
    assert rl.living()["rollout-0"] == 4, "an hour later there is room in its budget again"


def test_a_controller_out_of_budget_ends_the_job(rl):
    """Nobody can do without it; the reason says that the restarts are used up."""
    for _ in range(4):
        rl.die("controller-0")
        rl.pass_time(30)
    assert rl.state.phase == "failed"
    assert "all 3 restarts are used up" in rl.state.ending.reason


def test_drills_spend_no_budget_and_are_marked(rl):
    """As many drills as wished; each incident says that it was one."""
    for _ in range(6):
        rl.tell(DrillMarked(subject="rollout-0", note="drill kill:rollout-0@5"))
        rl.die("rollout-0")
        rl.pass_time(30, commit=True)
    assert rl.state.members["rollout-0"].incarnation == 6
    assert all(incident.drill for incident in rl.state.incidents.values())
    rl.die("rollout-0")
    assert not list(rl.state.incidents.values())[-1].drill


def test_quick_deaths_in_a_row_are_restarted_after_a_pause(rl):
    """A crash loop is slowed down: the first restarts come at once, then one after a second."""
    for _ in range(2):
        rl.die("rollout-0")
        assert "rollout-0" in rl.living()
    rl.die("rollout-0")
    rl.pass_time(0.75, turn=0.25)
    assert "rollout-0" not in rl.living()
    rl.pass_time(0.5, turn=0.25)
    assert rl.living()["rollout-0"] == 3


def test_drills_in_quick_succession_are_no_crash_loop(rl):
    """Each restart comes at once, and a real death after them is the first quick one."""
    for _ in range(5):
        rl.tell(DrillMarked(subject="rollout-0", note="kill"))
        rl.die("rollout-0")
        assert "rollout-0" in rl.living()
    rl.die("rollout-0")
    assert rl.living()["rollout-0"] == 6


def test_a_start_that_fails_is_a_death(rl):
    """A member that could not be started is reported as an exit without a process, and tried again within the budget."""
    rl.die("rollout-0", signal=None, exit_code=127)
    assert ("rollout-0", 1) in rl.started()


def test_a_member_that_its_agent_does_not_show_is_gone(rl):
    """Nothing was reported, the pictures lack it for some seconds: one incident, one restart."""
    del rl.nodes["node-1"].alive["rollout-1"]
    rl.pass_time(4)
    assert not rl.state.incidents
    rl.pass_time(4, commit=True)
    assert the_incident(rl).subject == "rollout-1"
    assert rl.living()["rollout-1"] == 1


def test_a_member_that_left_early_is_missed(rl):
    """Exit code 0 while the controller goes on is no end of the job: it is started again."""
    rl.die("rollout-1", signal=None, exit_code=0, expected=True)
    assert states(rl)["rollout-1"] == "finished"
    rl.pass_time(15, commit=True)
    assert states(rl)["rollout-1"] == "running"
    assert len(rl.state.incidents) == 1


def test_steps_computed_again_are_told_as_lost(rl):
    """The only policy member was restored from an older snapshot: the incident says what that cost."""
    rl.die("policy-0")
    rl.now += 1
    rl.see(ControllerPulsed(pulse=rl.pulse(lineage=1, step=rl.step - 2)))
    rl.now += 1
    rl.see(ControllerPulsed(pulse=rl.pulse(lineage=1, commit=True)))
    assert the_incident(rl).lost == "the compute of 2 steps"
    assert picture(rl.state, rl.view, rl.now).incidents[0].lost == "the compute of 2 steps"


def test_an_incident_is_resumed_by_the_first_commit_that_it_had_held_up(rl):
    """A commit that was under way at the death is none of those: its epoch still held the dead member."""
    rl.disconnect("node-1")
    rl.unheard = {"rollout-1"}
    old = rl.pulse()
    rl.connect("node-1")
    rl.die("policy-1")
    rl.now += 0.01
    in_flight = {"in_epoch": old.in_epoch, "incarnations": old.incarnations, "committed_at": rl.now}
    rl.see(ControllerPulsed(pulse=rl.pulse(**in_flight)))
    assert the_incident(rl).resumed_at is None
    rl.now += 0.5
    with_epoch = {"epoch": 2, "committed_epoch": 1, "in_epoch": ("policy-0",), "committed_at": rl.now}
    rl.see(ControllerPulsed(pulse=rl.pulse(**with_epoch)))
    assert the_incident(rl).resumed_at is None, "the epoch changed after that commit"
    rl.now += 0.5
    rl.see(ControllerPulsed(pulse=rl.pulse(epoch=2, committed_epoch=2, in_epoch=("policy-0",), committed_at=rl.now)))
    assert the_incident(rl).resumed_at == rl.now


def test_a_hang_is_resumed_after_the_kill_never_before(rl):
    """The last beat is when it occurred; commits between beat and verdict did not wait for it."""
    rl.nodes["node-1"].deaf = True
    rl.see(ControllerPulsed(pulse=rl.pulse(committed_at=rl.now - 1.0)))
    suspect(rl, "policy-1", "state-T-twice")
    rl.see(ControllerPulsed(pulse=rl.pulse(committed_at=rl.now)))
    incident = the_incident(rl)
    assert (incident.occurred_at, incident.resumed_at) == (rl.now - 6.0, None)
    rl.hear("node-1")
    rl.pass_time(3, commit=True)
    incident = the_incident(rl)
    assert incident.decided_at < incident.resumed_at <= incident.healed_at


def test_a_controller_is_resumed_by_a_commit_of_its_next_start(rl):
    """Being back alone is not enough, and neither is what the dead one committed last."""
    rl.die("controller-0")
    rl.see(ControllerPulsed(pulse=rl.pulse(incarnation=0, committed_at=rl.now)))
    rl.pass_time(2)
    assert the_incident(rl).resumed_at is None
    rl.pass_time(1, commit=True)
    incident = the_incident(rl)
    assert incident.resumed_at == incident.healed_at == rl.now


def test_a_drill_that_another_loss_overtakes_is_named_by_that_incident(rl):
    """The member was stopped, its node died before that was noticed: one incident, which names the member and keeps the mark."""
    rl.tell(DrillMarked(subject="rollout-1", note="stop:rollout-1@50"))
    rl.lose_node("node-1")
    rl.pass_time(20, commit=True)
    (shown,) = picture(rl.state, rl.view, rl.now).incidents
    assert shown.subject == "node-1"
    assert shown.drill
    assert "rollout-1" in shown.deaths
    rl.die("rollout-1", "node-0")
    assert not list(rl.state.incidents.values())[-1].drill


def test_a_hung_member_whose_node_is_lost_before_it_could_be_killed_keeps_its_incident(rl):
    """Its death is told by the hang's incident, the others' by the node's; both heal."""
    rl.tell(DrillMarked(subject="rollout-1", note="stop:rollout-1@50"))
    rl.nodes["node-1"].deaf = True
    suspect(rl, "rollout-1", "state-T-twice")
    rl.lose_node("node-1")
    rl.pass_time(20, commit=True)
    hang, node = rl.state.incidents.values()
    assert (hang.subject, hang.deaths, hang.drill) == ("rollout-1", (("rollout-1", 0),), True)
    assert (node.subject, node.deaths, node.drill) == ("node-1", (("policy-1", 0),), False)
    assert hang.healed_at is not None
    assert node.healed_at is not None


# -- hangs ----------------------------------------------------------------------------------------------------------------


def suspect(
    world: World, member: str, *evidence: str, lease: float | None = 5.0, rank: int | None = None, seen: float = 10.0
) -> None:
    node = world.state.members[member].node
    progress = Progress(
        phase="compute", step=7, beats=world.nodes[node].beats[member], age_seconds=6.0, lease_seconds=lease
    )
    world.report(
        node,
        HangSuspected(
            member=member,
            role="policy",
            incarnation=world.nodes[node].alive[member],
            progress=progress,
            evidence=evidence,
            rank=rank,
            pid=None if rank is None else 4711,
            seen_seconds=seen,
            at=world.now,
        ),
    )


def test_a_rank_that_stands_apart_is_named_though_nothing_was_learnt(ranks):
    """Elsewhere than the others in two dumps is evidence by itself, and the verdict names rank and process, not only the member."""
    member = next(iter(ranks.state.members))
    suspect(ranks, member, "apart-from-group-twice", lease=None, rank=2)
    (incident,) = ranks.state.incidents.values()
    culprit = incident.verdict.culprit
    assert (incident.verdict.category, culprit.rank, culprit.pid) == ("hang.straggler", 2, 4711)
    assert "rank 2 stands elsewhere" in incident.verdict.summary
    assert [action.member for _, action in orders(ranks, KillMember)] == [member]


def test_who_stands_elsewhere_than_all_other_nodes_is_named(ranks):
    """One rank a node: none can compare by itself. All but one wait in a collective, by fresh words of everybody: that one is named."""
    *others, guilty = ranks.state.members
    suspect(ranks, guilty, "elsewhere-twice", "no-cpu", lease=None, rank=1)
    for name in others[:-1]:
        suspect(ranks, name, "waits-twice", lease=None)
    assert not orders(ranks, KillMember)
    ranks.pass_time(60)
    suspect(ranks, others[-1], "waits-twice", lease=None)
    assert not orders(ranks, KillMember)
    for name in (guilty, *others):
        word = "elsewhere-twice" if name == guilty else "waits-twice"
        suspect(ranks, name, word, lease=None, rank=1 if name == guilty else None)
    assert [action.member for _, action in orders(ranks, KillMember)] == [guilty]
    assert the_incident(ranks).verdict.culprit.rank == 1


def test_a_phase_that_all_nodes_share_names_nobody(ranks):
    """Everybody elsewhere, or nobody; or one that still had been elsewhere when the others had not yet begun to wait."""
    for name in ranks.state.members:
        suspect(ranks, name, "elsewhere-twice", lease=None)
    ranks.pass_time(12)
    for name in ranks.state.members:
        suspect(ranks, name, "waits-twice", lease=None)
    assert not orders(ranks, KillMember)


def test_a_stopped_member_is_killed_and_restarted_in_one_incident(rl):
    """State T in two looks is evidence: it is killed, and its death belongs to the hang's incident."""
    suspect(rl, "policy-1", "state-T-twice")
    assert [action.member for _, action in orders(rl, KillMember)] == ["policy-1"]
    incident = the_incident(rl)
    assert (incident.verdict.category, incident.action) == ("hang.straggler", "restart_process")
    assert incident.decided_at == incident.detected_at == rl.now
    assert incident.occurred_at == rl.now - 6.0
    assert incident.deaths == (("policy-1", 0),)
    assert rl.living()["policy-1"] == 1
    assert rl.proposals[-1].leave == ("policy-1",)


def test_a_suspicion_without_evidence_kills_nobody_and_is_withdrawn_by_progress(rl):
    """Silence alone is a suspicion; a later beat ends it."""
    suspect(rl, "policy-1")
    suspect(rl, "policy-0", "same-frame-twice", lease=None)
    assert states(rl)["policy-1"] == states(rl)["policy-0"] == "suspected"
    rl.pass_time(2)
    assert states(rl)["policy-1"] == states(rl)["policy-0"] == "running"
    assert not orders(rl, KillMember)


def test_a_suspect_for_whom_all_others_wait_is_killed(rl):
    """The controller naming it alone is the evidence of unequal sequence."""
    suspect(rl, "policy-1")
    rl.now += 1
    rl.see(ControllerPulsed(pulse=rl.pulse(waiting_for="shares of policy-0, policy-1")))
    assert not orders(rl, KillMember)
    rl.see(ControllerPulsed(pulse=rl.pulse(waiting_for="shares of policy-1")))
    assert [action.member for _, action in orders(rl, KillMember)] == ["policy-1"]
    assert "all others wait for it" in the_incident(rl).verdict.summary


def test_an_exception_with_an_old_echo_in_its_log_stops_the_job_at_once(ranks):
    """What it said of a peer minutes before is nothing to wait for: it is no follower of anybody."""
    old = msgspec.structs.replace(finding("net.rdma_error", role="follower"), time_seconds=ranks.now - 300)
    ranks.die("rank-0", signal=None, exit_code=1, findings=(old, finding("app.exception")))
    assert ranks.state.phase == "failed"
    ranks_of_old = World(plan_of(RANKS, kind="command", restart_scope="job"))
    ranks_of_old.connect()
    ranks_of_old.pass_time(30)
    old = msgspec.structs.replace(old, time_seconds=ranks_of_old.now - 300)
    ranks_of_old.die("rank-0", signal=None, exit_code=1, findings=(old,))
    assert the_incident(ranks_of_old).settle_at is None


# -- cut off from the controller --------------------------------------------------------------------------------------------


def test_a_policy_member_that_the_controller_does_not_hear_is_left_out_and_comes_back(rl):
    """It asks and beats, the controller speaks and does not hear it: the epoch goes on without it, nobody is killed or started."""
    rl.unheard = {"policy-1"}
    cut_at = rl.now
    rl.pass_time(9)
    assert not rl.state.incidents
    rl.pass_time(3)
    incident = the_incident(rl)
    assert (incident.subject, incident.verdict.category, incident.action) == (
        "policy-1",
        "net.unreachable",
        "reform_without",
    )
    assert incident.verdict.culprit.node == "node-1"
    assert [proposal.leave for proposal in rl.proposals] == [("policy-1",)]
    assert cut_at <= incident.occurred_at <= cut_at + 1
    first_commit_at = rl.now + 1
    rl.pass_time(20, commit=True)
    incident = the_incident(rl)
    assert incident.resumed_at == first_commit_at
    assert incident.healed_at is None
    rl.unheard = set()
    rl.pass_time(1, commit=True)
    assert the_incident(rl).healed_at == rl.now
    assert rl.living() == dict.fromkeys(RL, 0)
    assert not orders(rl, KillMember)
    assert len(rl.proposals) == 1


def test_a_proposal_that_did_not_get_through_is_made_again(rl):
    """While the controller still shows it in the epoch and does not hear it; in the same incident."""
    rl.unheard = {"policy-1"}
    rl.pass_time(12)
    rl.left_out.clear()
    rl.pass_time(11)
    assert [proposal.leave for proposal in rl.proposals] == [("policy-1",)] * 2
    assert len(rl.state.incidents) == 1


def test_a_second_cut_is_an_incident_of_its_own(rl):
    """Once it was back in."""
    for _ in range(2):
        rl.unheard = {"policy-1"}
        rl.pass_time(15, commit=True)
        rl.unheard = set()
        rl.pass_time(3, commit=True)
    assert [incident.subject for incident in rl.state.incidents.values()] == ["policy-1", "policy-1"]


@pytest.mark.parametrize("why", ["computes", "controller silent", "all of them", "a rollout member"])
def test_silence_alone_proves_nothing(rl, why):
    """Not of one who computes, not to a controller that does not speak, not where nobody would be left; a rollout's leases expire."""
    pulses = True
    if why == "computes":
        for _ in range(30):
            rl.pass_time(1, controller=False)
            seen = {name: rl.now for name in rl.living() if name != "policy-1"}
            rl.see(ControllerPulsed(pulse=rl.pulse(seen=seen)))
    else:
        rl.unheard = {"policy-0", "policy-1"} if why == "all of them" else {"policy-1"}
        rl.unheard = {"rollout-1"} if why == "a rollout member" else rl.unheard
        pulses = why != "controller silent"
        rl.pass_time(30, controller=pulses)
    assert not rl.state.incidents
    assert not rl.proposals
    told = picture(rl.state, rl.view, rl.now).findings
    assert any("asks, and the controller has not heard it" in line for line in told) == (
        why in ("all of them", "a rollout member")
    )


def test_a_member_cut_off_with_its_agent_is_lost_with_its_node_and_fenced_when_it_returns(rl):
    """Placed elsewhere as the next incarnation; the returning node's are killed by order, and the newer ones stay in."""
    rl.unheard = {"policy-1", "rollout-1"}
    rl.disconnect("node-1", cut=True)
    rl.pass_time(15, commit=True)
    assert the_incident(rl).subject == "node-1"
    assert rl.proposals[-1].leave == ("policy-1",)
    assert set(rl.nodes["node-0"].alive) == set(RL)
    rl.unheard = set()
    rl.connect("node-1")
    killed = [(node, action.member, action.incarnation) for node, action in orders(rl, KillMember)]
    assert sorted(killed) == [("node-1", "policy-1", 0), ("node-1", "rollout-1", 0)]
    rl.pass_time(5, commit=True)
    assert rl.nodes["node-1"].alive == {}
    assert rl.living() == dict.fromkeys(RL, 0) | {"policy-1": 1, "rollout-1": 1}
    assert len(rl.state.incidents) == 1
    assert the_incident(rl).healed_at is not None


# -- nodes, agents, masters -------------------------------------------------------------------------------------------------


def test_an_agent_silent_while_its_members_are_heard_is_an_agents_fault(rl):
    """Nothing is killed or moved however long it lasts; the picture says so."""
    rl.disconnect("node-1")
    sent = len(rl.sent)
    rl.pass_time(60, commit=True)
    assert len(rl.sent) == sent
    assert not rl.state.incidents
    status = picture(rl.state, rl.view, rl.now)
    assert status.state == "degraded"
    assert "nothing is moved" in status.findings[0]
    rl.nodes["node-1"].pid += 1
    rl.connect("node-1")
    rl.pass_time(2, commit=True)
    incident = the_incident(rl)
    assert incident.subject == "agent-node-1"
    assert incident.healed_at is not None
    assert rl.living() == dict.fromkeys(RL, 0)


def test_a_lost_node_has_its_members_placed_elsewhere(rl):
    """Agent and members silent for node_silent_seconds: one incident for the node, its members restart on the other, no order to it."""
    rl.lose_node("node-1")
    rl.pass_time(9, commit=True)
    assert not rl.state.incidents
    rl.pass_time(5, commit=True)
    incident = the_incident(rl)
    assert (incident.subject, incident.verdict.category, incident.action) == ("node-1", "node.lost", "replace_node")
    assert sorted(incident.deaths) == [("policy-1", 0), ("rollout-1", 0)]
    assert rl.proposals[-1].leave == ("policy-1",)
    assert set(rl.nodes["node-0"].alive) == set(RL)
    assert incident.healed_at is not None


def test_who_holds_copies_of_a_lost_node_is_told_to_flush_them(rl):
    """Up to the committed step, once, by the incident that it belongs to; from then on no copy is meant for the lost node."""
    committed = Version(rl.view.controller.lineage, rl.view.controller.step)
    rl.lose_node("node-1")
    rl.pass_time(14)
    (told,) = orders(rl, TakeOverFlush)
    assert told == ("node-0", TakeOverFlush(node="node-1", members=("policy-1", "rollout-1"), newest=committed))
    assert [order.cause for _, order in rl.sent if isinstance(order.action, TakeOverFlush)] == [
        f"incident {the_incident(rl).incident}"
    ]
    assert set(orders(rl, SetPeers)[-1][1].peers) == {"node-0"}
    rl.restart_master()
    rl.connect("node-0")
    assert len(orders(rl, TakeOverFlush)) == 1, "it was answered"


def test_checkpoints_that_retention_removed_are_shown_no_more(rl):
    """What was flushed is shown until its folder goes, whichever node flushed it and whichever removed it."""
    for step in (1, 2):
        place = SnapshotPlace(
            member="policy-0", role="policy", rank=0, ranks=1, version=Version(0, step), chain="", state_digest="",
            tier="storage", node=None, name=f"policy/s{step}/policy-0.r0.safetensors", size_bytes=1,
        )  # fmt: skip
        rl.report("node-0", SnapshotMoved(place=place))
    assert [place.version.step for place in rl.state.stored] == [1, 2]
    rl.report("node-1", SnapshotsDeleted(folders=("policy/s1",)))
    assert [place.version.step for place in rl.state.stored] == [2]
    assert [place.version.step for place in picture(rl.state, rl.view, rl.now).snapshots] == [2]


def test_members_of_a_returning_lost_node_are_fenced(rl):
    """A node that was only cut off comes back with old incarnations: these are killed, the newer live on."""
    node = rl.nodes["node-1"]
    rl.disconnect("node-1")
    for _ in range(15):
        rl.now += 1
        rl.pass_time(0.5, controller=False)
        seen = dict.fromkeys(rl.nodes["node-0"].alive, rl.now)
        rl.see(ControllerPulsed(pulse=rl.pulse(seen=seen)))
    assert set(rl.nodes["node-0"].alive) == set(RL)
    assert node.alive == {"policy-1": 0, "rollout-1": 0}
    rl.connect("node-1")
    assert node.alive == {}
    assert rl.nodes["node-0"].alive["policy-1"] == 1


def test_a_member_has_the_environment_of_the_node_it_is_started_on():
    """Not of the one it was planned for."""
    world = World(plan_of(RL, node_env={"node-0": {"WHERE": "zero"}, "node-1": {"WHERE": "one"}}))
    world.connect()
    world.pass_time(30, commit=True)
    world.lose_node("node-1")
    world.pass_time(15, commit=True)
    told = [(a.incarnation, a.spec.env["WHERE"]) for _, a in orders(world, StartMember) if a.spec.member == "policy-1"]
    assert told == [(0, "one"), (1, "zero")]


def test_a_node_replaced_under_its_name_gets_its_members_back(rl):
    """The agent comes back without its folders: what ran there is gone, and starts there again in one incident."""
    rl.lose_node("node-1")
    rl.now += 2
    rl.connect("node-1")
    rl.pass_time(3, commit=True)
    assert rl.nodes["node-1"].alive == {"policy-1": 1, "rollout-1": 1}
    incident = the_incident(rl)
    assert (incident.subject, incident.kind) == ("node-1", "node")


def test_without_the_controller_a_silent_node_is_waited_for_longer(rl):
    """A master that cannot hear members by their controller does not call them dead after ten seconds."""
    rl.die("controller-0")
    del rl.nodes["node-0"].alive["controller-0"]
    rl.disconnect("node-1")
    rl.pass_time(20, controller=False)
    assert rl.state.nodes["node-1"].state == "silent"
    rl.pass_time(15, controller=False)
    assert rl.state.nodes["node-1"].state == "lost"


def test_a_blamed_node_is_left_for_another(rl):
    """A verdict on hardware moves the member away from its node."""
    rl.die("policy-1", findings=(finding("gpu.lost"),))
    assert rl.nodes["node-0"].alive["policy-1"] == 1
    assert rl.state.nodes["node-1"].blamed
    assert the_incident(rl).action == "replace_node"


def test_a_new_master_adopts_the_living_and_renews_open_orders(rl):
    """Nothing is started twice; what was ordered and not done is ordered again under the new term."""
    rl.disconnect("node-1")
    rl.now += 1
    rl.tell(StopRequested(reason="enough"))
    rl.restart_master()
    rl.pass_time(1)
    rl.connect()
    assert rl.state.phase == "failed"
    assert all(order.term == 2 for _, order in rl.sent[-1:])


def test_a_restarted_master_starts_nobody_anew(rl):
    """All members are adopted as they are; the master's own end is an incident that heals when all agents are back."""
    before = rl.started()
    rl.restart_master()
    rl.pass_time(2)
    rl.connect()
    rl.pass_time(2, commit=True)
    assert rl.started() == before
    assert rl.state.term == 2
    incident = the_incident(rl)
    assert incident.subject == "master"
    assert incident.healed_at is not None


def test_a_new_front_begins_a_new_attempt(rl):
    """Everything starts as the next incarnation with a fresh budget; survivors of the earlier attempt are fenced first."""
    rl.restart_master(attempt=2)
    rl.connect()
    rl.pass_time(3, commit=True)
    assert rl.living() == dict.fromkeys(RL, 1)
    fenced = [action.incarnation for _, action in orders(rl, KillMember)]
    assert fenced == [0] * len(RL)
    assert not rl.state.incidents


def test_agents_are_told_each_others_addresses(rl):
    """Whoever connects, all that are on the line know all."""
    newest = {node: action.peers for node, action in orders(rl, SetPeers)}
    both = {name: PeerAddress(url=f"http://{name}") for name in ("node-0", "node-1")}
    assert newest == {"node-0": both, "node-1": both}


# -- ranks of one command ---------------------------------------------------------------------------------------------------


def test_one_killed_rank_restarts_all_on_a_new_port(ranks):
    """The rest is stopped, then all start together as the next incarnation with a fresh MASTER_PORT."""
    ranks.die("rank-1")
    assert {action.member for _, action in orders(ranks, StopMember)} == {"rank-0", "rank-2"}
    assert ranks.living() == dict.fromkeys(RANKS, 1)
    ports = {action.spec.env["MASTER_PORT"] for _, action in orders(ranks, StartMember) if action.incarnation == 1}
    assert ports == {str(ranks.ports)}
    assert the_incident(ranks).action == "restart_job"
    ranks.pass_time(2)
    assert the_incident(ranks).healed_at is not None


def test_ranks_that_follow_a_death_join_its_incident(ranks):
    """Their exceptions do not stop the job: somebody else died first."""
    ranks.disconnect("node-0")  # rank-0 and rank-2 cannot be stopped at once
    ranks.die("rank-1")
    ranks.die("rank-0", "node-0", signal=None, exit_code=1, findings=(finding("app.exception"),))
    ranks.die("rank-2", "node-0", signal=None, exit_code=1, findings=(finding("app.exception"),))
    ranks.connect("node-0")
    incident = the_incident(ranks)
    assert incident.subject == "rank-1"
    assert len(incident.deaths) == 3
    assert ranks.living() == dict.fromkeys(RANKS, 1)


def test_an_echo_waits_for_the_death_that_explains_it(ranks):
    """The first death to arrive only speaks of a lost peer; the root comes after it and is the user's exception: the job stops."""
    ranks.die("rank-0", signal=None, exit_code=1, findings=(finding("net.unreachable", role="follower"),))
    assert ranks.state.regroup is None
    ranks.pass_time(1)
    ranks.die("rank-1", signal=None, exit_code=1, findings=(finding("app.exception"),))
    incident = the_incident(ranks)
    assert (incident.subject, incident.verdict.category, incident.action) == ("rank-1", "app.exception", "stop_job")
    assert ranks.state.phase == "failed"


def test_an_echo_that_nobody_explains_is_restarted(ranks):
    """After two seconds it is taken for the root itself."""
    ranks.die("rank-0", signal=None, exit_code=1, findings=(finding("net.rdma_error", role="follower"),))
    ranks.pass_time(4)
    assert ranks.living() == dict.fromkeys(RANKS, 1)


def test_a_death_soon_after_the_restart_is_an_incident_of_its_own(ranks):
    """An exception of the next incarnation stops the job even within the first one's seconds."""
    ranks.die("rank-1")
    ranks.now += 1
    ranks.die("rank-0", signal=None, exit_code=1, findings=(finding("app.exception"),))
    assert len(ranks.state.incidents) == 2
    assert ranks.state.phase == "failed"


def test_restarts_of_all_ranks_share_one_budget(ranks):
    """The fourth death stops the job, whichever ranks died."""
    for rank in (0, 1, 2, 0):
        ranks.die(f"rank-{rank}")
        ranks.pass_time(30)
    assert ranks.state.phase == "failed"
    assert max(number for _, number in ranks.started()) == 3


def test_ranks_that_end_well_before_anybody_saw_them_back_are_back(ranks):
    """A restart that ended well within a second has its moments too."""
    ranks.die("rank-1")
    for rank in range(3):
        ranks.die(f"rank-{rank}", signal=None, exit_code=0, expected=True)
    incident = the_incident(ranks)
    assert incident.resumed_at == incident.healed_at == ranks.now
    assert ranks.state.phase == "finished"


def test_a_command_whose_ranks_all_end_well_is_finished(ranks):
    """Exit code 0 of every rank ends the job; the nodes are stopped and their memory removed."""
    for rank in range(3):
        ranks.die(f"rank-{rank}", signal=None, exit_code=0, expected=True)
    assert ranks.state.phase == "finished"
    assert all(action.remove_memory for _, action in orders(ranks, StopNode))


# -- ends -------------------------------------------------------------------------------------------------------------------


def test_a_finished_job_lets_its_members_leave_first(rl):
    """Nodes are stopped once the members have left by themselves."""
    rl.see(ControllerPulsed(pulse=rl.pulse(finished=True)))
    assert rl.state.phase == "stopping"
    assert not orders(rl, StopNode)
    for member in RL:
        rl.die(member, signal=None, exit_code=0, expected=True)
    assert rl.state.phase == "finished"
    assert len(orders(rl, StopNode)) == 2
    assert not rl.state.incidents


def test_waits_at_the_end_have_deadlines(rl):
    """Members that do not leave are stopped with their node; a node that does not answer is given up and named."""
    rl.see(ControllerPulsed(pulse=rl.pulse(finished=True)))
    rl.disconnect("node-1")
    rl.pass_time(31)
    assert {node for node, _ in orders(rl, StopNode)} == {"node-0"}
    assert rl.state.phase == "stopping"
    rl.pass_time(31)
    assert rl.state.phase == "finished"
    assert rl.state.ending.reason == "all 30 steps are committed"
    assert any("gave up waiting for node-1" in line for line in picture(rl.state, rl.view, rl.now).findings)


def test_a_suspected_member_of_a_finished_job_is_killed_at_once(rl):
    """Whether suspected before or after the end: it is not waited for, and its incident is over as soon as it is told."""
    suspect(rl, "policy-1")
    rl.see(ControllerPulsed(pulse=rl.pulse(finished=True)))
    assert [action.member for _, action in orders(rl, KillMember)] == ["policy-1"]
    rl.tell(DrillMarked(subject="rollout-1", note="stop:rollout-1@30"))
    suspect(rl, "rollout-1", "state-T-twice")
    assert "rollout-1" not in rl.living()
    for member in ("policy-0", "rollout-0"):
        rl.die(member, signal=None, exit_code=0, expected=True)
    assert (rl.state.phase, rl.state.ending.reason) == ("finished", "all 30 steps are committed")
    first, second = rl.state.incidents.values()
    assert [first.subject, second.subject] == ["policy-1", "rollout-1"]
    assert (first.action, first.drill, second.drill) == ("ignore", False, True)
    assert first.healed_at is not None
    assert second.healed_at is not None


def test_a_drill_at_the_very_end_is_told(rl):
    """A kill that was announced has its incident even when the job ends before anybody would be started again."""
    rl.see(ControllerPulsed(pulse=rl.pulse(finished=True)))
    rl.tell(DrillMarked(subject="rollout-1", note="kill:rollout-1@30"))
    rl.die("rollout-1")
    rl.die("policy-1")
    incident = the_incident(rl)
    assert (incident.subject, incident.drill, incident.action) == ("rollout-1", True, "ignore")
    assert sorted(rl.started()) == [(name, 0) for name in sorted(RL)]


def test_a_gone_front_stops_everything_soon_and_keeps_the_memory(rl):
    """The master ends last, within ten seconds even if an agent does not answer."""
    rl.disconnect("node-1")
    rl.nodes["node-0"].deaf = True
    rl.tell(FrontGone(pid=1))
    rl.disconnect("node-0")
    assert rl.state.nodes["node-0"].state == "stopped", "an agent whose line ends has ended by itself"
    assert rl.state.phase == "stopping"
    rl.pass_time(9)
    assert rl.state.phase == "failed"
    assert not any(action.remove_memory for _, action in orders(rl, StopNode))


def test_a_stop_in_start_up_waits_for_agents_that_have_yet_to_come():
    """Whoever comes in that time is told to stop, and the job has ended when all were; who never comes is waited for with a deadline."""
    for comes in (True, False):
        job = World(plan_of(RL))
        job.tell(StopRequested(reason="enough"))
        assert job.state.phase == "stopping"
        job.connect("node-0")
        assert {node for node, _ in orders(job, StopNode)} == {"node-0"}
        assert job.state.phase == "stopping"
        if comes:
            job.connect("node-1")
        else:
            job.pass_time(31)
            assert "gave up waiting for node-1" in job.state.ending.reason
        assert job.state.phase == "failed"
        assert not job.started()


def test_deaths_while_stopping_are_no_incidents(rl):
    """What dies on the way out was asked to."""
    rl.disconnect("node-1")
    rl.tell(StopRequested(reason="enough"))
    rl.die("policy-1", "node-1")
    rl.connect("node-1")
    assert not rl.state.incidents
    assert picture(rl.state, rl.view, rl.now).state == "stopping"


def test_findings_of_no_death_are_shown_and_bounded(rl):
    """The same finding again takes its earlier place's room; the oldest go."""
    for number in range(30):
        rl.report("node-0", Found(finding=finding("node.disk_full", text=f"disk {number}")))
    assert len(rl.state.findings) == 1
    assert picture(rl.state, rl.view, rl.now).findings == ("node.disk_full on node-0: disk 29",) or "disk 29" in str(
        rl.state.findings
    )


def test_an_echo_of_a_lone_process_waits_for_nobody():
    """A wrapped launcher whose log tells of a killed rank is the only process: the verdict names that rank, at once."""
    lone = World(plan_of({"command-0": ("command", "node-0")}, kind="command", nodes=("node-0",), restart_scope="job"))
    lone.connect()
    lone.pass_time(30)
    lone.die("command-0", signal=None, exit_code=1, findings=(finding("process.killed", role="follower"),))
    assert lone.living() == {"command-0": 1}
    assert the_incident(lone).action == "restart_process"


def test_a_controller_that_refuses_to_run_stops_the_job_at_once(rl):
    """It is never started again, even when its log is full of echoes; the reason is its own sentence."""
    why = "nothing of ledger/1.journal can be read; restore the file"
    rl.nodes["node-0"].alive.pop("controller-0")
    rl.report(
        "node-0",
        MemberExited(
            member="controller-0",
            role="controller",
            incarnation=0,
            process=process("controller-0"),
            exit_code=REFUSED,
            signal=None,
            at=rl.now,
            expected=False,
            findings=(finding("process.killed", role="follower"),),
            log_tail=("connection refused", refusal("data.corrupt", why)),
        ),
    )
    assert ("controller-0", 1) not in rl.started()
    assert rl.state.ending is not None
    assert why in rl.state.ending.reason
    incident = the_incident(rl)
    assert (incident.verdict.category, incident.action) == ("data.corrupt", "stop_job")


@pytest.mark.parametrize("number", [7, 11])
def test_a_crash_in_native_code_is_tried_once_more_in_place(rl, number):
    """SIGBUS or SIGSEGV of a member is worth another start; the same member crashing again ends the job, naming the first time."""
    rl.die("policy-1", signal=number)
    assert rl.started()[-1] == ("policy-1", 1)
    first = the_incident(rl)
    assert (first.verdict.category, first.action) == ("app.segfault", "restart_process")
    rl.pass_time(30, commit=True)
    rl.die("rollout-0", signal=number)
    assert rl.started()[-1] == ("rollout-0", 1)
    rl.pass_time(30, commit=True)
    rl.die("policy-1", signal=number)
    assert rl.state.ending is not None
    assert f"It crashed so before ({first.incident})" in rl.state.ending.reason


def test_a_sigbus_beside_a_full_memory_folder_is_that(rl):
    """The agent looked and found the memory folder full: then, and only then, the signal means that."""
    full = replace(finding("node.shm_full"), node="node-1", time_seconds=rl.now)
    rl.report("node-1", Found(finding=full))
    rl.die("policy-1", signal=7)
    assert the_incident(rl).verdict.category == "node.shm_full"


def test_what_a_command_lost_is_not_known_here(ranks):
    """Where a wrapped command left off is its own business: nothing is promised."""
    ranks.die("rank-1")
    ranks.pass_time(30)
    incident = the_incident(ranks)
    assert incident.healed_at is not None
    assert incident.lost == "unknown: the command's own progress since its last checkpoint"


def test_every_end_of_an_agent_is_an_incident(rl):
    """Agents count themselves in the node's folder: one that was killed before it had come is told as well, each with its moments in order."""
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        run_id=rl.plan.run_id,
        node="node-1",
        outbox_id="node-1-0",
        url="http://node-1",
        pid=100,
        term_seen=1,
        starts=1,
        members=rl.pictures("node-1"),
    )
    rl.tell(AgentConnected(hello=hello))
    for pid, starts in ((101, 2), (104, 5)):
        rl.disconnect("node-1")
        rl.pass_time(2, commit=True)
        rl.nodes["node-1"].joining = True
        rl.tell(AgentConnected(hello=replace(hello, pid=pid, starts=starts, members=rl.pictures("node-1"))))
        rl.nodes["node-1"].on_line, rl.nodes["node-1"].joining = True, False
        rl.pass_time(2, commit=True)
    found = [incident for incident in rl.state.incidents.values() if incident.subject == "agent-node-1"]
    assert len(found) == 4
    assert sum("before it had reached the master" in incident.verdict.summary for incident in found) == 2
    for one in found:
        assert one.occurred_at <= one.detected_at <= one.decided_at <= one.resumed_at <= one.healed_at


def test_a_master_that_was_silent_for_long_is_not_told_as_a_sudden_end(rl):
    """A stopped one is killed by the front after eight seconds: its silence is told, not an end without a word."""
    rl.tell(MasterStarted(term=2, plan=rl.plan, attempt=1, previous_alive_at=rl.now - 9.0))
    rl.tell(MasterStarted(term=3, plan=rl.plan, attempt=1, previous_alive_at=rl.now - 0.6))
    long, short = (incident.verdict.summary for incident in rl.state.incidents.values())
    assert "gave no sign of life for 9 s" in long
    assert "ended without a word" in short
