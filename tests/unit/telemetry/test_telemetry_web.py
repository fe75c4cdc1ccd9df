"""Tokens and the common parts of our servers."""

import secrets

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request
from prometheus_client import CollectorRegistry, Gauge

from aimaster.telemetry.tokens import ROLES, TokenFileError, Tokens, may, read_tokens, secret_of
from aimaster.telemetry.web import Turning, add_health, explain_errors, guard, is_loopback, reply_json
from aimaster.wire import codec
from aimaster.wire.checkpoint import Version

SECRETS = {role: secrets.token_hex(16) for role in ROLES}


def token_file(tmp_path, text: str, mode: int = 0o600):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_file_gives_a_secret_for_each_role(tmp_path):
    """`role=hex` lines; each secret is of its role alone, and nothing is of none."""
    tokens = read_tokens(token_file(tmp_path, "".join(f"{role}={secret}\n" for role, secret in SECRETS.items())))
    for role, secret in SECRETS.items():
        assert tokens.role_of(f"Bearer {secret}") == role
        assert tokens.role_of(f"Basic {secret}") is None
        assert tokens.role_of(secret) is None
        assert secret not in repr(tokens)
    assert tokens.role_of("") is None
    assert tokens.role_of("Bearer ") is None
    assert tokens.role_of("Bearer wrong-ünicode") is None


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("read=" + "a" * 32, 0o644, "may be read by others"),
        ("boss=" + "a" * 32, 0o600, "role=hex"),
        ("read=short", 0o600, "role=hex"),
        ("read=" + "ü" * 32, 0o600, "role=hex"),
        ("\x00\x01 garbage ö", 0o600, "role=hex"),
        ("", 0o600, "is empty"),
        ("\n\n", 0o600, "is empty"),
    ],
)
def test_a_token_file_that_cannot_be_trusted_is_refused(tmp_path, text, mode, says):
    """Readable by others, an unknown role, or a guessable secret: the message says what to do."""
    with pytest.raises(TokenFileError, match=says):
        read_tokens(token_file(tmp_path, text, mode))


def test_without_a_file_no_server_starts(tmp_path):
    """No token is no authentication, and that is refused."""
    with pytest.raises(TokenFileError, match="no token file"):
        read_tokens(tmp_path / "none")


def test_a_client_keeps_what_it_read(tmp_path):
    """A token file that is deleted or damaged in a live run changes nothing for those that have read it; a new one is taken."""
    path = token_file(tmp_path, "".join(f"{role}={secret}\n" for role, secret in SECRETS.items()))
    assert secret_of(path, "member") == SECRETS["member"]
    path.write_text("garbage")
    assert secret_of(path, "member") == SECRETS["member"]
    path.unlink()
    assert secret_of(path, "member") == SECRETS["member"]
    token_file(tmp_path, "member=" + "b" * 32)
    assert secret_of(path, "member") == "b" * 32
    assert secret_of(tmp_path / "none", "member") == ""


@pytest.mark.parametrize(
    ("have", "needed", "answer"),
    [
        ("read", "read", True),
        ("operate", "read", True),
        ("member", "read", True),
        ("read", "operate", False),
        ("member", "operate", False),
        ("operate", "member", False),
        ("operate", "operate", True),
        (None, "read", False),
    ],
)
def test_everybody_with_a_secret_may_read_and_no_more_than_its_role(have, needed, answer):
    assert may(have, needed) is answer


@pytest.mark.parametrize(
    ("remote", "near"), [("127.0.0.1", True), ("::1", True), (None, True), ("10.0.0.3", False), ("nonsense", False)]
)
def test_loopback_is_told_from_elsewhere(remote, near):
    assert is_loopback(remote) is near


async def served(tokens: Tokens, turning: Turning | None = None) -> TestClient:
    turning = turning or Turning()
    app = web.Application(
        middlewares=[explain_errors, guard(tokens, lambda request: "operate" if request.method == "POST" else "read")]
    )

    async def version(request: web.Request) -> web.Response:
        return reply_json(codec.decode(await request.read(), Version))

    app.router.add_post("/v1/version", version)
    registry = CollectorRegistry()
    Gauge("test_value", "A value.", registry=registry).set(7)
    ready = {"journal": lambda: "not replayed yet"}
    add_health(app, live={"event loop": turning.check}, ready=ready, registry=registry)
    client = TestClient(TestServer(app))
    await client.start_server()
    return client


async def test_answers_say_what_happened_and_what_to_do():
    """No token, too small a role, a body that is no record, an unknown path: each a JSON object with error and hint."""
    client = await served(Tokens(secrets=SECRETS))
    try:
        post = {"path": "/v1/version", "data": codec.encode(Version(lineage=0, step=1))}
        assert (await client.post(**post)).status == 401
        refused = await client.post(**post, headers={"Authorization": f"Bearer {SECRETS['read']}"})
        assert (refused.status, "operate" in (await refused.json())["hint"]) == (403, True)
        operate = {"Authorization": f"Bearer {SECRETS['operate']}"}
        assert await (await client.post(**post, headers=operate)).json() == {"lineage": 0, "step": 1}
        bad = await client.post("/v1/version", data=codec.encode({"lineage": "x", "step": 1}), headers=operate)
        assert (bad.status, "$.lineage" in (await bad.json())["error"]) == (400, True)
        assert (await client.get("/v1/nothing", headers=operate)).status == 404
        wrong = await client.get("/v1/version", headers=operate)
        assert (wrong.status, "POST" in (await wrong.json())["hint"]) == (405, True)
    finally:
        await client.close()


async def test_health_gives_a_reason_for_each_check():
    """Ready or not, alive or not, with the reason; metrics beside them. All open on loopback."""
    client = await served(Tokens(secrets=SECRETS), Turning(within_seconds=-1.0))
    try:
        ready, live, metrics = await client.get("/readyz"), await client.get("/healthz"), await client.get("/metrics")
        assert (ready.status, (await ready.json())["checks"]["journal"]) == (503, "not replayed yet")
        assert (live.status, "stood still" in (await live.json())["checks"]["event loop"]) == (503, True)
        assert "test_value 7.0" in await metrics.text()
    finally:
        await client.close()


async def test_without_tokens_nobody_may_ask():
    """A server that has no secrets lets nobody in, from this machine neither; health stays open there."""
    check = guard(Tokens(), lambda _: "read")

    async def handler(_: web.Request) -> web.Response:
        return web.Response(text="fine")

    def ask(remote: str, path: str = "/v1/status") -> web.Request:
        return make_mocked_request("GET", path).clone(remote=remote)

    assert (await check(ask("127.0.0.1"), handler)).status == 401
    assert (await check(ask("10.0.0.3"), handler)).status == 401
    assert (await check(ask("127.0.0.1", "/healthz"), handler)).status == 200
