"""Where a rollout member finds newer weights: in its own node's memory, else by its agent from another node's.

Nothing is pinned and no trainer waits: the header is read once, the bytes are copied and proven against its digests. If the writer
came meanwhile (Torn), there is a newer one to read.
"""

import time
from collections.abc import Callable
from pathlib import Path

import structlog
from torch import Tensor

from aimaster.wire.checkpoint import FetchRequest, Version
from aimaster.wire.rollout import Offer
from easyckpt import read_weights, shm
from easyckpt.errors import BadSegment
from rl_runtime.links.base import SnapshotLink

ROLE = "policy"
PREFIX = "model/"
TRIES = 3
FETCH_SECONDS = 10.0
FETCH_PAUSE_SECONDS = 1.0
"""After a fetch that brought nothing."""

log = structlog.get_logger("weights")


class WeightSource:
    """One node's view of the policy's snapshots."""

    def __init__(self, folder: Path, agent: SnapshotLink, *, beat: Callable[[str], None]) -> None:
        self._folder = folder
        self._agent = agent
        self._beat = beat
        self._fetch_after = float("-inf")

    def newer(self, offer: Offer, have: Version | None) -> tuple[Version, dict[str, Tensor]] | None:
        """Return weights at least as new as the offer; None when there is nothing to gain, or nothing to be had right now."""
        if have is not None and have >= offer.version:
            return None
        found = self._read(offer.version)
        if found is None and time.monotonic() >= self._fetch_after:
            self._beat("weights")
            self._agent.fetch(FetchRequest(role=ROLE, newer_than=have, deadline_seconds=FETCH_SECONDS))
            # What came may be older than the offer by now, and is still newer than what is loaded.
            found = self._read(None, newer_than=have)
            if found is None:
                self._fetch_after = time.monotonic() + FETCH_PAUSE_SECONDS
        return found

    def _read(
        self, at_least: Version | None, *, newer_than: Version | None = None
    ) -> tuple[Version, dict[str, Tensor]] | None:
        for _ in range(TRIES):
            self._beat("weights")
            held = [segment for segment in shm.scan(self._folder) if segment.header.role == ROLE]
            newest = max(held, key=lambda segment: segment.header.version, default=None)
            if newest is None:
                return None
            version = Version(*newest.header.version)
            if (at_least is not None and version < at_least) or (newer_than is not None and version <= newer_than):
                return None
            try:
                _, weights = read_weights(newest, prefix=PREFIX)
            except (BadSegment, FileNotFoundError) as error:
                log.info("the writer came while weights were read; reading again", reason=str(error))
                continue
            return version, weights
        return None
