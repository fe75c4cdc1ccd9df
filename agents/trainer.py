"""The members of this node: started through the shim, adopted after a restart, known to be dead within milliseconds, ended as a tree.

A member's folder holds all that a restarted agent needs: spec.json (what was ordered), pid.json (who it became, written by the shim
before it runs), exit.json (how it ended). A member that is found dead at adoption is reported like one that dies now.

    ordered -> spec.json -> shim -> pid.json -> running -> exit.json -> reported
"""

import asyncio
import contextlib
import errno
import os
import py_compile
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from agents import shim
from agents.config import Pace
from agents.member import Ended, Member, Ordered, Started, read_record
from agents.sensors.process import identify
from aimaster.wire import places
from aimaster.wire.health import Finding, Subject
from aimaster.wire.ids import Incarnation, MemberId, NodeId, RunId
from aimaster.wire.messages import AgentEvent, MemberExited, MemberStarted
from aimaster.wire.places import RunPlaces
from aimaster.wire.topology import MemberSpec, ProcessId

START_SECONDS = 20.0
"""From the shim's start to pid.json; a machine under load takes long to start an interpreter."""
KILLED = 128 + signal.SIGKILL
"""Exit code of a shell whose command was killed."""
_POLL_SECONDS = 0.003
log = structlog.get_logger()


class Observer(Protocol):
    """Who wants to know of members; called on the event loop, in this order of a life."""

    def started(self, member: Member) -> None: ...
    def died(self, member: Member, at: float) -> None: ...
    async def look_for_cause(self) -> None: ...
    def exit_report(self, member: Member, exit_code: int | None, number: int | None, at: float) -> MemberExited: ...


class RefusedError(Exception):
    """An order that cannot be carried out as it stands; the message is the outcome's detail."""


