"""This node's clock against the master's, from the Date header of its answers.

Date tells whole seconds; each answer bounds the offset from both sides, and the bounds of several answers together are narrow. A clock
that was set in between contradicts them: then they begin anew. The asking is the event loop's (`compare`): a master that does not answer
must not hold up the other sensors.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

import aiohttp

from aimaster.wire.health import Reading, Subject

DATE_SECONDS = 1.0
"""What the header does not tell."""
ANSWER_SECONDS = 5.0


class ClockSensor:
    """What is known of the offset (this clock less the master's)."""

    name = "clock"

    def __init__(self, node: str, interval_seconds: float = 5.0) -> None:
        self.interval_seconds = interval_seconds
        self._reading: Reading | None = None
        self._node = node
        self._low = float("-inf")
        self._high = float("inf")

    def supported(self) -> str:
        return ""

    def read(self, now: float) -> list[Reading]:  # noqa: ARG002 - the last answer's, with its own time
        return [] if self._reading is None else [self._reading]

    def hear(self, date: str, asked_at: float, heard_at: float) -> Reading | None:
        """Take an answer; times are of this clock, in Unix seconds. None for a header that is no date."""
        try:
            there = parsedate_to_datetime(date).timestamp()
        except (TypeError, ValueError):
            return None
        low, high = asked_at - there - DATE_SECONDS, heard_at - there
        self._low, self._high = max(self._low, low), min(self._high, high)
        if self._low > self._high:
            self._low, self._high = low, high
        self._reading = Reading(
            sensor="clock",
            kind="host.clock",
            node=self._node,
            time_seconds=heard_at,
            subject=Subject(node=self._node),
            values={
                "offset_seconds": round((self._low + self._high) / 2, 4),
                "uncertainty_seconds": round((self._high - self._low) / 2, 4),
            },
        )
        return self._reading

    async def compare(
        self,
        session: aiohttp.ClientSession,
        find_master: Callable[[], str | None],
        every_seconds: float,
    ) -> None:
        """Ask the master for its time now and then, for ever; one that does not answer tells nothing."""
        while True:
            url = find_master()
            asked_at = time.time()
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                if url is not None:
                    limit = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
                    async with session.get(f"{url}/healthz", timeout=limit) as answer:
                        self.hear(answer.headers.get("Date", ""), asked_at, time.time())
            await asyncio.sleep(every_seconds)
