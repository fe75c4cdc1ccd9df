"""Secrets stay on the node: every shape that must be hidden, and lines that must stay as they are."""

import io
import json
import logging

import pytest
import structlog

from aimaster.telemetry.logs import set_up_logs
from aimaster.telemetry.scrub import HIDDEN, MAX_LINE_CHARACTERS, excerpt, scrub

SECRET = "s3cr3tValue99"


@pytest.mark.parametrize(
    "line",
    [
        f"password={SECRET}",
        f"DB_PASSWORD: {SECRET}",
        f'{{"api_key": "{SECRET}"}}',
        f"export AWS_SECRET_ACCESS_KEY={SECRET}",
        f"curl -H 'Authorization: Bearer {SECRET}' http://host",
        f"Authorization: Basic {SECRET}",
        f"--wandb-token {SECRET} --lr 1",
        f"redis://user:{SECRET}@host:6379/0",
        f"HF_TOKEN={SECRET}",
    ],
)
def test_a_secret_is_hidden_and_its_name_stays(line):
    """The value goes, the rest of the line can still be understood."""
    assert SECRET not in scrub(line)
    assert HIDDEN in scrub(line)
    assert scrub(line).startswith(line[:4])


@pytest.mark.parametrize(
    "token",
    [
        "hf_" + "a" * 30,
        "sk-" + "b" * 30,
        "ghp_" + "c" * 36,
        "AKIA" + "D" * 16,
        "eyJ" + "a" * 12 + "." + "b" * 12 + ".c",
    ],
)
def test_known_tokens_are_hidden_wherever_they_stand(token):
    """Some tokens are known by their first letters."""
    assert token not in scrub(f"loaded with {token} from the hub")


@pytest.mark.parametrize(
    "line",
    [
        "step 12 tokens/s 2450 loss 0.3",
        "max_tokens: 64",
        "tokenizer: LlamaTokenizerFast",
        "ValueError: could not find the author in row 3",
        "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8106",
        "http://127.0.0.1:8080/v1/status",
        "pad_token = None",
    ],
)
def test_ordinary_lines_stay(line):
    """What only looks like a secret is left alone: a verdict rests on these lines."""
    assert scrub(line) == line


def test_an_excerpt_is_bounded_and_keeps_the_newest():
    """At most so many lines and characters; the last lines are those that count."""
    lines = [f"line {number}" for number in range(100)] + ["y" * 10_000, f"password={SECRET}\n"]
    kept = excerpt(lines)
    assert len(kept) == 50
    assert kept[-1] == f"password={HIDDEN}"
    assert len(kept[-2]) == MAX_LINE_CHARACTERS
    assert len(excerpt(["z" * 1900] * 50)) == 8
    assert excerpt([]) == ()


def test_logs_are_json_lines_with_the_bound_fields_and_without_secrets():
    """Off a terminal each line is one object; ours and the standard library's logs look the same."""
    out = io.StringIO()
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        set_up_logs(stream=out, job="tiny", role="master")
        structlog.get_logger().info("order", node="node-0", url=f"redis://u:{SECRET}@h")
        logging.getLogger("other").warning("password=%s", SECRET)
    finally:
        root.handlers[:], _ = before[0], root.setLevel(before[1])
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    ours, theirs = (json.loads(line) for line in out.getvalue().splitlines())
    assert list(ours)[:6] == ["ts", "level", "event", "job", "node", "role"]
    assert (ours["event"], ours["job"], ours["node"], ours["role"], ours["level"]) == (
        "order",
        "tiny",
        "node-0",
        "master",
        "info",
    )
    assert ours["ts"].endswith("Z")
    assert theirs["level"] == "warning"
    assert SECRET not in out.getvalue()