class Trainer:
    """Starts, adopts and ends members; reports through `report`, tells `observer`."""

    def __init__(
        self,
        run: RunPlaces,
        run_id: RunId,
        node: NodeId,
        *,
        pace: Pace,
        front: ProcessId | None,
        report: Callable[[AgentEvent, float], None],
        observer: Observer,
        spawn: Callable[[str, Coroutine[Any, Any, None]], None],
    ) -> None:
        self.members: dict[MemberId, Member] = {}
        self._run = run
        self._run_id = run_id
        self._node = node
        self._folder = run.node(node)
        self._memory = places.node_memory(run_id, node)
        self._pace = pace
        self._front = front
        self._report = report
        self._observer = observer
        self._spawn = spawn
        self._shims: set[int] = set()
        self._closed = ""
        self._compiled = False

    def refuse(self, reason: str) -> None:
        """Start nothing any more."""
        self._closed = reason

    # -- a life ------------------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Take over what an earlier agent of this node started, dead or alive."""
        for path in sorted(self._folder.glob("members/*/spec.json")):
            try:
                ordered = msgspec.json.decode(path.read_bytes(), type=Ordered)
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("member_not_adopted", file=str(path), error=str(error))
                continue
            member = Member(path.parent, ordered)
            self.members[member.name] = member
            if ordered.reported:
                member.ended.set()
            else:
                self._spawn(f"adopt {member.name}", self._take_over(member))

    async def start(self, spec: MemberSpec, incarnation: Incarnation) -> str:
        """Start the member, or say what became of that very start before. Raises RefusedError for an older incarnation."""
        if self._closed:
            raise RefusedError(self._closed)
        known = self.members.get(spec.member)
        if known is not None and known.incarnation >= incarnation:
            if known.incarnation > incarnation:
                raise RefusedError(f"incarnation {incarnation} is past: {spec.member} is at {known.incarnation}")
            return "runs already" if not known.ended.is_set() else "ran and ended"
        if known is not None and not known.ended.is_set():
            await self.end_tree(known)
        if known is not None and known.shim is not None:
            _end_shim(known.shim)
        try:
            member = self._prepare(spec, incarnation)
            self._start_shim(member)
        except OSError as error:
            self._report(_never_started(spec, incarnation, self._node, error), time.time())
            raise
        self.members[spec.member] = member
        await self._take_over(member, adopted=False)
        return "started" if member.process is not None else "did not start"

    def _prepare(self, spec: MemberSpec, incarnation: Incarnation) -> Member:
        folder = self._run.member(self._node, spec.member)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("pid.json", "exit.json", "exit.json.new"):
            (folder / name).unlink(missing_ok=True)
        places.progress_file(self._memory, spec.member).unlink(missing_ok=True)
        ordered = Ordered(
            spec=spec,
            incarnation=incarnation,
            cookie=f"{self._run_id}.{self._node}.{spec.member}.{incarnation}",
            log_offset=_size(folder / "output.log"),
            stacks_offset=_size(folder / "stacks.txt"),
        )
        member = Member(folder, ordered)
        shim.write_whole(f"{folder}/spec.json", msgspec.json.encode(ordered).decode())
        return member

    def _start_shim(self, member: Member) -> None:
        front = "-" if self._front is None else f"{self._front.pid}:{self._front.start_ticks}"
        words = [
            sys.executable,
            "-I",
            "-S",
            self._shim_program(),
            str(member.folder),
            str(self._folder / "agent.pid.json"),
            front,
        ]
        words += [member.ordered.cookie, str(member.incarnation), member.spec.cwd or "-", *member.spec.argv]
        with (member.folder / "output.log").open("ab") as output:
            process = subprocess.Popen(
                words,
                env=self._environment(member),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        # Its exit is reaped here for as long as this agent lives; after that, whoever adopts orphans does it.
        member.shim = identify(process.pid)
        descriptor = os.pidfd_open(process.pid)
        self._shims.add(descriptor)
        asyncio.get_running_loop().add_reader(descriptor, self._reap, descriptor, process)

    def _shim_program(self) -> str:
        """The shim, compiled once into the node's folder: compiling it takes a megabyte, and there is a shim for each member."""
        compiled = self._folder / "shim.pyc"
        if not (self._compiled and compiled.exists()):
            try:
                py_compile.compile(shim.__file__, cfile=str(compiled), doraise=True)
            except (OSError, py_compile.PyCompileError):  # a full disk
                return shim.__file__
            self._compiled = True
        return str(compiled)

    def _reap(self, descriptor: int, process: "subprocess.Popen[bytes]") -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        self._shims.discard(descriptor)
        os.close(descriptor)
        process.wait(timeout=1.0)

    def _environment(self, member: Member) -> dict[str, str]:
        spec = member.spec
        told = {
            places.ENV_RUN_DIR: str(self._run.run),
            places.ENV_RUN_ID: self._run_id,
            places.ENV_NODE: self._node,
            places.ENV_NODE_DIR: str(self._folder),
            places.ENV_NODE_MEMORY: str(self._memory),
            places.ENV_MEMBER: spec.member,
            places.ENV_ROLE: spec.role,
            places.ENV_RANK: str(spec.rank),
            places.ENV_INCARNATION: str(member.incarnation),
            places.ENV_STARTUP_HANG_SECONDS: str(spec.startup_hang_seconds),
            places.ENV_LEASE_FLOOR_SECONDS: str(spec.lease_floor_seconds),
        }
        return {"PYTHONUNBUFFERED": "1"} | dict(os.environ) | spec.env | told

    async def _take_over(self, member: Member, *, adopted: bool = True) -> None:
        """From spec.json to a watched process; one that is dead already is reported."""
        started = await self._wait_for_start(member)
        if started is None:
            await self._finish(member)
            return
        member.process, member.shim = started.member, started.shim
        same_boot = started.member.boot_id == shim.boot_id()
        watched = same_boot and member.watch(lambda: self._died(member))
        if watched:
            self._observer.started(member)
        if watched or not adopted:
            self._report(
                MemberStarted(
                    member=member.name, incarnation=member.incarnation, process=started.member, adopted=adopted
                ),
                time.time(),
            )
        if not watched:
            self._observer.died(member, time.time())
            await self._finish(member)

    async def _wait_for_start(self, member: Member) -> Started | None:
        """pid.json of this start. A shim that ended without one never started its member."""
        deadline = time.monotonic() + START_SECONDS
        look_at_shim = time.monotonic()
        while time.monotonic() < deadline:
            gone = False
            if time.monotonic() >= look_at_shim:
                gone = await asyncio.to_thread(_shim_gone, member)
                look_at_shim = time.monotonic() + 0.2
            found = read_record(member.folder / "pid.json", Started)
            if found is not None and found.incarnation == member.incarnation:
                return found
            if gone:
                return None
            await asyncio.sleep(_POLL_SECONDS)
        return None

    def _died(self, member: Member) -> None:
        member.unwatch()
        self._observer.died(member, time.time())
        self._spawn(f"end of {member.name}", self._finish(member))

    async def _finish(self, member: Member) -> None:
        """Find out how it ended, report that, and clear what it left behind."""
        seen_at = time.time()
        ended = await self._wait_for_exit(member)
        exit_code, number, at = (ended.exit_code, ended.signal, ended.at) if ended else (None, None, seen_at)
        if (number == signal.SIGKILL or exit_code == KILLED) and not member.ordered.stopping:
            await self._observer.look_for_cause()
        event = self._observer.exit_report(member, exit_code, number, at)
        self._report(event, at)
        member.change(reported=True)
        member.ended.set()
        log.info("member_ended", member=member.name, incarnation=member.incarnation, exit_code=exit_code, signal=number)
        if member.process is not None and not member.ordered.stopping:
            await asyncio.to_thread(shim.kill_tree, member.process.pid, member.ordered.cookie)

    async def _wait_for_exit(self, member: Member) -> Ended | None:
        deadline = time.monotonic() + self._pace.exit_seconds
        while True:
            keeper = member.shim
            over = keeper is None or shim.start_ticks(keeper.pid) != keeper.start_ticks or time.monotonic() > deadline
            found = read_record(member.folder / "exit.json", Ended)
            if found is not None and found.incarnation == member.incarnation:
                return found
            if over:
                return None
            await asyncio.sleep(_POLL_SECONDS)

    # -- ends --------------------------------------------------------------------------------------------------------

    def find(self, name: MemberId, incarnation: Incarnation) -> Member:
        """The member, if it is this incarnation; raises RefusedError."""
        member = self.members.get(name)
        if member is None:
            raise RefusedError(f"{name} is not on {self._node}")
        if member.incarnation != incarnation:
            raise RefusedError(f"{name} is at incarnation {member.incarnation}, not {incarnation}")
        return member

    async def kill(self, member: Member) -> None:
        """SIGKILL now, the whole tree; returns when its end is reported."""
        member.send(signal.SIGKILL)
        await self.end_tree(member)

    async def stop(self, member: Member, grace_seconds: float) -> None:
        """SIGTERM to its process group, SIGKILL to what is left of the tree after the grace; its end is expected."""
        if member.ended.is_set():
            return
        member.change(stopping=True)
        if member.process is not None:
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(member.process.pid, number)
            await self._await_tree(member.process.pid, member.ordered.cookie, grace_seconds)
        await self.end_tree(member)

    async def _await_tree(self, leader: int, cookie: str, grace_seconds: float) -> None:
        """Until nothing of the tree is left, or the grace is over. What a leader left behind in other sessions is asked to end too."""
        asked = False
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline:
            left = await asyncio.to_thread(shim.tree, leader, cookie)
            if not left:
                return
            if leader not in left and not asked:
                asked = True
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(0.05)

    async def stop_all(self, grace_seconds: float) -> None:
        """Stop all members side by side."""
        living = [member for member in self.members.values() if not member.ended.is_set()]
        await asyncio.gather(*(self.stop(member, grace_seconds) for member in living))

    async def end_tree(self, member: Member) -> None:
        """Kill whatever is left of the member's tree and wait until its end is reported."""
        leader = member.process.pid if member.process is not None else -1
        await asyncio.to_thread(shim.kill_tree, leader, member.ordered.cookie)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(member.ended.wait(), self._pace.exit_seconds + 1.0)

    def close(self) -> None:
        """Let go of all members without touching them."""
        for member in self.members.values():
            member.unwatch()
        for descriptor in self._shims:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)


