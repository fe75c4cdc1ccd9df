"""The sidecar as a whole: takes over what is there, runs the parts, and ends in one of three ways.

SIGTERM            the agent alone ends; members and memory stay for the next agent
the front is gone  newest snapshot to storage, members stopped, end (the shims see to it if this fails)
order StopNode     the same, reported to the master; the memory is removed where that is ordered
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import aiohttp
import msgspec
import structlog

from agents import metrics, ranks, shim
from agents.config import Keeping, Pace, Sight
from agents.endpoints import Endpoints
from agents.hangs import HangWatch
from agents.keeper import Keeper
from agents.link import Link, find_master
from agents.logs import MOST_FINDINGS, LogWatch
from agents.machine import MachineWatch
from agents.member import Member, read_record
from agents.notices import tell_controller
from agents.orders import Orders
from agents.outbox import Outbox
from agents.paths import NamedLogs
from agents.peers import Peers
from agents.pictures import LogPictures
from agents.sensors.all import Sensors
from agents.sensors.process import identify
from agents.sensors.reader import SensorReader
from agents.trainer import RefusedError, Trainer
from aimaster import catalogue
from aimaster.telemetry.tokens import read_tokens, secret_of
from aimaster.wire import PROTOCOL_VERSION, places
from aimaster.wire.actions import PeerAddress
from aimaster.wire.checkpoint import Version
from aimaster.wire.health import Reading
from aimaster.wire.ids import MemberId, NodeId
from aimaster.wire.messages import AgentEvent, DeathNotice, Hello, MemberExited, MemberPicture, Pulse
from aimaster.wire.places import RunPlaces
from aimaster.wire.topology import JobPlan, ProcessId
from easyckpt.events import Events
from easyckpt.shardserver import ShardServer

DRAIN_SECONDS = 3.0
CAUSE_SECONDS = 0.1
"""How long a death may wait for the kernel's word on it."""
CONTROLLER_ROLE = "controller"
log = structlog.get_logger()


class TakenError(Exception):
    """Another agent serves this node."""


