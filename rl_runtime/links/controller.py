"""The members' link to the controller: every question is asked again until it is answered.

A lost connection, a restarting controller, a cut network: the link looks the address up anew (AIMASTER_CONTROLLER_URL, else
RUN/controller.json), connects and resends, with a beat at least once a second and pauses up to half a second. All questions are
idempotent, so a resent one changes nothing. Only a 4xx answer ends it: then the request itself is wrong.
"""

import http.client
import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import structlog

from aimaster.telemetry.tokens import secret_of
from aimaster.wire.codec import CONTENT_TYPE, decode, decode_json, encode
from aimaster.wire.places import ENV_CONTROLLER_URL, RunPlaces
from aimaster.wire.rollout import (
    CompleteReply,
    CompleteRequest,
    LeaseReply,
    LeaseRequest,
    StreamReply,
    StreamRequest,
)
from aimaster.wire.training import Turn, Word
from rl_runtime.links.base import RefusedError
from rl_runtime.links.patient import PatientConnection

SILENCE_SECONDS = 5.0
"""The controller holds a question for a second at most."""
SHORTEST_PAUSE_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 0.5
TRY_AGAIN = (408, 425, 429)

T = TypeVar("T")
log = structlog.get_logger("link")


class ControllerAddress(msgspec.Struct, frozen=True):
    """What is read of RUN/controller.json."""

    url: str


class NoAnswerError(Exception):
    """No answer this time, with the reason in words."""


class ControllerLink:
    """One connection, used by one thread."""

    def __init__(self, run_dir: Path, *, beat: Callable[[str], None], silence_seconds: float = SILENCE_SECONDS) -> None:
        self._places = RunPlaces(run_dir)
        self._beat = beat
        self._silence_seconds = silence_seconds
        self._connection: PatientConnection | None = None
        self._phase = "wait"

    def turn(self, turn: Turn) -> Word:
        return self._ask("/v1/turn", turn, Word, phase="wait")  # type: ignore[arg-type]  # a union is a type to msgspec

    def lease(self, request: LeaseRequest) -> LeaseReply:
        return self._ask("/v1/rollout/lease", request, LeaseReply, phase="wait")

    def stream(self, request: StreamRequest) -> StreamReply:
        return self._ask("/v1/rollout/stream", request, StreamReply, phase="wait")

    def complete(self, request: CompleteRequest) -> CompleteReply:
        return self._ask("/v1/rollout/complete", request, CompleteReply, phase="wait")

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def local_host(self) -> str:
        """Return this host's address as the controller's side of the network sees it; loopback where they share a host."""
        target = urlsplit(self._url())
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target.hostname or "127.0.0.1", target.port or 80))  # sends nothing
            return str(probe.getsockname()[0])

    def _ask(self, path: str, record: Any, kind: type[T], *, phase: str) -> T:
        body = encode(record)
        self._phase = phase
        failures = 0
        while True:
            self._beat(phase)
            try:
                answer = decode(self._post(path, body), kind)
            except NoAnswerError as trouble:
                self.close()
                failures += 1
                if failures in (3, 30) or failures % 300 == 0:
                    log.warning(
                        "controller does not answer; asking again", path=path, tries=failures, reason=str(trouble)
                    )
                pause = min(LONGEST_PAUSE_SECONDS, SHORTEST_PAUSE_SECONDS * 2 ** min(failures, 10))
                time.sleep(pause * (0.5 + random.random() / 2))  # noqa: S311 - jitter
                continue
            if failures >= 3:
                log.info("controller answers again", path=path, tries=failures)
            return answer

    def _post(self, path: str, body: bytes) -> bytes:
        """Return the body of a 200 answer; raise NoAnswerError where asking again can help, RefusedError where it cannot."""
        try:
            connection = self._connected()
            connection.request("POST", path, body, headers(self._places))
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswerError(f"{type(error).__name__}: {error}") from error
        if response.status == 200:
            return content
        text = content[:500].decode(errors="replace")
        if response.status >= 500 or response.status in TRY_AGAIN:
            raise NoAnswerError(f"HTTP {response.status}: {text}")
        raise RefusedError(f"the controller refused {path} with HTTP {response.status}: {text}")

    def _connected(self) -> PatientConnection:
        if self._connection is None:
            target = urlsplit(self._url())
            if not target.hostname:
                raise NoAnswerError(f"{self._url()!r} is no address")
            self._connection = PatientConnection(
                target.hostname,
                target.port,
                beat=lambda: self._beat(self._phase),
                silence_seconds=self._silence_seconds,
            )
        return self._connection

    def _url(self) -> str:
        if url := os.environ.get(ENV_CONTROLLER_URL):
            return url
        try:
            return decode_json(self._places.controller.read_bytes(), ControllerAddress).url
        except FileNotFoundError as error:
            raise NoAnswerError(f"{self._places.controller} is not there yet") from error
        except msgspec.DecodeError as error:
            raise NoAnswerError(f"{self._places.controller} cannot be read: {error}") from error


def headers(places: RunPlaces) -> dict[str, str]:
    """Return the headers of a request to another program of the run."""
    secret = secret_of(places.token, "member")
    return {"Content-Type": CONTENT_TYPE, "Authorization": f"Bearer {secret}"}
