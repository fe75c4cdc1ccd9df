"""A world around the pure engine: nodes, agents, processes and a controller as plain records, with time that is told.

What the engine concludes is believed at once and kept in `history`, as the master's journal would. Orders reach an agent only
while it is on the line; what happens to processes waits in the node's outbox until it is.
"""

from dataclasses import dataclass, field

from aimaster.brain import engine, watch
from aimaster.brain.events import (
    Action,
    AgentConnected,
    AgentDisconnected,
    AgentPulsed,
    ChoosePort,
    Conclude,
    ControllerPulsed,
    Event,
    MasterStarted,
    Observation,
    PortChosen,
    Propose,
    Reported,
    Send,
    Tick,
)
from aimaster.brain.state import State, View
from aimaster.wire import PROTOCOL_VERSION
from aimaster.wire.actions import KillMember, Order, StartMember, StopMember, StopNode
from aimaster.wire.health import Evidence, Finding
from aimaster.wire.messages import (
    AgentEvent,
    ControllerPulse,
    Hello,
    MemberExited,
    MemberPicture,
    MemberStarted,
    OrderDone,
    Progress,
    Pulse,
    Report,
)
from aimaster.wire.topology import JobPlan, MemberSpec, ProcessId

RL = {
    "controller-0": ("controller", "node-0"),
    "policy-0": ("policy", "node-0"),
    "policy-1": ("policy", "node-1"),
    "rollout-0": ("rollout", "node-0"),
    "rollout-1": ("rollout", "node-1"),
}
RANKS = {f"rank-{rank}": ("command", f"node-{rank % 2}") for rank in range(3)}


def plan_of(members: dict[str, tuple[str, str]], **more) -> JobPlan:
    specs = {
        name: MemberSpec(member=name, role=role, argv=("true",), rank=rank, env={"MASTER_PORT": "1"})
        for rank, (name, (role, _)) in enumerate(members.items())
    }
    placement = {name: node for name, (_, node) in members.items()}
    fields = {"run_id": "0badcafe", "name": "job", "kind": "rl", "nodes": ("node-0", "node-1")} | more
    return JobPlan(members=specs, placement=placement, **fields)


def finding(category: str, role: str = "self", text: str = "said so") -> Finding:
    return Finding(
        sign=f"test.{category}", category=category, role=role, weight=80, evidence=(Evidence(text=text, role=role),)
    )


@dataclass
class NodeWorld:
    """What is really on a node."""

    on_line: bool = False
    outbox: int = 0
    """Number of the outbox; a new one with every emptied node."""
    pid: int = 100
    alive: dict[str, int] = field(default_factory=dict)
    """Processes: member -> incarnation."""
    beats: dict[str, int] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    stopped: bool = False
    inbox: list[Order] = field(default_factory=list)
    """Orders that were not taken up yet; lost with the line."""
    joining: bool = False
    deaf: bool = False
    """Takes up no orders until it hears again or comes back."""
    cut: bool = False
    """Its members reach nobody either."""


