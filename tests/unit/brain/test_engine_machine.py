"""The engine against a world that breaks at random: whatever happens in whatever order, the promises hold."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aimaster.brain.events import (
    DrillMarked,
    HangConfirmed,
    IncidentMoved,
    IncidentSettled,
    MemberVanished,
    PortChosen,
    Reported,
    StartDue,
    SuspicionWithdrawn,
)
from aimaster.brain.state import LIVE
from aimaster.wire import codec
from aimaster.wire.actions import StartMember
from aimaster.wire.messages import HangSuspected, Progress
from tests.fakes.world import RANKS, RL, World, finding, plan_of

WINDOW_SECONDS = 600.0
CONCLUSIONS = (StartDue, MemberVanished, HangConfirmed, IncidentMoved, IncidentSettled, PortChosen, SuspicionWithdrawn)
ALLOWED = 3


class Promises:
    """Rules and invariants; the two jobs below choose the plan."""

    members = RL
    plan_fields = {}

    def __init__(self) -> None:
        super().__init__()
        plan = plan_of(self.members, max_restarts=ALLOWED, restart_window_seconds=WINDOW_SECONDS, **self.plan_fields)
        self.world = World(plan)
        self.world.connect()
        self.died: Counter[tuple[str, int]] = Counter()
        self.drilled: set[tuple[str, int]] = set()

    # -- what happens -----------------------------------------------------------------------------------------------------

    def living(self):
        return sorted((member, name) for name, node in self.world.nodes.items() for member in node.alive)

    def going(self) -> bool:
        return self.world.state.ending is None

    @precondition(lambda self: self.living())
    @rule(data=st.data(), how=st.sampled_from(["kill", "exit", "echo", "drill"]))
    def a_process_dies(self, data, how):
        member, node = data.draw(st.sampled_from(self.living()))
        death = (member, self.world.nodes[node].alive[member])
        if how == "drill":
            self.world.tell(DrillMarked(subject=member, note="drill"))
        self.died[death] += 1
        if how in ("kill", "drill"):
            self.world.die(member, node)
        else:
            role = "follower" if how == "echo" else "self"
            category = "net.rdma_error" if how == "echo" else "data.remote"
            self.world.die(member, node, signal=None, exit_code=1, findings=(finding(category, role=role),))

    @precondition(lambda self: self.living())
    @rule(data=st.data(), evidence=st.sampled_from([(), ("state-T-twice",), ("same-frame-twice",)]))
    def a_process_hangs(self, data, evidence):
        member, node = data.draw(st.sampled_from(self.living()))
        progress = Progress(
            phase="compute", beats=self.world.nodes[node].beats.get(member, 1), age_seconds=5.0, lease_seconds=2.0
        )
        number = self.world.nodes[node].alive[member]
        event = HangSuspected(
            member=member,
            role=RL.get(member, ("command",))[0],
            incarnation=number,
            progress=progress,
            evidence=evidence,
            at=self.world.now,
        )
        self.world.report(node, event)

    @rule(name=st.sampled_from(["node-0", "node-1"]), cut=st.booleans())
    def an_agent_goes(self, name, cut):
        if self.world.nodes[name].on_line:
            self.world.disconnect(name, cut=cut)

    @precondition(lambda self: self.members is RL)
    @rule(who=st.sets(st.sampled_from(sorted(RL))))
    def the_network_to_the_controller_is_cut_or_heals(self, who):
        self.world.unheard = who - {"controller-0"}

    @rule(name=st.sampled_from(["node-0", "node-1"]))
    def an_agent_is_slow(self, name):
        self.world.nodes[name].deaf = True

    @rule(name=st.sampled_from(["node-0", "node-1"]))
    def a_slow_agent_catches_up(self, name):
        if self.world.nodes[name].on_line:
            self.world.hear(name)

    @precondition(lambda self: any(isinstance(event, CONCLUSIONS) for event, _ in self.world.history))
    @rule(data=st.data())
    def a_conclusion_is_drawn_twice(self, data):
        drawn = [event for event, _ in self.world.history if isinstance(event, CONCLUSIONS)]
        self.world.tell(data.draw(st.sampled_from(drawn[-5:])))

    @rule(name=st.sampled_from(["node-0", "node-1"]), restarted=st.booleans())
    def an_agent_comes(self, name, restarted):
        node = self.world.nodes[name]
        if not node.on_line:
            node.pid += restarted
            self.world.connect(name)

    @rule(name=st.sampled_from(["node-0", "node-1"]))
    def a_node_dies(self, name):
        for member, incarnation in self.world.nodes[name].alive.items():
            self.died[(member, incarnation)] += 0
        self.world.lose_node(name)

    @rule(seconds=st.sampled_from([1.0, 4.0, 15.0, 40.0]), controller=st.booleans())
    def time_passes(self, seconds, controller):
        self.world.pass_time(seconds, controller=controller, commit=True)

    @rule()
    def the_master_dies(self):
        self.world.restart_master()

    @rule(name=st.sampled_from(["node-0", "node-1"]))
    def an_outbox_is_sent_again(self, name):
        if self.world.nodes[name].on_line:
            self.world.resend(name)

    @rule(name=st.sampled_from(["node-0", "node-1"]))
    def a_report_of_a_past_outbox_arrives(self, name):
        node = self.world.nodes[name]
        for report in node.reports[:1]:
            self.world.tell(Reported(node=name, outbox_id="long past", report=report))

    # -- what always holds ------------------------------------------------------------------------------------------------

    @invariant()
    def a_present_incarnation_lives_once(self):
        """No member's newest incarnation runs twice."""
        state = self.world.state
        newest = Counter(
            member
            for node in self.world.nodes.values()
            for member, number in node.alive.items()
            if number == state.members[member].incarnation
        )
        assert all(count == 1 for count in newest.values()), newest

    @invariant()
    def no_incarnation_is_started_on_two_nodes(self):
        where = {}
        for node, order in self.world.sent:
            if isinstance(order.action, StartMember):
                key = (order.action.spec.member, order.action.incarnation)
                assert where.setdefault(key, node) == node, key

    @invariant()
    def acknowledgements_never_go_back(self):
        """What a Welcome says was journaled stays journaled."""
        before = getattr(self, "_acknowledged", {})
        for node in self.world.state.nodes.values():
            key = (node.node, node.outbox_id)
            assert node.acknowledged >= before.get(key, 0)
            before[key] = node.acknowledged
        self._acknowledged = before

    @invariant()
    def nothing_is_ordered_of_a_lost_node(self):
        """Open orders are for nodes that can be reached."""
        state = self.world.state
        assert all(state.nodes[node].state in ("connected", "silent") for node, _ in state.orders.values())

    @invariant()
    def restarts_stay_within_the_budget(self):
        """In any window, restarts that were not drills are at most what is allowed."""
        state = self.world.state
        purses = [state.group_budget] if state.together else [member.budget for member in state.members.values()]
        for purse in purses:
            assert purse.used(now=self.world.now, window_seconds=WINDOW_SECONDS) <= ALLOWED
        free = Counter()
        for incident in state.incidents.values():
            if incident.drill:
                free.update({member for member, _ in incident.deaths} or incident.members)
        for member in state.members.values():
            drills = (
                sum(incident.drill for incident in state.incidents.values()) if state.together else free[member.member]
            )
            recent = [
                at for at, name in self._starts() if name == member.member and at > self.world.now - WINDOW_SECONDS
            ]
            assert len(recent) <= ALLOWED + drills, (member.member, recent)

    def _starts(self):
        """Restarts by the times at which they were ordered, once each."""
        state = self.world.state
        seen = getattr(self, "_seen_starts", {})
        for member in state.members.values():
            if member.incarnation > 0 and member.started_at:
                seen.setdefault((member.member, member.incarnation), member.started_at)
        self._seen_starts = seen
        return [(at, name) for (name, _), at in seen.items()]

    @invariant()
    def every_death_is_in_one_incident(self):
        deaths = Counter(death for incident in self.world.state.incidents.values() for death in incident.deaths)
        assert all(count == 1 for count in deaths.values()), deaths
        if self.going():
            for name, member in self.world.state.members.items():
                if member.state == "dead":
                    assert (name, member.incarnation) in deaths

    @invariant()
    def incidents_tell_their_moments_in_order(self):
        for incident in self.world.state.incidents.values():
            assert incident.occurred_at <= incident.detected_at
            if incident.decided_at is not None:
                assert incident.detected_at <= incident.decided_at
            moments = [incident.decided_at, incident.resumed_at, incident.healed_at]
            told = [at for at in moments if at is not None]
            assert moments[: len(told)] == told, "no moment before the one before it"
            assert told == sorted(told)

    def teardown(self):
        world = self.world
        assert world.replayed() == world.state, "the same events do not give the same state"
        assert codec.decode(codec.encode(world.state), type(world.state)) == world.state
        if self.going():
            self._everybody_comes_back()
        assert world.replayed() == world.state

    def _everybody_comes_back(self):
        """Given time and agents, whoever has budget runs again; and every reported death is known."""
        world = self.world
        world.unheard = set()
        for name, node in world.nodes.items():
            if node.on_line:
                world.hear(name)
            else:
                world.connect(name)
        world.pass_time(WINDOW_SECONDS / 4, commit=True, turn=2.0)
        state = world.state
        if state.ending is not None:
            return
        known = {death for incident in state.incidents.values() for death in incident.deaths}
        for (member, incarnation), count in self.died.items():
            if count and incarnation == state.members[member].incarnation:
                assert (member, incarnation) in known
        for member in state.members.values():
            if member.state != "running":
                assert member.state == "dead"
                assert (
                    member.budget.used(now=world.now, window_seconds=WINDOW_SECONDS) >= ALLOWED
                    or member.start_at is not None
                )
            else:
                assert world.nodes[member.node].alive.get(member.member) == member.incarnation
        stale = [(m, i) for n in world.nodes.values() for m, i in n.alive.items() if state.members[m].incarnation != i]
        assert not stale
        assert not [incident for incident in state.incidents.values() if incident.settle_at is not None]
        assert all(member.state not in LIVE or member.condemned_in is None for member in state.members.values())


class RlMachine(Promises, RuleBasedStateMachine):
    """A job of ours: members restart one by one."""


class RanksMachine(Promises, RuleBasedStateMachine):
    """Ranks of one command: they restart together."""

    members = RANKS
    plan_fields = {"kind": "command", "restart_scope": "job"}


bounds = settings(max_examples=70, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
RlMachine.TestCase.settings = bounds
RanksMachine.TestCase.settings = bounds


class TestRl(RlMachine.TestCase):
    """A job of ours keeps every promise."""


class TestRanks(RanksMachine.TestCase):
    """A wrapped command keeps every promise."""