def _never_started(spec: MemberSpec, incarnation: Incarnation, node: NodeId, error: OSError) -> MemberExited:
    """The end of a member that this node could not even start, with what stood in the way."""
    now = time.time()
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    finding = Finding(
        id=f"{node}:{spec.member}:{incarnation}:not-started",
        sign="agent.not_started",
        category="node.disk_full" if full else "node.limits",
        role="self",
        subject=Subject(node=node),
        node=node,
        time_seconds=now,
        details={"message": f"it could not be started: {error}"},
    )
    return MemberExited(
        member=spec.member,
        role=spec.role,
        incarnation=incarnation,
        process=None,
        exit_code=None,
        signal=None,
        at=now,
        expected=False,
        findings=(finding,),
    )


def find_front(pid: int | None) -> ProcessId | None:
    """The front process of the run, by its pid; None where there is none. One that is gone already has a name that nobody bears."""
    if pid is None:
        return None
    return identify(pid) or ProcessId(boot_id=shim.boot_id(), pid=pid, start_ticks=0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _end_shim(keeper: ProcessId) -> None:
    """A shim that is still there, stopped or slow, would write into the next start's files."""
    descriptor = shim.open_process(keeper.pid, keeper.start_ticks)
    if descriptor is not None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.close(descriptor)


def _shim_gone(member: Member) -> bool:
    """Whether nobody is left who would write pid.json."""
    if member.shim is not None:
        return shim.start_ticks(member.shim.pid) != member.shim.start_ticks
    mark = os.fsencode(member.folder)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if mark in words and any(os.path.basename(word).startswith(b"shim.py") for word in words):
                return False
    return True
