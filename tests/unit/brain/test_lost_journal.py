"""A master whose journal was lost meets agents that remember: terms, orders and starts go on above what they have seen."""

from aimaster.brain import engine
from aimaster.brain.events import AgentConnected, MasterStarted, Send
from aimaster.wire import PROTOCOL_VERSION
from aimaster.wire.actions import StartMember
from aimaster.wire.messages import Hello
from tests.fakes.world import RL, World, plan_of


def hello(world: World, node: str, *, term_seen: int, started: dict[str, int], alive: bool) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        run_id=world.plan.run_id,
        node=node,
        outbox_id=f"{node}-0",
        url=f"http://{node}",
        pid=100,
        term_seen=term_seen,
        started=started,
        members=world.pictures(node) if alive else (),
    )


def test_orders_of_a_master_without_memory_are_new_to_every_agent():
    """The first word of an agent that has seen term 7 lifts the term to 8; what was ordered before is ordered again, under new names."""
    world = World(plan_of(RL))
    world.connect("node-0")
    before = {order.order_id for _, order in world.sent}
    assert {order.term for _, order in world.sent} == {1}
    state, actions = engine.step(
        world.state, AgentConnected(hello=hello(world, "node-1", term_seen=7, started={}, alive=False)), world.now
    )
    assert state.term == 8
    given = [action.order for action in actions if isinstance(action, Send)]
    assert {order.term for order in given} == {8}
    assert before.isdisjoint(order.order_id for order in given)
    assert {o.action.spec.member for o in given if isinstance(o.action, StartMember)} >= {"policy-1", "rollout-1"}


def test_two_masters_of_one_term_never_give_an_order_the_same_name():
    """The journal was removed, and with it the count of terms: the second term 1 is known by when it began."""
    first, second = World(plan_of(RL), now=1000.0), World(plan_of(RL), now=1060.0)
    for world in (first, second):
        world.connect()
    assert {order.term for _, order in (*first.sent, *second.sent)} == {1}
    assert {order.order_id for _, order in first.sent}.isdisjoint(order.order_id for _, order in second.sent)


def test_a_member_that_has_run_before_is_started_above_its_last_start():
    """An agent would not run an earlier start again: the planned ones begin after the newest that it names."""
    world = World(plan_of(RL))
    started = {"controller-0": 0, "policy-0": 4, "rollout-0": 2}
    world.nodes["node-0"].joining = world.nodes["node-0"].deaf = True
    world.tell(AgentConnected(hello=hello(world, "node-0", term_seen=1, started=started, alive=False)))
    numbers = {name: member.incarnation for name, member in world.state.members.items()}
    assert numbers == {"controller-0": 1, "policy-0": 5, "rollout-0": 3, "policy-1": 0, "rollout-1": 0}


def test_the_living_are_adopted_as_they_are():
    """Who lives keeps its number; nothing is started beside it."""
    world = World(plan_of(RL))
    world.nodes["node-0"].alive = {"controller-0": 1, "policy-0": 3, "rollout-0": 0}
    started = {"controller-0": 1, "policy-0": 3, "rollout-0": 0}
    world.nodes["node-0"].joining = True
    world.tell(AgentConnected(hello=hello(world, "node-0", term_seen=2, started=started, alive=True)))
    assert {name: world.state.members[name].state for name in started} == dict.fromkeys(started, "running")
    assert {name: world.state.members[name].incarnation for name in started} == started
    assert not [order for _, order in world.sent if isinstance(order.action, StartMember)]


def test_an_ordinary_reconnection_changes_neither_term_nor_orders():
    """An agent that has seen the present term says nothing new."""
    world = World(plan_of(RL))
    world.tell(MasterStarted(term=2, plan=world.plan, attempt=1))
    world.connect()
    before = world.state.next_order
    world.tell(AgentConnected(hello=hello(world, "node-0", term_seen=2, started={"policy-0": 0}, alive=True)))
    assert world.state.term == 2
    assert world.state.next_order >= before
    assert world.state.members["policy-0"].incarnation == 0
