"""A small real master and a run folder for the flows of the agent: an aiohttp server that speaks wire.messages, and real agents.

The server journals reports in memory, acknowledges them, and sends orders until they are answered, as the real one does.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import aiohttp
import msgspec
from aiohttp import WSMsgType, web

from aimaster.settings import load
from aimaster.settings.render import to_json
from aimaster.wire import codec
from aimaster.wire.actions import Action, Order, PeerAddress, SetPeers, StartMember
from aimaster.wire.checkpoint import SealedNotice, SealedReply, Version
from aimaster.wire.ids import Incarnation, MemberId, NodeId, OrderId, RunId, Term
from aimaster.wire.messages import (
    Ack,
    AgentMessage,
    DeathNotice,
    Hello,
    MemberExited,
    MemberStarted,
    OrderDone,
    Pulse,
    Report,
    Welcome,
)
from aimaster.wire.places import RunPlaces, agent_socket, node_memory, segments
from aimaster.wire.topology import JobPlan, MemberSpec
from easyckpt import shm

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny.toml"
QUICK = {
    "AIMASTER_AGENT__PROGRESS_SECONDS": "0.05",
    "AIMASTER_AGENT__LOOK_SECONDS": "0.1",
    "AIMASTER_AGENT__PULSE_SECONDS": "0.1",
    "AIMASTER_AGENT__SENSOR_SECONDS": "0.5",
    "AIMASTER_AGENT__RECONNECT_SECONDS": "0.2",
    "AIMASTER_AGENT__FLUSH_RETRY_SECONDS": "0.2",
}


async def until(condition, seconds=20.0, what="it"):
    """Poll until the condition holds a value; fails with the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        await asyncio.sleep(0.005)
    return value


