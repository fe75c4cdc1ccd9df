"""The one WebSocket to the master: hello, then reports until acknowledged and a picture every second; orders come down.

A lost master is tried again for ever, at its newest address, with a random pause; reports wait in the outbox meanwhile.
"""

import asyncio
import contextlib
import json
import os
import random
from collections.abc import Callable

import aiohttp
import msgspec
import structlog

from agents.config import Pace, bearer
from agents.outbox import Outbox
from aimaster.wire import codec
from aimaster.wire.actions import Order
from aimaster.wire.ids import NodeId, Term
from aimaster.wire.messages import Ack, Hello, MasterMessage, Pulse, Welcome
from aimaster.wire.places import ENV_MASTER_URL, RunPlaces

WELCOME_SECONDS = 10.0
HEARTBEAT_SECONDS = 5.0
LONGEST_MESSAGE_BYTES = 32 << 20
FIRST_PAUSE_SECONDS = 0.1
log = structlog.get_logger()


class LinkError(Exception):
    """The master said something that does not belong there."""


class Link:
    """Keeps the agent connected."""

    def __init__(
        self,
        run: RunPlaces,
        node: NodeId,
        outbox: Outbox,
        *,
        pace: Pace,
        session: aiohttp.ClientSession,
        hello: Callable[[], Hello],
        pulse: Callable[[], Pulse],
        on_welcome: Callable[[Term], None],
        on_order: Callable[[Order], None],
    ) -> None:
        self.connected = False
        self.accepted = False
        """A master has welcomed this agent at least once."""
        self.connections = 0
        self._run = run
        self._node = node
        self._outbox = outbox
        self._pace = pace
        self._session = session
        self._hello = hello
        self._pulse = pulse
        self._on_welcome = on_welcome
        self._on_order = on_order
        self._told = ""
        self._news = asyncio.Event()
        self._empty = asyncio.Event()

    def wake(self) -> None:
        """There is a new report."""
        self._news.set()

    async def run(self) -> None:
        """Connect, talk, connect again; ends only by cancellation."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            url = find_master(self._run)
            was = self.connections
            if url is not None:
                try:
                    await self._talk(url)
                except* (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError, LinkError) as group:
                    self._tell_loss(url, group.exceptions[0])
                self.connected = False
            pause = FIRST_PAUSE_SECONDS if self.connections > was else min(2 * pause, self._pace.reconnect_seconds)
            await asyncio.sleep(random.uniform(pause / 4, pause))  # noqa: S311 - spreads the agents, hides nothing

    def _tell_loss(self, url: str, error: BaseException) -> None:
        """Once for each reason: a master may be away for long."""
        reason = f"{type(error).__name__}: {error}"[:200]
        if reason != self._told:
            log.info("master_lost", url=url, error=reason)
        self._told = reason

    async def drain(self, seconds: float) -> bool:
        """Wait until the master has acknowledged everything; False when the time was too short."""
        if len(self._outbox):
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)
        return len(self._outbox) == 0

    def _acknowledge(self, sequence: int) -> None:
        self._outbox.acknowledge(sequence)
        if not len(self._outbox):
            self._empty.set()

    async def _talk(self, url: str) -> None:
        async with self._session.ws_connect(
            f"{url}/v1/agents/{self._node}",
            headers=bearer(self._run.token),
            heartbeat=HEARTBEAT_SECONDS,
            max_msg_size=LONGEST_MESSAGE_BYTES,
        ) as socket:
            await socket.send_bytes(codec.encode(self._hello()))
            welcome = _message(await socket.receive(timeout=WELCOME_SECONDS))
            if not isinstance(welcome, Welcome):
                raise LinkError(f"the master answered hello with {type(welcome).__name__}")
            self._on_welcome(welcome.term)
            self._acknowledge(welcome.acknowledged)
            self.connected = self.accepted = True
            self.connections += 1
            self._told = ""
            log.info("master_found", url=url, term=welcome.term, waiting=len(self._outbox))
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send(socket, welcome.acknowledged), name="send to master")
                group.create_task(self._receive(socket), name="receive from master")

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, sent: int) -> None:
        loop = asyncio.get_running_loop()
        next_pulse = loop.time()
        while True:
            self._news.clear()
            for report in self._outbox.after(sent):
                await socket.send_bytes(codec.encode(report))
                sent = report.sequence
            now = loop.time()
            if now >= next_pulse:
                await socket.send_bytes(codec.encode(self._pulse()))
                next_pulse = now + self._pace.pulse_seconds
            try:
                await asyncio.wait_for(self._news.wait(), max(0.01, next_pulse - loop.time()))
            except TimeoutError:
                continue

    async def _receive(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            message = _message(await socket.receive())
            match message:
                case Ack(sequence=sequence):
                    self._acknowledge(sequence)
                case Order():
                    self._on_order(message)
                case Welcome():
                    raise LinkError("a second welcome")


def find_master(run: RunPlaces) -> str | None:
    """Where the master is now; None while nobody says."""
    return os.environ.get(ENV_MASTER_URL) or _url_in(run.master)


def _url_in(path: os.PathLike[str]) -> str | None:
    try:
        with open(path, "rb") as file:
            url = json.load(file)["url"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(url)


def _message(message: aiohttp.WSMessage) -> Welcome | Ack | Order:
    if message.type is not aiohttp.WSMsgType.BINARY:
        raise LinkError(f"the master closed the connection ({message.type.name} {message.data!r})")
    return codec.decode(message.data, MasterMessage)  # type: ignore[arg-type]
