"""Tells the controller at once that one of its members is dead, by the second path: it must not wait for the master."""

import asyncio
import json
import os

import aiohttp
import structlog

from agents.config import bearer
from aimaster.wire import codec
from aimaster.wire.messages import DeathNotice
from aimaster.wire.places import ENV_CONTROLLER_URL, RunPlaces

TRIES = 6
FIRST_PAUSE_SECONDS = 0.05
ANSWER_SECONDS = 2.0
log = structlog.get_logger()


def find_controller(run: RunPlaces) -> str | None:
    """Where the controller is now; None where there is none, as for wrapped commands."""
    fixed = os.environ.get(ENV_CONTROLLER_URL)
    if fixed:
        return fixed
    try:
        return str(json.loads(run.controller.read_bytes())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


async def tell_controller(run: RunPlaces, session: aiohttp.ClientSession, notice: DeathNotice) -> bool:
    """Post the notice, a few times at growing distance, to where the controller is at that moment; True when it was taken.

    A controller that is gone for longer learns of the death from its members and the master.
    """
    pause = FIRST_PAUSE_SECONDS
    for _ in range(TRIES):
        url = find_controller(run)
        if url is None:
            return False
        headers = {"Content-Type": codec.CONTENT_TYPE} | bearer(run.token)
        try:
            async with session.post(
                f"{url}/v1/deaths",
                data=codec.encode(notice),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS),
            ) as response:
                if response.status < 500:
                    return response.status < 300
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            log.debug("controller_silent", url=url, error=str(error)[:200])
        await asyncio.sleep(pause)
        pause *= 2
    return False
