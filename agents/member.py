"""One member of a node: what was ordered, who it became, how it ended; a signal reaches exactly this process or nobody.

spec.json  as ordered, by the agent     pid.json  who it is, by the shim, before it runs     exit.json  how it ended, by the shim
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from agents import shim
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.topology import MemberSpec, ProcessId

T = TypeVar("T")


class Ordered(msgspec.Struct, frozen=True, kw_only=True):
    """spec.json: a start as it was ordered."""

    spec: MemberSpec
    incarnation: Incarnation
    cookie: str
    """Marks the whole process tree of this start."""
    log_offset: int
    """Length of output.log before this start."""
    stacks_offset: int
    """Length of stacks.txt before this start."""
    stopping: bool = False
    """A stop was ordered: its end is expected."""
    reported: bool = False
    """Its end is in the outbox."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """pid.json, written by the shim."""

    incarnation: int
    member: ProcessId
    shim: ProcessId


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """exit.json, written by the shim."""

    incarnation: int
    exit_code: int | None
    signal: int | None
    at: float


class Member:
    """One member of this node, alive or ended."""

    def __init__(self, folder: Path, ordered: Ordered) -> None:
        self.folder = folder
        self.ordered = ordered
        self.process: ProcessId | None = None
        self.shim: ProcessId | None = None
        self.ended = asyncio.Event()
        self._pidfd = -1

    @property
    def name(self) -> MemberId:
        return self.ordered.spec.member

    @property
    def spec(self) -> MemberSpec:
        return self.ordered.spec

    @property
    def incarnation(self) -> Incarnation:
        return self.ordered.incarnation

    @property
    def alive(self) -> bool:
        return self.process is not None and not self.ended.is_set()

    def change(self, **fields: Any) -> None:
        """Write spec.json anew with these fields changed."""
        self.ordered = msgspec.structs.replace(self.ordered, **fields)
        with contextlib.suppress(OSError):  # a full disk: true in memory, at worst reported twice after a restart
            shim.write_whole(f"{self.folder}/spec.json", msgspec.json.encode(self.ordered).decode())

    def send(self, number: int) -> bool:
        """Signal the main process, if it still is this one."""
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return False
        return True

    def watch(self, callback: Callable[[], None]) -> bool:
        """Call back once at its death; False when it is dead already."""
        if self.process is None:
            return False
        descriptor = shim.open_process(self.process.pid, self.process.start_ticks)
        if descriptor is None:
            return False
        self._pidfd = descriptor
        asyncio.get_running_loop().add_reader(descriptor, callback)
        return True

    def unwatch(self) -> None:
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def read_record(path: Path, kind: type[T]) -> T | None:
    """The record in a file; None where it is not there or not whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
