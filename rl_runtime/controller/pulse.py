"""The controller's pulse to the master: once a second, and at every commit, epoch and end. An absent master changes nothing here.

It is the second path of liveness: `seen` tells when each member last spoke, so that a silent agent is not taken for a dead node.
"""

import asyncio
import os
import time

import aiohttp
import msgspec
import structlog

from aimaster.telemetry.tokens import Tokens
from aimaster.wire.codec import CONTENT_TYPE, decode_json, encode
from aimaster.wire.ids import Incarnation
from aimaster.wire.messages import ControllerPulse
from aimaster.wire.places import ENV_MASTER_URL, RunPlaces
from rl_runtime.controller.desk import Desk
from rl_runtime.controller.waiting import waiting_for

PULSE_SECONDS = 1.0
ANSWER_SECONDS = 2.0

log = structlog.get_logger("pulse")


class MasterAddress(msgspec.Struct, frozen=True):
    """What is read of RUN/master.json."""

    url: str


class PulseAnswer(msgspec.Struct, frozen=True):
    """What the master says to a pulse."""

    term: int = 0
    stop: bool = False


def make_pulse(desk: Desk, *, url: str, incarnation: Incarnation) -> ControllerPulse:
    """Return the picture of now."""
    account = desk.ledger.account
    category, _ = desk.finding()
    return ControllerPulse(
        url=url,
        incarnation=incarnation,
        epoch=account.epoch.number,
        lineage=account.head.lineage,
        step=account.head.step,
        steps=desk.settings.steps,
        seen=dict(desk.seen),
        incarnations=dict(desk.incarnations),
        in_epoch=account.epoch.members,
        figures=desk.numbers(),
        at=desk.clock(),
        committed_at=desk.committed_at,
        committed_epoch=desk.committed_epoch,
        waiting_for=waiting_for(desk.group),
        finding=category,
        finished=account.finished,
    )


async def report_for_ever(desk: Desk, places: RunPlaces, tokens: Tokens, *, url: str, incarnation: Incarnation) -> None:
    """Send pulses until cancelled."""
    reached = True
    headers = {"Content-Type": CONTENT_TYPE, "Authorization": f"Bearer {tokens.secrets.get('member', '')}"}
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        while True:
            due = time.monotonic() + PULSE_SECONDS
            desk.news.clear()
            trouble = await _send(session, places, encode(make_pulse(desk, url=url, incarnation=incarnation)), desk)
            if reached != (not trouble):
                reached = not trouble
                log.info("master answers" if reached else "master does not answer; training goes on", reason=trouble)
            await _until_due(desk, due)


async def _send(session: aiohttp.ClientSession, places: RunPlaces, body: bytes, desk: Desk) -> str:
    """Send one pulse; return why it was not answered, empty when it was."""
    try:
        async with session.post(f"{_master_url(places)}/v1/controller", data=body) as response:
            content = await response.read()
            if response.status != 200:
                return f"HTTP {response.status}: {content[:200].decode(errors='replace')}"
            packed = response.content_type == CONTENT_TYPE
            answer = msgspec.msgpack.decode(content, type=PulseAnswer) if packed else decode_json(content, PulseAnswer)
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        return f"{type(error).__name__}: {error}"
    if answer.stop:
        desk.stop("the master stops the run")
    return ""


def _master_url(places: RunPlaces) -> str:
    return os.environ.get(ENV_MASTER_URL) or decode_json(places.master.read_bytes(), MasterAddress).url


async def _until_due(desk: Desk, due: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, due - time.monotonic())):
            await desk.news.wait()
    except TimeoutError:
        return
