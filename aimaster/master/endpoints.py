"""The master's HTTP: what people, the front and the controller ask, and the agents' line.

GET  /v1/status  /v1/incidents  /v1/diagnosis  /v1/journal?from=N      read
POST /v1/stop  /v1/drill                                 operate
POST /v1/controller   GET /v1/agents/NODE                member
GET  /healthz  /readyz  /metrics                         open on loopback
"""

import asyncio
from typing import Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry

from aimaster.brain import overview
from aimaster.brain.events import ControllerPulsed, DrillMarked, StopRequested
from aimaster.brain.picture import picture
from aimaster.journal import JournalError, read_frames
from aimaster.master.intake import Intake
from aimaster.master.mind import Mind, describe
from aimaster.telemetry.tokens import Role, Tokens
from aimaster.telemetry.web import Turning, add_health, explain_errors, guard, problem, reply_json, reply_packed
from aimaster.wire import codec
from aimaster.wire.messages import ControllerPulse
from aimaster.wire.places import RunPlaces
from aimaster.wire.status import JobStatus

BELIEVE_SECONDS: Final = 3.0
MAX_BODY_BYTES: Final = 4 << 20
OPERATE: Final = frozenset({"/v1/stop", "/v1/drill"})


class ControllerAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a controller's pulse."""

    term: int
    stop: bool
    """The job is being stopped: deal nothing new."""


class StopBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/stop`."""

    reason: str = "no reason given"


class DrillBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/drill`."""

    member: str
    """Member, node, `master` or `agent-NODE`."""
    note: str = ""


class Endpoints:
    """Answers from the mind's state and view; changes only by events."""

    def __init__(self, mind: Mind, places: RunPlaces) -> None:
        self._mind = mind
        self._places = places

    def status_now(self) -> JobStatus:
        """The run now."""
        own = (f"storage.full: {self._mind.not_durable}",) if self._mind.not_durable else ()
        return picture(self._mind.state, self._mind.view, self._mind.clock(), own)

    async def status(self, _: web.Request) -> web.Response:
        return reply_json(self.status_now())

    async def incidents(self, _: web.Request) -> web.Response:
        return reply_json(self.status_now().incidents)

    async def diagnosis(self, _: web.Request) -> web.Response:
        """The verdict on everything seen so far, as `aimaster diagnose --json` gives it of finished logs."""
        view = self._mind.view
        verdict = msgspec.to_builtins(await self._mind.diagnose(view))
        return reply_json(verdict | {"read": overview.read(view)})

    async def stop(self, request: web.Request) -> web.Response:
        body = codec.decode_json(await request.read() or b"{}", StopBody)
        return await self._believe(StopRequested(reason=body.reason), "stopping")

    async def drill(self, request: web.Request) -> web.Response:
        body = codec.decode_json(await request.read(), DrillBody)
        return await self._believe(DrillMarked(subject=body.member, note=body.note), "marked")

    async def controller(self, request: web.Request) -> web.Response:
        pulse = codec.decode(await request.read(), ControllerPulse)
        known = next((m for m in self._mind.state.members.values() if m.role == "controller"), None)
        if known is not None and pulse.incarnation < known.incarnation:
            return problem(
                409, f"controller incarnation {pulse.incarnation} is past, {known.incarnation} was started", "end"
            )
        self._mind.observe(ControllerPulsed(pulse=pulse))
        ending = self._mind.state.ending
        stop = ending is not None and ending.outcome != "finished"
        return reply_packed(ControllerAnswer(term=self._mind.state.term, stop=stop))

    async def journal(self, request: web.Request) -> web.StreamResponse:
        first = request.query.get("from", "0")
        if not first.isdecimal():
            return problem(400, f"from={first} is no number", "give the sequence of the first record wanted")
        try:
            lines = await asyncio.to_thread(lambda: b"".join(describe(read_frames(self._places.journal), int(first))))
        except (JournalError, OSError) as error:
            return problem(500, f"the journal cannot be read: {error}", "look at the master's log")
        return web.Response(body=lines, content_type="application/x-ndjson")

    async def _believe(self, event: StopRequested | DrillMarked, word: str) -> web.Response:
        try:
            async with asyncio.timeout(BELIEVE_SECONDS):
                await self._mind.believe(event)
        except TimeoutError:
            reason = self._mind.not_durable or "the master is busy"
            return problem(
                503, f"not journaled within {BELIEVE_SECONDS:.0f} s: {reason}", "it is tried further; ask /v1/status"
            )
        return reply_json({"ok": True, "state": word})


def make_app(
    mind: Mind, intake: Intake, endpoints: Endpoints, tokens: Tokens, turning: Turning, registry: CollectorRegistry
) -> web.Application:
    """Put the routes together."""

    def needed(request: web.Request) -> Role:
        if request.path.startswith("/v1/agents/") or request.path == "/v1/controller":
            return "member"
        return "operate" if request.path in OPERATE else "read"

    @web.middleware
    async def when_ready(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path.startswith("/v1/") and not mind.ready:
            return problem(503, "the master has not taken up the run yet", "try again in a second")
        return await handler(request)

    app = web.Application(
        middlewares=[explain_errors, guard(tokens, needed), when_ready], client_max_size=MAX_BODY_BYTES
    )
    app.router.add_get("/v1/agents/{node}", intake.serve)
    app.router.add_get("/v1/status", endpoints.status)
    app.router.add_get("/v1/incidents", endpoints.incidents)
    app.router.add_get("/v1/diagnosis", endpoints.diagnosis)
    app.router.add_get("/v1/journal", endpoints.journal)
    app.router.add_post("/v1/controller", endpoints.controller)
    app.router.add_post("/v1/stop", endpoints.stop)
    app.router.add_post("/v1/drill", endpoints.drill)
    ready = {
        "journal": lambda: None if mind.ready else "not replayed yet, or the start could not be journaled",
        "storage": lambda: mind.not_durable or None,
    }
    add_health(app, live={"event loop": turning.check}, ready=ready, registry=registry)
    return app
