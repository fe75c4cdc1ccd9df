"""The members' link to the agent of their node, over its Unix socket. The agent may be away: then nothing is lost.

A sealed snapshot that could not be announced is found by the agent itself when it looks through the folder; a snapshot that could
not be fetched is an empty reply, and the member asks again or does without.
"""

import http.client
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from aimaster.wire.checkpoint import FetchReply, FetchRequest, SaveTrouble, SealedNotice, SealedReply
from aimaster.wire.codec import decode, encode
from aimaster.wire.places import RunPlaces, agent_socket
from rl_runtime.links.controller import NoAnswerError, headers
from rl_runtime.links.patient import PatientConnection

NOTICE_SECONDS = 2.0

T = TypeVar("T")
log = structlog.get_logger("link")


class AgentLink:
    """A connection per question: a Unix socket costs microseconds, and threads share nothing."""

    def __init__(self, memory: Path, run_dir: Path, *, beat: Callable[[str], None]) -> None:
        self._socket = str(agent_socket(memory))
        self._places = RunPlaces(run_dir)
        self._beat = beat
        self._owner = threading.get_ident()
        self.unannounced = 0
        """Sealed snapshots the agent was not there to hear of."""
        self.flush_trouble = ""
        """Why nothing of this node reaches storage at present, as the agent said at the last seal."""

    def sealed(self, notice: SealedNotice) -> None:
        """Tell the agent of a sealed snapshot, and hear whether flushes work; called from the saving thread."""
        try:
            content = self._post("/v1/snapshots/sealed", notice, silence_seconds=NOTICE_SECONDS)
            trouble = decode(content, SealedReply).flush_trouble
        except (NoAnswerError, msgspec.DecodeError) as error:
            self.unannounced += 1
            log.warning("agent was not told of a snapshot; it will find it", segment=notice.name, reason=str(error))
            return
        if trouble and trouble != self.flush_trouble:
            log.error("no snapshot reaches storage; training goes on, memory and peers hold it", reason=trouble)
        elif self.flush_trouble and not trouble:
            log.info("snapshots reach storage again")
        self.flush_trouble = trouble

    def lost(self, trouble: SaveTrouble) -> None:
        """Tell the agent, for the master, of a snapshot that was lost in the background; called from the saving thread."""
        try:
            self._post("/v1/snapshots/trouble", trouble, silence_seconds=NOTICE_SECONDS)
        except NoAnswerError as error:
            log.warning("agent was not told of a lost snapshot", step=trouble.version.step, reason=str(error))

    def fetch(self, request: FetchRequest) -> FetchReply:
        """Ask the agent to bring a snapshot to this node."""
        try:
            content = self._post("/v1/snapshots/fetch", request, silence_seconds=request.deadline_seconds + 1.0)
            return decode(content, FetchReply)
        except (NoAnswerError, msgspec.DecodeError) as trouble:
            log.warning("agent could not fetch a snapshot", role=request.role, reason=str(trouble))
            return FetchReply(places=(), seconds=0.0)

    def _post(self, path: str, record: Any, *, silence_seconds: float) -> bytes:
        connection = PatientConnection(
            "agent", socket_path=self._socket, beat=self._beat_if_owner, silence_seconds=silence_seconds
        )
        try:
            connection.request("POST", path, encode(record), headers(self._places))
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise NoAnswerError(f"HTTP {response.status}: {content[:500].decode(errors='replace')}")
        return content

    def _beat_if_owner(self) -> None:
        """Only the training thread says that training lives."""
        if threading.get_ident() == self._owner:
            self._beat("restore")
