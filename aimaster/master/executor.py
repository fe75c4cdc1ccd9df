"""Carries out what the brain decided: orders to agents, proposals to the controller, free ports.

An order is put on its agent's line at once; the state keeps it until the agent says that it is done, and the engine gives it
again at every connection, so a line may break at any moment.
"""

import asyncio
import os
import socket
from typing import Final

import aiohttp
import msgspec
import structlog
from aiohttp import web

from aimaster.brain import epochs
from aimaster.brain.events import Action, ChoosePort, Conclude, PortChosen, Propose, Send
from aimaster.master.mind import Mind
from aimaster.telemetry.tokens import Tokens
from aimaster.wire import codec
from aimaster.wire.actions import Order
from aimaster.wire.ids import Incarnation, NodeId
from aimaster.wire.messages import Ack
from aimaster.wire.places import ENV_CONTROLLER_URL, RunPlaces
from aimaster.wire.topology import EpochProposal

MAX_OUTGOING: Final = 1000
MAX_PROPOSALS: Final = 100
PROPOSAL_SECONDS: Final = 5.0
"""After two seconds without one the controller opens the epoch itself; later ones are needless."""
ASK_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 0.1
PORT_SECONDS: Final = 2.0
log = structlog.get_logger()


class Line:
    """The open connection of one agent."""

    def __init__(self, node: NodeId, socket: web.WebSocketResponse, now: float) -> None:
        self.node = node
        self.socket = socket
        self.heard_at = now
        self.outgoing: asyncio.Queue[Ack | Order] = asyncio.Queue(MAX_OUTGOING)
        self.full = asyncio.Event()
        """Set when the agent takes nothing any more; the line is closed, and open orders are given again on the next."""

    def put(self, message: Ack | Order) -> None:
        try:
            self.outgoing.put_nowait(message)
        except asyncio.QueueFull:
            self.full.set()


class Executor:
    """Who carries out actions."""

    def __init__(self, mind: Mind, places: RunPlaces, tokens: Tokens, session: aiohttp.ClientSession) -> None:
        self.lines: dict[NodeId, Line] = {}
        self.orders_sent = 0
        self.proposals_sent = 0
        self._mind = mind
        self._places = places
        self._tokens = tokens
        self._session = session
        self._proposals: asyncio.Queue[Propose] = asyncio.Queue(MAX_PROPOSALS)
        self._port_asked: tuple[int, float] = (-1, 0.0)

    def perform(self, action: Action) -> None:
        """Begin to carry out an action; never blocks."""
        match action:
            case Send(node=node, order=order):
                line = self.lines.get(node)
                if line is not None:
                    line.put(order)
                    self.orders_sent += 1
                log.info(
                    "order", node=node, order=order.order_id, action=type(order.action).__name__, cause=order.cause
                )
            case Propose():
                if not self._proposals.full():
                    self._proposals.put_nowait(action)
            case ChoosePort(incarnation=incarnation):
                self._choose_port(incarnation)
            case Conclude(event=event):
                self._mind.tell(event)

    def _choose_port(self, incarnation: Incarnation) -> None:
        asked, at = self._port_asked
        now = self._mind.clock()
        if asked == incarnation and now - at < PORT_SECONDS:
            return  # its answer is on its way
        self._port_asked = (incarnation, now)
        self._mind.tell(PortChosen(port=free_port(), incarnation=incarnation))

    async def run(self) -> None:
        """Make proposals one after the other; ends only by cancellation."""
        while True:
            wanted = await self._proposals.get()
            try:
                async with asyncio.timeout(PROPOSAL_SECONDS):
                    await self._propose(wanted)
            except TimeoutError:
                log.warning("proposal_given_up", leave=wanted.leave, cause=wanted.cause)

    async def _propose(self, wanted: Propose) -> None:
        """Propose until the controller takes it, or tells of an epoch that needs no such proposal."""
        while True:
            pulse = self._mind.view.controller
            proposal = epochs.proposal(pulse, wanted.leave, term=self._mind.state.term, cause=wanted.cause)
            if proposal is None and pulse is not None:
                return
            url = self._controller_url()
            if proposal is not None and url and await self._ask(url, proposal):
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _ask(self, url: str, proposal: EpochProposal) -> bool:
        self.proposals_sent += 1
        secret = self._tokens.secrets.get("member", "")
        headers = {"Content-Type": codec.CONTENT_TYPE} | ({"Authorization": f"Bearer {secret}"} if secret else {})
        timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
        try:
            async with self._session.post(
                f"{url}/v1/epoch", data=codec.encode(proposal), headers=headers, timeout=timeout
            ) as reply:
                log.info(
                    "proposal",
                    replaces=proposal.replaces,
                    leave=proposal.leave,
                    cause=proposal.cause,
                    status=reply.status,
                )
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("proposal_unanswered", url=url, error=str(error)[:200])
            return False

    def _controller_url(self) -> str:
        """Where the controller is: as set, as it last announced itself, as it last said."""
        if url := os.environ.get(ENV_CONTROLLER_URL):
            return url
        try:
            return str(msgspec.json.decode(self._places.controller.read_bytes())["url"])
        except (OSError, msgspec.DecodeError, KeyError, TypeError):
            pulse = self._mind.view.controller
            return pulse.url if pulse is not None else ""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
