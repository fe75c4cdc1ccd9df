"""What the engine is told, and what it answers.

Event        journaled before it is believed; the state is a function of these alone, so a replay gives the same state
Observation  a picture of now, never journaled; it only moves the view, and may make the engine ask for an Event (`Conclude`)
Action       what the master is to do; orders are also kept in the state until the agent says they are done
"""

import msgspec

from aimaster.wire.actions import Order
from aimaster.wire.checkpoint import Version
from aimaster.wire.health import Verdict
from aimaster.wire.ids import Incarnation, IncidentId, MemberId, NodeId, Term
from aimaster.wire.messages import ControllerPulse, Hello, Pulse, Report
from aimaster.wire.topology import JobPlan

# -- events -------------------------------------------------------------------------------------------------------------


class MasterStarted(msgspec.Struct, frozen=True, kw_only=True, tag="master_started"):
    """A master took the journal. Every order it gives carries the new term."""

    term: Term
    plan: JobPlan
    attempt: int = 0
    """Which start of the run by a front this is; another one than before begins everything again."""
    previous_alive_at: float | None = None
    """When the master before it last gave a sign of life; None when there was none."""


class AgentConnected(msgspec.Struct, frozen=True, kw_only=True, tag="agent_connected"):
    """A node's agent is on the line and told what runs there."""

    hello: Hello


class AgentDisconnected(msgspec.Struct, frozen=True, kw_only=True, tag="agent_disconnected"):
    """The line to a node's agent is cut, or nothing came over it for too long."""

    node: NodeId
    seen_at: float
    """Its last word."""


class Reported(msgspec.Struct, frozen=True, kw_only=True, tag="reported"):
    """A report out of a node's outbox; one that was seen before changes nothing."""

    node: NodeId
    outbox_id: str
    report: Report


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag="node_lost"):
    """Neither the agent nor any member of the node was heard for too long."""

    node: NodeId
    silent_since: float
    newest: Version | None = None
    """The newest committed step, as its controller last told; None where none tells."""


class MemberVanished(msgspec.Struct, frozen=True, kw_only=True, tag="member_vanished"):
    """The member should be running, and its node's agent shows none, or it ended as if the job were done while the job goes on."""

    member: MemberId
    incarnation: Incarnation
    why: str


class HangConfirmed(msgspec.Struct, frozen=True, kw_only=True, tag="hang_confirmed"):
    """A suspected member is the one all others wait for."""

    member: MemberId
    incarnation: Incarnation
    why: str


class SuspicionWithdrawn(msgspec.Struct, frozen=True, kw_only=True, tag="suspicion_withdrawn"):
    """A suspected member made progress again."""

    member: MemberId
    incarnation: Incarnation


class MemberUnheard(msgspec.Struct, frozen=True, kw_only=True, tag="member_unheard"):
    """Its agent shows it asking the controller, which does not hear it."""

    member: MemberId
    incarnation: Incarnation
    silent_since: float


class IncidentMoved(msgspec.Struct, frozen=True, kw_only=True, tag="incident_moved"):
    """The job went on, or the member is back."""

    incident: IncidentId
    resumed_at: float | None = None
    healed_at: float | None = None
    lost: str = ""
    """What it cost beyond time, where that is known."""


class IncidentSettled(msgspec.Struct, frozen=True, kw_only=True, tag="incident_settled"):
    """Time is up for other deaths that could explain this one."""

    incident: IncidentId
    verdict: Verdict | None = None
    """What the logs of all nodes say together at this moment; None where nobody looked."""


class StartDue(msgspec.Struct, frozen=True, kw_only=True, tag="start_due"):
    """The pause before a restart is over."""

    member: MemberId
    incarnation: Incarnation


class PortChosen(msgspec.Struct, frozen=True, kw_only=True, tag="port_chosen"):
    """A free port for the next start of all ranks of a wrapped command."""

    port: int
    incarnation: Incarnation


class StopRequested(msgspec.Struct, frozen=True, kw_only=True, tag="stop_requested"):
    """Somebody asked for the end of the job."""

    reason: str
    by: str = "operator"


class FrontGone(msgspec.Struct, frozen=True, kw_only=True, tag="front_gone"):
    """The front process ended without a word."""

    pid: int


class DrillMarked(msgspec.Struct, frozen=True, kw_only=True, tag="drill_marked"):
    """The next incident of this subject is a drill."""

    subject: str
    """Member or node."""
    note: str


class JobFinished(msgspec.Struct, frozen=True, kw_only=True, tag="job_finished"):
    """The controller has committed the last step."""

    step: int


class GraceOver(msgspec.Struct, frozen=True, kw_only=True, tag="grace_over"):
    """Members or nodes took longer to stop than they were given."""

    waited_for: str


Event = (
    MasterStarted
    | AgentConnected
    | AgentDisconnected
    | Reported
    | NodeLost
    | MemberVanished
    | HangConfirmed
    | SuspicionWithdrawn
    | MemberUnheard
    | IncidentMoved
    | IncidentSettled
    | StartDue
    | PortChosen
    | StopRequested
    | FrontGone
    | DrillMarked
    | JobFinished
    | GraceOver
)

# -- observations -------------------------------------------------------------------------------------------------------


class AgentPulsed(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeId
    pulse: Pulse


class ControllerPulsed(msgspec.Struct, frozen=True, kw_only=True):
    pulse: ControllerPulse


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time has passed."""


Observation = AgentPulsed | ControllerPulsed | Tick

# -- actions ------------------------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Send the order to the node's agent; again at every connection until it is done."""

    node: NodeId
    order: Order


class Propose(msgspec.Struct, frozen=True, kw_only=True):
    """Propose to the controller an epoch without these members."""

    leave: tuple[MemberId, ...]
    cause: str


class ChoosePort(msgspec.Struct, frozen=True, kw_only=True):
    """Find a free port and tell it by `PortChosen`."""

    incarnation: Incarnation


class Conclude(msgspec.Struct, frozen=True, kw_only=True):
    """The picture of now allows a conclusion: journal it and step it."""

    event: Event


Action = Send | Propose | ChoosePort | Conclude