class World:
    """The engine, its view, and what is really there."""

    def __init__(self, plan: JobPlan, now: float = 1000.0) -> None:
        self.plan, self.now = plan, now
        self.nodes = {name: NodeWorld() for name in plan.nodes}
        self.history: list[tuple[Event, float]] = []
        self.proposals: list[Propose] = []
        self.sent: list[tuple[str, Order]] = []
        self.unheard: set[str] = set()
        """Members whose way to the controller is cut: they ask, and it hears nothing."""
        self.left_out: set[str] = set()
        """Of those, whoever a proposal left out of the epoch."""
        self.ports = 20000
        self.step = 0
        first = MasterStarted(term=1, plan=plan, attempt=1)
        self.history.append((first, now))
        self.state: State = engine.begin(first, now)
        self.view = View(since=now)

    # -- the master's part -----------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        self.history.append((event, self.now))
        self.state, actions = engine.step(self.state, event, self.now)
        self.perform(actions)

    def see(self, seen: Observation) -> None:
        self.view, actions = watch.observe(self.state, self.view, seen, self.now)
        self.perform(actions)

    def perform(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            match action:
                case Send():
                    assert self.state.nodes[action.node].state not in ("lost", "stopped", "waiting"), action
                    self.sent.append((action.node, action.order))
                    node = self.nodes[action.node]
                    assert node.on_line or node.joining, f"an order for {action.node}, which is not on the line"
                    if node.joining or node.deaf:
                        node.inbox.append(action.order)
                    else:
                        self.obey(action.node, action.order)
                case Conclude():
                    self.tell(action.event)
                case ChoosePort():
                    self.ports += 1
                    self.tell(PortChosen(port=self.ports, incarnation=action.incarnation))
                case Propose():
                    self.proposals.append(action)
                    self.left_out |= self.unheard.intersection(action.leave)

    def restart_master(self, *, attempt: int | None = None) -> None:
        for node in self.nodes.values():
            node.on_line = False
            node.inbox.clear()
        number = self.state.attempt if attempt is None else attempt
        self.view = View(since=self.now)
        self.tell(
            MasterStarted(term=self.state.term + 1, plan=self.plan, attempt=number, previous_alive_at=self.now - 1)
        )

    def replayed(self) -> State:
        """The state that the history alone gives."""
        (first, at), *rest = self.history
        state = engine.begin(first, at)
        for event, when in rest:
            state, _ = engine.step(state, event, when)
        return state

    # -- the agents' part -------------------------------------------------------------------------------------------------

    def connect(self, *names: str) -> None:
        for name in names or self.nodes:
            node = self.nodes[name]
            node.inbox.clear()
            node.cut, node.deaf, node.joining = False, False, True
            hello = Hello(
                protocol=PROTOCOL_VERSION,
                run_id=self.plan.run_id,
                node=name,
                outbox_id=f"{name}-{node.outbox}",
                url=f"http://{name}",
                pid=node.pid,
                term_seen=0,
                members=self.pictures(name),
            )
            self.tell(AgentConnected(hello=hello))
            node.on_line, node.joining = True, False
            self.resend(name)
            self.hear(name)

    def hear(self, name: str) -> None:
        """Take up the orders that wait."""
        node = self.nodes[name]
        node.deaf = False
        waiting, node.inbox = node.inbox, []
        for order in waiting:
            self.obey(name, order)

    def disconnect(self, name: str, *, cut: bool = False) -> None:
        self.nodes[name].on_line, self.nodes[name].cut = False, cut
        self.nodes[name].inbox.clear()
        self.tell(AgentDisconnected(node=name, seen_at=self.now))

    def resend(self, name: str) -> None:
        """Everything that the outbox has, acknowledged or not."""
        for report in list(self.nodes[name].reports):
            self.tell(Reported(node=name, outbox_id=f"{name}-{self.nodes[name].outbox}", report=report))

    def report(self, name: str, event: AgentEvent) -> None:
        node = self.nodes[name]
        node.reports.append(Report(sequence=len(node.reports) + 1, at=self.now, event=event))
        if node.on_line:
            self.tell(Reported(node=name, outbox_id=f"{name}-{node.outbox}", report=node.reports[-1]))

    def obey(self, name: str, order: Order) -> None:
        node = self.nodes[name]
        if order.order_id in node.done:
            return
        node.done.add(order.order_id)
        action = order.action
        match action:
            case StartMember():
                member = action.spec.member
                if node.alive.get(member, -1) < action.incarnation:
                    node.alive[member] = action.incarnation
                    node.beats[member] = 1
                self.report(name, MemberStarted(member=member, incarnation=action.incarnation, process=process(member)))
            case KillMember():
                if node.alive.get(action.member) == action.incarnation:
                    self.die(action.member, name)
            case StopMember():
                if node.alive.get(action.member) == action.incarnation:
                    self.die(action.member, name, signal=15, expected=True)
            case StopNode():
                for member in list(node.alive):
                    self.die(member, name, signal=None, exit_code=0, expected=True)
                node.stopped = True
        self.report(name, OrderDone(order_id=order.order_id, ok=True))

    def die(
        self,
        member: str,
        name: str | None = None,
        *,
        signal: int | None = 9,
        exit_code: int | None = None,
        expected: bool = False,
        findings: tuple[Finding, ...] = (),
    ) -> None:
        """A process ends."""
        name = name or self.state.members[member].node
        incarnation = self.nodes[name].alive.pop(member)
        self.report(
            name,
            MemberExited(
                member=member,
                role=self.plan.members[member].role,
                incarnation=incarnation,
                process=process(member),
                exit_code=exit_code,
                signal=signal,
                at=self.now,
                expected=expected,
                findings=findings,
            ),
        )

    def lose_node(self, name: str) -> None:
        """Everything on it is gone at once, its folders too."""
        node = self.nodes[name]
        was = node.on_line
        self.nodes[name] = NodeWorld(outbox=node.outbox + 1, pid=node.pid + 1)
        if was:
            self.tell(AgentDisconnected(node=name, seen_at=self.now))

    def pictures(self, name: str) -> tuple[MemberPicture, ...]:
        node = self.nodes[name]
        return tuple(
            MemberPicture(
                member=member,
                role=self.plan.members[member].role,
                incarnation=incarnation,
                process=process(member),
                alive=True,
                progress=Progress(
                    phase="wait" if member in self.unheard else "compute", beats=node.beats.get(member, 1)
                ),
            )
            for member, incarnation in node.alive.items()
        )

    # -- time and the controller ------------------------------------------------------------------------------------------

    def living(self) -> dict[str, int]:
        """What lives and can speak."""
        return {member: number for node in self.nodes.values() if not node.cut for member, number in node.alive.items()}

    def pulse(self, *, heard: bool = True, commit: bool = False, **more) -> ControllerPulse:
        """What the controller says now; with `heard` it hears every process that lives."""
        living = self.living()
        self.step += commit
        self.left_out &= self.unheard
        policies = tuple(
            name for name in living if self.plan.members[name].role == "policy" and name not in self.left_out
        )
        audible = [name for name in living if name not in self.unheard]
        fields = {
            "url": "http://controller",
            "incarnation": living.get("controller-0", 0),
            "epoch": 1,
            "lineage": 0,
            "step": self.step,
            "steps": 100,
            "seen": dict.fromkeys(audible, self.now) if heard else {},
            "incarnations": living,
            "in_epoch": policies,
            "at": self.now,
            "committed_at": self.now if commit else 0.0,
        }
        return ControllerPulse(**(fields | more))

    def pass_time(self, seconds: float, *, controller: bool = True, commit: bool = False, turn: float = 1.0) -> None:
        """Time goes by in turns: agents on the line pulse, the controller speaks if it lives."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + turn)
            for name, node in self.nodes.items():
                if node.on_line and not node.stopped:
                    for member in node.alive:
                        node.beats[member] = node.beats.get(member, 1) + 1
                    self.see(AgentPulsed(node=name, pulse=Pulse(at=self.now, members=self.pictures(name))))
            if controller and self.plan.kind == "rl" and "controller-0" in self.living():
                self.see(ControllerPulsed(pulse=self.pulse(commit=commit)))
            self.see(Tick())

    def started(self) -> list[tuple[str, int]]:
        """Every start that was ordered, repeats once."""
        return list(
            dict.fromkeys(
                (o.action.spec.member, o.action.incarnation) for _, o in self.sent if isinstance(o.action, StartMember)
            )
        )


def process(member: str) -> ProcessId:
    return ProcessId(boot_id="boot", pid=sum(member.encode()), start_ticks=1)