class Node:
    """One node's agent."""

    def __init__(
        self,
        run: RunPlaces,
        node: NodeId,
        plan: JobPlan,
        *,
        pace: Pace,
        sight: Sight,
        keeping: Keeping,
        front: ProcessId | None,
    ) -> None:
        self.name = node
        self._run = run
        self._plan = plan
        self._pace = pace
        self._sight = sight
        self._keeping = keeping
        self._front = front
        self._folder = run.node(node)
        self._memory = places.node_memory(plan.run_id, node)
        self._ending = asyncio.Event()
        self._stopping = False
        self._stop_lock = asyncio.Lock()
        """The front's end and the master's order may both stop the node: the second waits for the first to be through."""
        self._remove_memory = False
        self._starts = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._deaths: dict[tuple[str, bool], int] = {}
        self._shown: tuple[int, tuple[Reading, ...]] = (0, ())
        """Connection, and the readings that its last pulse knew."""

    async def serve(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Run until told to end. Raises TakenError when another agent holds this node."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _held(self._folder / "lock"):
            async with aiohttp.ClientSession() as session:
                self._build(session, host)
                await self._endpoints.start(host, port, places.agent_socket(self._memory))
                self._write_identity()
                loop = asyncio.get_running_loop()
                for number in (signal.SIGTERM, signal.SIGINT):
                    loop.add_signal_handler(number, self._ending.set)
                try:
                    await self._run_parts()
                finally:
                    await self._close()

    def _build(self, session: aiohttp.ClientSession, host: str) -> None:
        self._session = session
        self._outbox = Outbox(self._folder / "outbox")
        self._keeper = Keeper(self._memory, self.name, self._keeping, self.report, self._pace)
        self._keeper.open()
        self._peers = Peers(self.name, self._keeper, self._keeping, self._run.token, session, self.report)
        self._shards = ShardServer(
            self._keeper.folder,
            host=host,
            token=secret_of(self._run.token, "member"),
            events=Events(self._peers.hear),
        )
        self._hangs = HangWatch(self._memory, node=self.name, pace=self._pace, report=self.report, spawn=self._spawn)
        signs = catalogue.load()
        self._pictures = LogPictures(lambda: (*self._logs.followed(), *self._named_logs.followed()))
        self._logs = LogWatch(self.name, signs, self.report, heard=self._hangs.hear, ended=self._pictures.end)
        patterns = [one for one in self._sight.log_paths.split(":") if one]
        self._named_logs = NamedLogs(self.name, patterns, signs, self.report, ended=self._pictures.end)
        self._trainer = Trainer(
            self._run, self._plan.run_id, self.name,
            pace=self._pace, front=self._front, report=self.report, observer=self, spawn=self._spawn,
        )  # fmt: skip
        self._orders = Orders(self._folder, self._trainer, self, report=self.report, spawn=self._spawn)
        self._endpoints = Endpoints(
            self, self._keeper, self._peers, read_tokens(self._run.token), metrics.registry(self.state)
        )
        self._eyes = Sensors(
            self.name,
            {"run": self._run.run, "memory": self._memory, "storage": self._run.storage},
            self._pids,
            sight=self._sight,
            interval_seconds=self._pace.sensor_seconds,
        )
        self._machine = MachineWatch(self.name, signs, report=self.report, trees=lambda: self._eyes.process.trees)
        self._loop = asyncio.get_running_loop()
        self._sensors = SensorReader(self._eyes.row, self._hand_on)
        self._link = Link(
            self._run, self.name, self._outbox,
            pace=self._pace, session=session, hello=self._hello, pulse=self._pulse,
            on_welcome=self._orders.see_term, on_order=self._orders.take,
        )  # fmt: skip

    async def _run_parts(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._trainer.adopt()
            self._sensors.start()
            self._spawn("link to master", self._link.run())
            self._spawn("watch members", self._watch_members())
            self._spawn("named logs", self._named_logs.run(self._pace.progress_seconds))
            self._spawn(
                "watch the clock",
                self._eyes.clock.compare(self._session, lambda: find_master(self._run), self._sight.clock_seconds),
            )
            self._spawn("flush", self._keeper.flush_forever())
            self._spawn("copy to peer", self._peers.copy_forever())
            if self._front is not None:
                self._spawn("watch the front", self._watch_front(self._front))
            _trim()
            log.info("agent_serves", node=self.name, url=self._endpoints.url, outbox=self._outbox.outbox_id)
            await self._ending.wait()
            for task in list(self._tasks):
                task.cancel()

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        self._sensors.close()
        self._eyes.close()
        self._trainer.close()
        self._peers.close()
        self._shards.close()
        self._keeper.close()
        await self._endpoints.close()
        self._outbox.close()
        if self._remove_memory:
            self._keeper.remove()
        log.info("agent_ends", node=self.name)

    def _write_identity(self) -> None:
        """agent.pid.json: how shims and the front find the agent of the moment, and how many there were in this folder."""
        path = self._folder / "agent.pid.json"
        before = read_record(path, dict[str, str | int])
        self._starts = int((before or {}).get("starts", 0)) + 1
        me = identify(os.getpid())
        if me is not None:
            record = msgspec.to_builtins(me) | {"url": self._endpoints.url, "starts": self._starts}
            shim.write_whole(str(path), msgspec.json.encode(record).decode())

    # -- what the parts tell each other ------------------------------------------------------------------------------

    def report(self, event: AgentEvent, at: float) -> None:
        """Into the outbox, and on its way."""
        self._outbox.put(event, at)
        self._link.wake()

    def started(self, member: Member) -> None:
        self._hangs.add(member)
        self._logs.add(member)

    def died(self, member: Member, at: float) -> None:
        self._hangs.remove(member)
        if self._plan.kind == "rl" and member.spec.role != CONTROLLER_ROLE and not self._stopping:
            notice = DeathNotice(node=self.name, member=member.name, incarnation=member.incarnation, at=at)
            self._spawn(f"notice of {member.name}", self._tell(notice))

    async def _tell(self, notice: DeathNotice) -> None:
        if not await tell_controller(self._run, self._session, notice):
            log.info("controller_not_told", member=notice.member)

    def exit_report(self, member: Member, exit_code: int | None, number: int | None, at: float) -> MemberExited:
        self._hangs.remove(member)
        event = self._logs.exit_report(member, exit_code, number, at)
        if not event.expected and member.process is not None:
            pids = self._eyes.process.trees.get(member.name, frozenset()) | {member.process.pid}
            seen = self._machine.explain(member.name, pids, at)
            if ranks.is_rank(member):
                seen += ranks.left_early(self.name, member, self._trainer.members.values(), at)
            event = msgspec.structs.replace(event, findings=(*event.findings, *seen)[-MOST_FINDINGS:])
        key = (member.spec.role, event.expected)
        self._deaths[key] = self._deaths.get(key, 0) + 1
        return event

    # -- loops -------------------------------------------------------------------------------------------------------

    async def _watch_members(self) -> None:
        while True:
            self._hangs.tick()
            self._logs.tick()
            self._endpoints.turning.turn()
            await asyncio.sleep(self._pace.progress_seconds)

    def _hand_on(self, readings: Sequence[Reading]) -> None:
        self._from_thread(lambda: self._machine.take(readings))

    def _from_thread(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to judge
            self._loop.call_soon_threadsafe(call)

    async def look_for_cause(self) -> None:
        """Let the sensors that may know why a process was killed read now."""
        done = asyncio.Event()
        self._sensors.look_now(lambda: self._from_thread(done.set))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(done.wait(), CAUSE_SECONDS)

    async def _watch_front(self, front: ProcessId) -> None:
        gone = asyncio.Event()
        descriptor = shim.open_process(front.pid, front.start_ticks)
        if descriptor is not None:
            loop = asyncio.get_running_loop()
            loop.add_reader(descriptor, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)
        log.warning("front_gone", pid=front.pid)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop_all(self._pace.end_seconds / 2), self._pace.end_seconds)
        self._remove_memory = self._keeper.is_empty  # else it is what the next start restores from
        self._ending.set()

    async def _stop_all(self, grace_seconds: float) -> None:
        self._stopping = True
        self._trainer.refuse("this node is being stopped")
        async with self._stop_lock:
            await asyncio.gather(self._keeper.flush_newest(), self._trainer.stop_all(grace_seconds))
            await self._keeper.flush_newest()  # what was sealed while they stopped

    # -- for orders --------------------------------------------------------------------------------------------------

    async def dump_stacks(self, member: MemberId) -> str:
        text = await self._hangs.dump(self._trainer.members[member])
        if text is None:
            raise RefusedError(f"{member} gives no stacks: it does not handle SIGUSR2, or is stopped")
        return text

    def set_peers(self, peers: dict[NodeId, PeerAddress]) -> None:
        self._peers.set(peers)

    async def take_over_flush(self, members: tuple[MemberId, ...], newest: Version | None) -> str:
        return await self._keeper.take_over(members, newest)

    async def stop_node(self, *, grace_seconds: float, remove_memory: bool) -> None:
        self._remove_memory = remove_memory
        await self._stop_all(grace_seconds)

    def leave(self) -> None:
        """The stop was answered: end once the master has heard it."""
        self._spawn("leave", self._leave())

    async def _leave(self) -> None:
        await self._link.drain(DRAIN_SECONDS)
        self._ending.set()

    # -- pictures ----------------------------------------------------------------------------------------------------

    def pictures(self) -> tuple[MemberPicture, ...]:
        found = (self._hangs.picture(member) for member in self._trainer.members.values())
        return tuple(picture for picture in found if picture is not None)

    def _pids(self) -> dict[str, int]:
        return {name: one.process.pid for name, one in list(self._trainer.members.items()) if one.alive and one.process}

    def _readings(self) -> tuple[Reading, ...]:
        return self._sensors.newest()

    def _hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            run_id=self._plan.run_id,
            node=self.name,
            outbox_id=self._outbox.outbox_id,
            url=self._endpoints.url,
            labels=self._keeping.labels,
            shards="{}:{}".format(*self._shards.address),
            pid=os.getpid(),
            term_seen=self._orders.term,
            starts=self._starts,
            members=self.pictures(),
            started={name: member.incarnation for name, member in self._trainer.members.items()},
        )

    def _pulse(self) -> Pulse:
        """Readings go once: a thousand nodes would tell their master the same eight GPUs every second."""
        self._keeper.look_after()
        readings = self._readings()
        known = {id(one) for one in self._shown[1]} if self._shown[0] == self._link.connections else set()
        fresh = tuple(one for one in readings if id(one) not in known)
        self._shown = (self._link.connections, readings)
        return Pulse(
            at=time.time(),
            members=self.pictures(),
            snapshots=self._keeper.places(),
            readings=fresh,
            logs=self._pictures.fresh(self._link.connections),
        )

    def describe(self) -> dict[str, object]:
        """For GET /v1/node."""
        return {
            "node": self.name,
            "run_id": self._plan.run_id,
            "url": self._endpoints.url,
            "pid": os.getpid(),
            "master_connected": self._link.connected,
            "peers": self._peers.addresses,
            "members": self.pictures(),
            "snapshots": self._keeper.places(),
        }

    def connection(self) -> str | None:
        """Why this agent is not ready; None when a master has accepted it and its eyes are open."""
        return self._named_logs.why_not_begun if self._link.accepted else "no master has welcomed this agent yet"

    def state(self) -> metrics.NodeState:
        return metrics.NodeState(
            node=self.name,
            connected=self._link.connected,
            connections=self._link.connections,
            members=self.pictures(),
            deaths=dict(self._deaths),
            suspected=dict(self._hangs.suspected),
            outbox_waiting=len(self._outbox),
            outbox_refused=self._outbox.refused,
            orders_refused=self._orders.refused,
            log_bytes=self._logs.bytes_read + self._named_logs.bytes_read,
            kept=self._keeper.figures(),
            copies=dict(self._peers.copies),
            readings=self._readings(),
            unsupported=dict(self._sensors.unsupported),
            active=self._sensors.active,
            sensor_seconds=dict(self._sensors.seconds),
            found=dict(self._machine.told),
            xids=dict(self._machine.xids),
            log_events=dict(self._logs.events),
        )


def _trim() -> None:
    """Give back what loading the signs has left free: a tenth of our memory, for as long as the job runs."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # another libc has no such call
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def _held(path: os.PathLike[str]) -> Any:
    """The lock that makes this the only agent of its node; the kernel lets it go with the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TakenError(f"another agent serves this node (it holds {path}): end that one first") from error
        yield
    finally:
        os.close(descriptor)
