"""The agents' WebSocket: hello, welcome; then reports, each acknowledged once it is journaled, and pulses, which only move the view.

One line for each node, the newest wins. A line on which nothing comes for SILENT_SECONDS is closed; what was not acknowledged is
sent again on the next, and known by (node, outbox, sequence).
"""

import asyncio
import contextlib
from typing import Final

import msgspec
import structlog
from aiohttp import WSMsgType, web

from aimaster.brain.events import AgentConnected, AgentDisconnected, AgentPulsed, Reported
from aimaster.master.executor import Executor, Line
from aimaster.master.mind import Mind
from aimaster.telemetry.web import problem
from aimaster.wire import PROTOCOL_VERSION, codec
from aimaster.wire.ids import NodeId
from aimaster.wire.messages import Ack, AgentMessage, Hello, Pulse, Report, Welcome

HELLO_SECONDS: Final = 10.0
SILENT_SECONDS: Final = 5.0
SEND_SECONDS: Final = 5.0
HEARTBEAT_SECONDS: Final = 5.0
MAX_MESSAGE_BYTES: Final = 32 << 20
MAX_REPORTS: Final = 1000
REFUSED: Final = 4400
"""Close code: the agent is not of this run or speaks another protocol; the reason says which."""
log = structlog.get_logger()


class RefusedError(Exception):
    """What the agent said does not belong here."""


class _LineEndedError(Exception):
    """The line is over; ends its other tasks."""


class Intake:
    """Takes what agents say."""

    def __init__(self, mind: Mind, executor: Executor) -> None:
        self.reports = 0
        self.acknowledged = 0
        self.pulses = 0
        self._mind = mind
        self._executor = executor

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """`GET /v1/agents/NODE`."""
        node = NodeId(request.match_info["node"])
        if not self._mind.ready or node not in self._mind.state.nodes:
            return problem(404, f"{node} is no node of this run", "the nodes are named in RUN/plan.json")
        socket = web.WebSocketResponse(heartbeat=HEARTBEAT_SECONDS, max_msg_size=MAX_MESSAGE_BYTES, timeout=1.0)
        await socket.prepare(request)
        line = Line(node, socket, self._mind.clock())
        try:
            hello = await self._hello(line)
            await self._talk(line, hello)
        except RefusedError as error:
            log.warning("agent_refused", node=node, error=str(error))
            await socket.close(code=REFUSED, message=str(error).encode()[:120])
        except (_LineEndedError, ConnectionError, TimeoutError) as error:
            log.info("agent_line_ended", node=node, why=str(error)[:200] or type(error).__name__)
        finally:
            await self._forget(line)
        return socket

    def miss(self) -> None:
        """Say again which agents are not on the line although they are believed to be."""
        for node in self._mind.state.nodes.values():
            if node.state == "connected" and node.node not in self._executor.lines:
                with contextlib.suppress(asyncio.QueueFull):
                    self._mind.tell(AgentDisconnected(node=node.node, seen_at=self._mind.clock()))

    async def close(self) -> None:
        """Close all lines; the agents look for the next master."""
        for line in list(self._executor.lines.values()):
            await line.socket.close(code=1001, message=b"the master ends")

    async def _hello(self, line: Line) -> Hello:
        try:
            message = await line.socket.receive(timeout=HELLO_SECONDS)
        except TimeoutError as error:
            raise RefusedError("no hello came") from error
        hello = _decode(message.data) if message.type is WSMsgType.BINARY else None
        if not isinstance(hello, Hello):
            raise RefusedError("the first message was no hello")
        if hello.protocol != PROTOCOL_VERSION:
            raise RefusedError(f"the agent speaks protocol {hello.protocol}, this master {PROTOCOL_VERSION}")
        run_id = self._mind.state.plan.run_id
        if (hello.run_id, hello.node) != (run_id, line.node):
            raise RefusedError(f"the agent is {hello.node} of run {hello.run_id}, this is {line.node} of run {run_id}")
        return hello

    async def _talk(self, line: Line, hello: Hello) -> None:
        older = self._executor.lines.get(line.node)
        self._executor.lines[line.node] = line
        if older is not None:
            older.full.set()
        await self._mind.believe(AgentConnected(hello=hello))
        state = self._mind.state
        welcome = Welcome(term=state.term, acknowledged=state.nodes[line.node].acknowledged)
        await line.socket.send_bytes(codec.encode(welcome))
        log.info(
            "agent_connected",
            node=line.node,
            pid=hello.pid,
            members=len(hello.members),
            acknowledged=welcome.acknowledged,
        )
        reports: asyncio.Queue[Report] = asyncio.Queue(MAX_REPORTS)
        why: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send(line), name=f"send to {line.node}")
                group.create_task(self._believe(line, hello.outbox_id, reports), name=f"believe {line.node}")
                group.create_task(self._until_full(line), name=f"watch {line.node}")
                await self._read(line, reports)
        except* (_LineEndedError, ConnectionError, TimeoutError) as ended:
            why = ended.exceptions[0]
        if why is not None:
            raise why

    async def _read(self, line: Line, reports: asyncio.Queue[Report]) -> None:
        """Take messages apart; a report waits its turn, so that pulses pass while the disk is full."""
        while True:
            try:
                message = await line.socket.receive(timeout=SILENT_SECONDS)
            except TimeoutError as error:
                raise _LineEndedError(f"nothing came for {SILENT_SECONDS:.0f} s") from error
            line.heard_at = self._mind.clock()
            if message.type is not WSMsgType.BINARY:
                raise _LineEndedError(f"closed by the agent ({message.type.name})")
            match _decode(message.data):
                case Report() as report:
                    self.reports += 1
                    await reports.put(report)
                case Pulse() as pulse:
                    self.pulses += 1
                    self._mind.observe(AgentPulsed(node=line.node, pulse=pulse))
                case Hello():
                    raise _LineEndedError("a second hello")

    async def _believe(self, line: Line, outbox_id: str, reports: asyncio.Queue[Report]) -> None:
        while True:
            report = await reports.get()
            if report.sequence > self._mind.state.nodes[line.node].acknowledged:
                await self._mind.believe(Reported(node=line.node, outbox_id=outbox_id, report=report))
            self.acknowledged += 1
            line.put(Ack(sequence=report.sequence))

    async def _send(self, line: Line) -> None:
        while True:
            message = await line.outgoing.get()
            async with asyncio.timeout(SEND_SECONDS):
                await line.socket.send_bytes(codec.encode(message))

    async def _until_full(self, line: Line) -> None:
        await line.full.wait()
        raise _LineEndedError("replaced by a newer line, or the agent takes nothing any more")

    async def _forget(self, line: Line) -> None:
        if self._executor.lines.get(line.node) is line:
            del self._executor.lines[line.node]
            with contextlib.suppress(asyncio.QueueFull):  # said again by the next tick
                self._mind.tell(AgentDisconnected(node=line.node, seen_at=line.heard_at))
        await line.socket.close()


def _decode(data: bytes) -> Hello | Report | Pulse:
    try:
        return codec.decode(data, AgentMessage)  # type: ignore[arg-type]  # a union is a type to msgspec
    except msgspec.MsgspecError as error:
        raise _LineEndedError(f"a message that is not understood: {error}") from error
