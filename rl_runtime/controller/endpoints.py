"""The controller's HTTP doors: records in, words out. Who may use which, and what an error says.

    POST /v1/turn  /v1/rollout/{lease,stream,complete}  /v1/deaths  /v1/epoch      msgpack in, msgpack out
    GET  /v1/status (JSON)  /metrics  /healthz  /readyz

503 means: not now, send it again. 4xx means: sending it again will not help.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aimaster.telemetry.tokens import Role, Tokens
from aimaster.telemetry.web import Turning, add_health, explain_errors, guard, problem, reply_json, reply_packed
from aimaster.wire.codec import decode
from aimaster.wire.ids import Incarnation
from aimaster.wire.messages import DeathNotice
from aimaster.wire.rollout import CompleteRequest, LeaseRequest, StreamRequest
from aimaster.wire.topology import EpochProposal
from aimaster.wire.training import Turn
from rl_runtime.controller.desk import Desk, NotNowError
from rl_runtime.controller.errors import LedgerBrokenError, MessageError
from rl_runtime.controller.metrics import make_registry
from rl_runtime.controller.pulse import make_pulse

LARGEST_BODY_BYTES = 256 << 20

T = TypeVar("T")


def make_app(
    desk: Desk, tokens: Tokens, *, url: Callable[[], str], incarnation: Incarnation, turning: Turning
) -> web.Application:
    """Return the HTTP application around a desk."""
    app = web.Application(
        middlewares=[explain_errors, guard(tokens, _needed_role), _end_when_broken(desk), _explain_refusals],
        client_max_size=LARGEST_BODY_BYTES,
    )

    def answers(
        kind: type[T], answer: Callable[[T], Awaitable[object]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            return reply_packed(await answer(decode(await request.read(), kind)))

        return handle

    async def deaths(request: web.Request) -> web.Response:
        settled = await desk.death(decode(await request.read(), DeathNotice))
        return (
            reply_json({"settled": True})
            if settled
            else problem(503, "the epoch without it is not open yet", "send the notice again")
        )

    async def epoch(request: web.Request) -> web.Response:
        taken, current = await desk.propose(decode(await request.read(), EpochProposal))
        if taken:
            return reply_packed(current)
        return problem(
            409,
            f"epoch {current.number} is current",
            "look at the current epoch and propose again if it is still needed",
        )

    async def status(_: web.Request) -> web.Response:
        pulse = make_pulse(desk, url=url(), incarnation=incarnation)
        return reply_json({"pulse": pulse, "epoch": desk.ledger.account.epoch, "findings": list(desk.group.findings)})

    app.router.add_post("/v1/turn", answers(Turn, desk.turn))
    app.router.add_post("/v1/rollout/lease", answers(LeaseRequest, desk.lease))
    app.router.add_post("/v1/rollout/stream", answers(StreamRequest, desk.stream))
    app.router.add_post("/v1/rollout/complete", answers(CompleteRequest, desk.complete))
    app.router.add_post("/v1/deaths", deaths)
    app.router.add_post("/v1/epoch", epoch)
    app.router.add_get("/v1/status", status)
    add_health(app, live={"loop": turning.check}, ready={"ledger": lambda: _ready(desk)}, registry=make_registry(desk))
    return app


def _needed_role(request: web.Request) -> Role:
    return "read" if request.method == "GET" else "member"


def _ready(desk: Desk) -> str | None:
    return str(desk.ledger.trouble) if desk.ledger.trouble is not None else None


def _end_when_broken(desk: Desk) -> Middleware:
    """A record that cannot follow is a defect: the process ends with it, rather than answer 500 for ever."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except LedgerBrokenError as error:
            desk.broken = error
            return problem(500, str(error), "the controller ends; it will be started again")

    return check


@web.middleware
async def _explain_refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except NotNowError as error:
        return problem(503, f"not kept: {error}", "send it again")
    except MessageError as error:
        return problem(400, str(error), "the sender is at fault; sending it again will not help")
