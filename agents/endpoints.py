"""What the agent answers: to peers and people on TCP, with a token; to its own members on the unix socket, which only they can open.

TCP   GET /v1/snapshots  /metrics /healthz /readyz (bytes of snapshots go over plain sockets: easyckpt.shardserver)
unix  POST /v1/snapshots/sealed  POST /v1/snapshots/trouble  POST /v1/snapshots/fetch  GET /v1/node
"""

import contextlib
import os
from pathlib import Path
from typing import Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry

from agents.keeper import Keeper
from agents.peers import Peers
from aimaster.telemetry.tokens import Role, Tokens
from aimaster.telemetry.web import Turning, add_health, explain_errors, guard, problem, reply_json, reply_packed
from aimaster.wire import codec
from aimaster.wire.checkpoint import FetchRequest, SaveTrouble, SealedNotice, SealedReply
from easyckpt import layout

LONGEST_BODY_BYTES = 1 << 20
"""Of a request that is read at once; copies are streamed and bounded by their own header."""
CLOSE_SECONDS = 2.0


class Told(Protocol):
    """What the endpoints show of the node."""

    def describe(self) -> dict[str, object]: ...
    def connection(self) -> str | None: ...


class Endpoints:
    """Both servers; `start` them, then `url` is known."""

    def __init__(self, node: Told, keeper: Keeper, peers: Peers, tokens: Tokens, registry: CollectorRegistry) -> None:
        self.url = ""
        self._node = node
        self._keeper = keeper
        self._peers = peers
        self._tokens = tokens
        self._registry = registry
        self.turning = Turning()
        self._runners: list[web.AppRunner] = []

    async def start(self, host: str, port: int, socket: Path) -> None:
        """Listen on TCP (`port` 0: a free one) and on the socket; raises OSError when the port is taken."""
        outer = web.Application(
            middlewares=[explain_errors, guard(self._tokens, _needed)], client_max_size=LONGEST_BODY_BYTES
        )
        outer.add_routes([web.get("/v1/snapshots", self._list)])
        add_health(
            outer,
            live={"event_loop": self.turning.check},
            ready={"master": self._node.connection},
            registry=self._registry,
        )
        inner = web.Application(middlewares=[explain_errors], client_max_size=LONGEST_BODY_BYTES)
        inner.add_routes(
            [
                web.post("/v1/snapshots/sealed", self._sealed),
                web.post("/v1/snapshots/trouble", self._trouble),
                web.post("/v1/snapshots/fetch", self._fetch),
                web.get("/v1/snapshots", self._list),
                web.get("/v1/node", self._describe),
            ]
        )
        for application in (outer, inner):
            runner = web.AppRunner(application, access_log=None, shutdown_timeout=CLOSE_SECONDS)
            await runner.setup()
            self._runners.append(runner)
        site = web.TCPSite(self._runners[0], host, port)
        await site.start()
        address = self._runners[0].addresses[0]
        self.url = f"http://{address[0]}:{address[1]}"
        with contextlib.suppress(FileNotFoundError):  # of an agent that was killed; the node's lock is ours
            os.unlink(socket)
        await web.UnixSite(self._runners[1], str(socket)).start()

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    # -- snapshots ---------------------------------------------------------------------------------------------------

    async def _list(self, request: web.Request) -> web.StreamResponse:
        places = self._keeper.places()
        if "json" in request.headers.get("Accept", ""):
            return reply_json(places)
        return reply_packed(places)

    async def _sealed(self, request: web.Request) -> web.StreamResponse:
        notice = codec.decode(await request.read(), SealedNotice)
        if layout.parse_name(notice.name) is None:
            return problem(400, f"{notice.name!r} is no segment name", "send the file name of the sealed segment")
        self._keeper.note_sealed(notice)
        return reply_packed(SealedReply(flush_trouble=self._keeper.flush_trouble))

    async def _trouble(self, request: web.Request) -> web.StreamResponse:
        self._keeper.note_trouble(codec.decode(await request.read(), SaveTrouble))
        return web.Response()

    async def _fetch(self, request: web.Request) -> web.StreamResponse:
        wanted = codec.decode(await request.read(), FetchRequest)
        reply = await self._peers.fetch(wanted)
        return reply_packed(reply)

    # -- state -------------------------------------------------------------------------------------------------------

    async def _describe(self, _request: web.Request) -> web.StreamResponse:
        return reply_json(self._node.describe())


def _needed(_request: web.Request) -> Role:
    """Looking is for everybody with a secret."""
    return "read"