class Master:
    """Serves /v1/agents/NODE, and /v1/deaths as the controller would."""

    def __init__(self, run: "Run", term: int = 1) -> None:
        self.run = run
        self.term = Term(term)
        self.hellos: list[Hello] = []
        self.pulses: dict[NodeId, Pulse] = {}
        self.deaths: list[DeathNotice] = []
        self.acknowledging = True
        self._sockets: dict[NodeId, web.WebSocketResponse] = {}
        self._orders = 0

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get("/v1/agents/{node}", self._agent)
        app.router.add_post("/v1/deaths", self._death)
        self._runner = web.AppRunner(app, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        for path in (self.run.places.master, self.run.places.controller):
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps({"url": f"http://{host}:{port}", "pid": os.getpid(), "term": self.term}))
            fresh.replace(path)
        return self

    async def __aexit__(self, *_) -> None:
        for socket in list(self._sockets.values()):
            with contextlib.suppress(ConnectionError, RuntimeError):
                await asyncio.wait_for(socket.close(), 1.0)
        await self._runner.cleanup()

    async def _death(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {self.run.token}"
        self.deaths.append(codec.decode(await request.read(), DeathNotice))
        return web.Response(status=204)

    async def _agent(self, request: web.Request) -> web.WebSocketResponse:
        assert request.headers["Authorization"] == f"Bearer {self.run.token}"
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        hello = codec.decode((await socket.receive()).data, AgentMessage)
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        journal = self.run.journals.setdefault(hello.outbox_id, [])
        last = journal[-1].sequence if journal else 0
        await socket.send_bytes(codec.encode(Welcome(term=self.term, acknowledged=last if self.acknowledging else 0)))
        self._sockets[hello.node] = socket
        async for message in socket:
            if message.type is not WSMsgType.BINARY:
                break
            said = codec.decode(message.data, AgentMessage)
            if isinstance(said, Pulse):
                self.pulses[hello.node] = said
            elif isinstance(said, Report):
                if not self.acknowledging:
                    continue
                if not journal or said.sequence > journal[-1].sequence:
                    journal.append(said)
                await socket.send_bytes(codec.encode(Ack(sequence=said.sequence)))
        return socket

    # -- what tests say and see --------------------------------------------------------------------------------------

    async def connected(self, node: NodeId, seconds: float = 20.0) -> web.WebSocketResponse:
        return await until(lambda: self._sockets.get(node), seconds, f"{node} to connect")

    async def send(self, node: NodeId, order: Order) -> None:
        await (await self.connected(node)).send_bytes(codec.encode(order))

    async def order(self, node: NodeId, action: Action, *, seconds: float = 30.0) -> OrderDone:
        """Send an order and wait for its outcome."""
        self._orders += 1
        order_id = OrderId(f"{self.term}.{self._orders}")
        await self.send(node, Order(order_id=order_id, term=self.term, cause="test", action=action))
        return await until(
            lambda: next((done for done in self.events(OrderDone) if done.order_id == order_id), None),
            seconds,
            "the outcome",
        )

    def events(self, kind):
        return [
            report.event
            for journal in self.run.journals.values()
            for report in journal
            if isinstance(report.event, kind)
        ]

    async def event(self, kind, seconds: float = 20.0, **fields):
        """The first event of a kind with these fields."""

        def find():
            for event in self.events(kind):
                if all(getattr(event, name) == value for name, value in fields.items()):
                    return event
            return None

        return await until(find, seconds, f"{kind.__name__} {fields}")

    async def start(self, node: NodeId, spec: MemberSpec, incarnation: int = 0) -> MemberStarted:
        done = await self.order(node, StartMember(spec=spec, incarnation=Incarnation(incarnation)))
        assert done.ok, done.detail
        return await self.event(MemberStarted, member=spec.member, incarnation=incarnation, adopted=False)

    async def introduce(self, nodes) -> None:
        """Tell all agents of each other, as the real master does."""
        addresses = {}
        for node in nodes:
            await self.connected(node)
            hello = [hello for hello in self.hellos if hello.node == node][-1]
            addresses[node] = PeerAddress(url=hello.url, shards=hello.shards, labels=hello.labels)
        for node in nodes:
            assert (await self.order(node, SetPeers(peers=addresses))).ok

    def shards(self, node: NodeId) -> tuple[str, int]:
        """Where the node's agent gives and takes segments."""
        host, _, port = [hello.shards for hello in self.hellos if hello.node == node][-1].rpartition(":")
        return host, int(port)

    async def ended(self, member: str, incarnation: int = 0, seconds: float = 20.0) -> MemberExited:
        return await self.event(MemberExited, seconds, member=member, incarnation=incarnation)


class Run:
    """A run folder with a plan, and the agents started for it."""

    def __init__(self, folder: Path, nodes=("node-0",), kind: str = "rl") -> None:
        self.id = RunId(secrets.token_hex(4))
        self.nodes = tuple(NodeId(node) for node in nodes)
        self.places = RunPlaces(folder)
        self.token = secrets.token_hex(16)
        self.journals: dict[str, list[Report]] = {}
        """By outbox: what survives a master."""
        self.processes: list[subprocess.Popen] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.places.storage.mkdir()
        self.places.token.touch(mode=0o600)
        self.places.token.write_text(f"member={self.token}\nread={secrets.token_hex(16)}\n")
        plan = JobPlan(run_id=self.id, name="test", kind=kind, nodes=self.nodes, members={}, placement={})
        self.places.plan.write_bytes(msgspec.json.encode(plan))

    def configure(self, *flags: str) -> None:
        """Keep the embedded example's resolved configuration with the run, as the front does, but for these flags."""
        self.places.resolved.write_bytes(to_json(load(EXAMPLE, flags, {}, gpus=0)))

    def memory(self, node="node-0") -> Path:
        return node_memory(self.id, NodeId(node))

    def segments(self, node="node-0") -> Path:
        return segments(self.memory(node))

    def member(self, name: str, node="node-0") -> Path:
        return self.places.member(NodeId(node), MemberId(name))

    def agent(self, node="node-0", *, front: int | None = None, **environment: str) -> subprocess.Popen:
        words = [sys.executable, "-m", "agents.main", "--run-dir", str(self.places.run), "--node", node]
        if front is not None:
            words += ["--front-pid", str(front)]
        self.places.node(NodeId(node)).mkdir(parents=True, exist_ok=True)
        with (self.places.node(NodeId(node)) / "agent.log").open("ab") as log:
            process = subprocess.Popen(
                words, env=os.environ | QUICK | environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def front(self) -> subprocess.Popen:
        """A process that stands for `aimaster run`."""
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.processes.append(process)
        return process

    def pids(self) -> set[int]:
        """Every living process that carries this run's mark in its environment or command line: members, shims, agents."""
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                marked = (
                    self.id.encode() in (path / "environ").read_bytes()
                    or str(self.places.run).encode() in (path / "cmdline").read_bytes()
                )
                dead = (path / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            except OSError:
                continue
            if marked and not dead:
                found.add(int(path.name))
        return found - {os.getpid()}

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(timeout=10)
        for _ in range(100):
            alive = self.pids()
            if not alive:
                break
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for node in self.nodes:
            shutil.rmtree(self.memory(node), ignore_errors=True)


def member(name: str, code: str, *, role: str = "policy", **fields) -> MemberSpec:
    """A member that runs a piece of Python."""
    return MemberSpec(member=MemberId(name), role=role, argv=(sys.executable, "-c", code), **fields)


BEATING = """
import time
from aimaster.client import start_member
progress = start_member()
step = 0
while True:
    step += 1
    progress.beat("compute", step=step)
    time.sleep(0.02)
"""


def seal_segment(
    folder: Path, step: int, *, name: str = "policy-0", flush: bool = True, size_bytes: int = 40_000
) -> Path:
    """Seal a snapshot of one tensor whose bytes depend on the step, as a trainer's engine does under an agent; returns its file."""
    import torch

    from easyckpt import Checkpointer

    sealed: list[Path] = []
    engine = Checkpointer(
        folder=folder, member=name, role=name.rpartition("-")[0], on_sealed=lambda path, _header: sealed.append(path)
    )
    try:
        weights = (torch.arange(size_bytes, dtype=torch.int64) + step).to(torch.uint8)
        assert engine.save(step, {"w": weights}, lineage=0, flush=flush)
        engine.wait(30)
    finally:
        engine.close()
    return sealed[0]


async def ask_agent(memory: Path, path: str, record, kind=None):
    """A member's request to its own agent, on the node's socket."""
    connector = aiohttp.UnixConnector(path=str(agent_socket(memory)))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"http://agent{path}", data=codec.encode(record)) as response,
    ):
        body = await response.read()
        assert response.status < 300, body
        return codec.decode(body, kind) if kind else None


async def tell_sealed(memory: Path, path: Path) -> SealedReply:
    """What a trainer says after a seal."""
    header = shm.read_header(path)
    notice = SealedNotice(
        member=MemberId(header.member),
        rank=header.rank,
        name=path.name,
        version=Version(*header.version),
        flush=header.flush,
    )
    return await ask_agent(memory, "/v1/snapshots/sealed", notice, SealedReply)
