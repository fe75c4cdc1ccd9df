"""The front's few words with the master, and what it reads of the run folder about processes it did not start."""

import http.client
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import psutil

from aimaster.cli.front_drills import Drill, send
from aimaster.cli.front_signals import Signals
from aimaster.cli.front_summary import ChildEnd
from aimaster.cli.front_supervise import Supervised
from aimaster.cli.reach import RefusedError, ask, read_master, read_token, start_ticks
from aimaster.wire.ids import MemberId
from aimaster.wire.places import RunPlaces
from aimaster.wire.status import JobStatus
from aimaster.wire.topology import JobPlan

ASK_SECONDS: Final = 2.0
PREDECESSOR_SECONDS: Final = 25.0
"""An earlier front's agents flush and end within ten seconds of its death, its master after them."""
STOPPED_SECONDS: Final = 8.0
SILENT_SECONDS: Final = 40.0
"""Silence of a program that is not stopped: it may be starved on a busy machine."""


class MasterLink:
    """Asks the master that RUN/master.json names now; a master that does not answer is no error, only no answer."""

    def __init__(self, places: RunPlaces) -> None:
        self._places = places
        self._token = read_token(places.run, {}, "operate")
        self.answered_at = 0.0
        """Monotonic."""

    def status(self) -> JobStatus | None:
        data = self._ask("GET", "/v1/status")
        return None if data is None else msgspec.json.decode(data, type=JobStatus)

    def stop(self, reason: str) -> bool:
        return self._ask("POST", "/v1/stop", {"reason": reason}) is not None

    def announce_drill(self, drill: Drill) -> None:
        """So that the death of that subject is known as a drill; unheard, the incident is shown as any other."""
        self._ask("POST", "/v1/drill", {"note": f"drill {drill}", "member": drill.subject})

    def _ask(self, method: str, path: str, body: dict[str, str] | None = None) -> bytes | None:
        place = read_master(self._places.run)
        if place is None:
            return None
        try:
            data = ask(place.url, self._token, method, path, body, seconds=ASK_SECONDS)
        except (OSError, http.client.HTTPException, RefusedError):
            return None
        self.answered_at = time.monotonic()
        return data


def hung(program: Supervised, now: float, heard_at: float) -> bool:
    """Whether a program that runs is beyond waiting: stopped and silent, or silent for very long."""
    if program.placed is None:
        return False
    silent_seconds = now - max(heard_at, program.up_since)
    return silent_seconds > SILENT_SECONDS or (silent_seconds > STOPPED_SECONDS and _is_stopped(program.placed.pid))


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP))
    except psutil.NoSuchProcess:
        return False


def await_predecessors(places: RunPlaces, say: Callable[[str], None], signals: Signals) -> None:
    """Wait for the master and agents of an earlier front, which end by themselves; past the deadline, end them.

    The run's lock is ours, so their front is gone.
    """
    deadline = time.monotonic() + PREDECESSOR_SECONDS
    told = False
    while left := list(_predecessors(places)):
        if signals.waiting:
            return
        if not told:
            say(f"waiting for {len(left)} processes of an earlier start to end")
            told = True
        if time.monotonic() > deadline:
            for pid, ticks in left:
                send(pid, ticks, signal.SIGKILL)
            return
        time.sleep(0.1)


def _predecessors(places: RunPlaces) -> Iterator[tuple[int, int]]:
    for file in (places.master, *places.run.glob("nodes/*/agent.pid.json")):
        try:
            record = msgspec.json.decode(file.read_bytes())
            pid, ticks = int(record["pid"]), int(record["start_ticks"])
        except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
            continue
        if pid != os.getpid() and start_ticks(pid) == ticks:
            yield pid, ticks


def child_ends(plan: JobPlan, places: RunPlaces) -> dict[MemberId, ChildEnd]:
    """How each process of a wrapped command ended, as its shim wrote it down."""
    if plan.kind != "command":
        return {}
    ends = {}
    for member, node in plan.placement.items():
        try:
            ends[member] = msgspec.json.decode((places.member(node, member) / "exit.json").read_bytes(), type=ChildEnd)
        except (OSError, msgspec.DecodeError):
            continue  # it never ran, or its node was lost with the file
    return ends


def tail(file: Path, lines: int = 12) -> str:
    """The last lines of a log."""
    try:
        data = file.read_bytes()[-16_384:]
    except OSError as error:
        return f"({error.strerror})"
    return "\n".join(data.decode(errors="replace").splitlines()[-lines:])
