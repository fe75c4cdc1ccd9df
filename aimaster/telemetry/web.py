"""What every HTTP server of ours has in common: who may ask, errors that say what to do, health and metrics.

Health and metrics are open on loopback; all else needs a role's token. Where there are none, nobody has one.
"""

import ipaddress
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry
from prometheus_client.aiohttp import make_aiohttp_handler

from aimaster.telemetry.tokens import Role, Tokens, may
from aimaster.wire import codec

OPEN: Final = frozenset({"/healthz", "/readyz", "/metrics"})
Check = Callable[[], str | None]
"""None when well, else the reason."""


def problem(status: int, error: str, hint: str = "") -> web.Response:
    """An answer that says what happened and what the asker can do."""
    body = codec.encode_json({"error": error, "hint": hint})
    return web.Response(status=status, body=body, content_type="application/json")


def reply_json(record: Any) -> web.Response:
    """A record as JSON."""
    return web.Response(body=codec.encode_json(record), content_type="application/json")


def reply_packed(record: Any) -> web.Response:
    """A record as msgpack."""
    return web.Response(body=codec.encode(record), content_type=codec.CONTENT_TYPE)


def guard(tokens: Tokens, needed: Callable[[web.Request], Role]) -> Middleware:
    """Let pass who has the role that `needed` names for the request; without tokens nobody has one."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        near = is_loopback(request.remote)
        if near and request.path in OPEN:
            return await handler(request)
        have = tokens.role_of(request.headers.get("Authorization", ""))
        role: Role = "read" if request.path in OPEN else needed(request)
        if have is None:
            return problem(401, "no valid token", "send `Authorization: Bearer TOKEN` with a secret of RUN/token")
        if not may(have, role):
            return problem(
                403, f"the token of role {have} is not enough", f"use the secret of role {role} of RUN/token"
            )
        return await handler(request)

    return check


def is_loopback(remote: str | None) -> bool:
    """Whether the peer is on this machine; a unix socket's peer is."""
    if not remote:
        return True
    try:
        return ipaddress.ip_address(remote.partition("%")[0]).is_loopback
    except ValueError:
        return False


@web.middleware
async def explain_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Turn a body that is no record into a 400, and an unknown path into an answer like all others."""
    try:
        return await handler(request)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        return problem(
            400, f"the body of {request.method} {request.path} is not understood: {error}", "see the protocol's records"
        )
    except web.HTTPNotFound:
        return problem(404, f"there is no {request.path} here", "")
    except web.HTTPMethodNotAllowed as error:
        return problem(
            405, f"{request.path} does not take {request.method}", f"use {', '.join(sorted(error.allowed_methods))}"
        )
    except web.HTTPRequestEntityTooLarge:
        return problem(413, "the body is too large", "")


def add_health(
    app: web.Application, *, live: Mapping[str, Check], ready: Mapping[str, Check], registry: CollectorRegistry
) -> None:
    """Add /healthz, /readyz and /metrics."""

    def answer(checks: Mapping[str, Check]) -> web.Response:
        reasons = {name: check() for name, check in checks.items()}
        ok = all(reason is None for reason in reasons.values())
        body = {"ok": ok, "checks": {name: reason or "ok" for name, reason in reasons.items()}}
        return web.Response(status=200 if ok else 503, body=codec.encode_json(body), content_type="application/json")

    async def healthz(_: web.Request) -> web.Response:
        return answer(live)

    async def readyz(_: web.Request) -> web.Response:
        return answer(ready)

    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", make_aiohttp_handler(registry))


class Turning:
    """The health of an event loop: whether it turned lately. `turn` is called by a task of that loop."""

    def __init__(self, within_seconds: float = 5.0) -> None:
        self._within_seconds = within_seconds
        self._at = time.monotonic()

    def turn(self) -> None:
        self._at = time.monotonic()

    def check(self) -> str | None:
        stood_seconds = time.monotonic() - self._at
        return None if stood_seconds < self._within_seconds else f"the event loop stood still for {stood_seconds:.1f} s"
