"""An agent that speaks the real line to a real master, with members that are only records. It obeys, reports and can die."""

import asyncio
import contextlib
import json
import time
from pathlib import Path

import aiohttp

from aimaster.wire import PROTOCOL_VERSION, codec
from aimaster.wire.actions import KillMember, Order, SetPeers, StartMember, StopMember, StopNode
from aimaster.wire.ids import MemberId, NodeId, RunId, Term
from aimaster.wire.messages import (
    Ack,
    AgentEvent,
    Hello,
    MasterMessage,
    MemberExited,
    MemberPicture,
    MemberStarted,
    OrderDone,
    Progress,
    Pulse,
    Report,
    Welcome,
)
from aimaster.wire.topology import ProcessId

PULSE_SECONDS = 0.1


class FakeAgent:
    """One node's agent. `run` reconnects until cancelled or told to stop."""

    def __init__(self, run_dir: Path, run_id: str, node: str, *, token: str = "", pid: int = 1000) -> None:
        self.run_dir, self.run_id, self.node = run_dir, RunId(run_id), NodeId(node)
        self.token = token
        self.pid = pid
        self.outbox_id = f"outbox-{node}-{pid}"
        self.members: dict[MemberId, MemberPicture] = {}
        self.reports: list[Report] = []
        self.acknowledged = 0
        self.orders: list[Order] = []
        self.terms: list[Term] = []
        self.done: set[str] = set()
        self.obeyed: set[str] = set()
        self.stopped = asyncio.Event()
        self._sequence = 0
        self._news = asyncio.Event()

    async def run(self) -> None:
        async with aiohttp.ClientSession() as session:
            while not self.stopped.is_set():
                with contextlib.suppress(aiohttp.ClientError, OSError, ConnectionError, ValueError):
                    await self._talk(session)
                await asyncio.sleep(0.05)

    async def _talk(self, session: aiohttp.ClientSession) -> None:
        url = json.loads((self.run_dir / "master.json").read_bytes())["url"]
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        async with session.ws_connect(f"{url}/v1/agents/{self.node}", headers=headers) as socket:
            await socket.send_bytes(codec.encode(self.hello()))
            welcome = codec.decode((await socket.receive_bytes(timeout=10)), MasterMessage)
            assert isinstance(welcome, Welcome), welcome
            self.terms.append(welcome.term)
            self.acknowledged = max(self.acknowledged, welcome.acknowledged)
            sender = asyncio.create_task(self._send(socket, welcome.acknowledged), name=f"fake {self.node}")
            try:
                async for message in socket:
                    self._hear(codec.decode(message.data, MasterMessage))
                    if self.stopped.is_set():
                        return
            finally:
                sender.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await sender

    def hello(self) -> Hello:
        return Hello(
            protocol=PROTOCOL_VERSION,
            run_id=self.run_id,
            node=self.node,
            outbox_id=self.outbox_id,
            url=f"http://127.0.0.1:{self.pid}",
            pid=self.pid,
            term_seen=max(self.terms, default=Term(0)),
            members=tuple(self.members.values()),
        )

    async def _send(self, socket: aiohttp.ClientWebSocketResponse, sent: int) -> None:
        while True:
            self._news.clear()
            for report in self.reports:
                if report.sequence > sent:
                    await socket.send_bytes(codec.encode(report))
                    sent = report.sequence
            await socket.send_bytes(codec.encode(Pulse(at=time.time(), members=tuple(self.members.values()))))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), PULSE_SECONDS)

    def _hear(self, message: Ack | Order | Welcome) -> None:
        if isinstance(message, Ack):
            self.acknowledged = max(self.acknowledged, message.sequence)
            if "stop" in self.done and self.acknowledged == self._sequence:
                self.stopped.set()
        elif isinstance(message, Order):
            self.orders.append(message)
            self._take(message)

    def _take(self, order: Order) -> None:
        """Once each, and none of a term that is past; answered always."""
        past = order.term < max(self.terms)
        if past or order.order_id in self.obeyed:
            self.report(OrderDone(order_id=order.order_id, ok=not past))
            return
        self.obeyed.add(order.order_id)
        self._obey(order)

    def _obey(self, order: Order) -> None:
        action = order.action
        match action:
            case StartMember():
                have = self.members.get(action.spec.member)
                if have is None or have.incarnation != action.incarnation:
                    self.live(action.spec.member, action.spec.role, action.incarnation)
                picture = self.members[action.spec.member]
                self.report(
                    MemberStarted(member=picture.member, incarnation=picture.incarnation, process=picture.process)
                )
            case KillMember() | StopMember():
                have = self.members.get(action.member)
                if have is not None and have.incarnation == action.incarnation and have.alive:
                    stop = isinstance(action, StopMember)
                    self.die(action.member, signal=None if stop else 9, exit_code=0 if stop else None, expected=stop)
            case StopNode():
                for member in list(self.members.values()):
                    if member.alive:
                        self.die(member.member, exit_code=0, signal=None, expected=True)
                self.done.add("stop")
            case SetPeers():
                pass
        self.report(OrderDone(order_id=order.order_id, ok=True))

    def live(self, member: str, role: str, incarnation: int) -> None:
        """A process of this member appears."""
        process = ProcessId(boot_id="boot", pid=self.pid + len(self.orders) + 1, start_ticks=incarnation)
        progress = Progress(phase="compute", beats=1)
        self.members[member] = MemberPicture(
            member=member, role=role, incarnation=incarnation, process=process, alive=True, progress=progress
        )

    def die(
        self, member: str, *, exit_code: int | None = None, signal: int | None = 9, expected: bool = False, findings=()
    ) -> None:
        """It ends, and the death is reported."""
        picture = self.members.pop(member)
        self.report(
            MemberExited(
                member=picture.member,
                role=picture.role,
                incarnation=picture.incarnation,
                process=picture.process,
                exit_code=exit_code,
                signal=signal,
                at=time.time(),
                expected=expected,
                findings=findings,
            )
        )

    def report(self, event: AgentEvent) -> None:
        self._sequence += 1
        self.reports.append(Report(sequence=self._sequence, at=time.time(), event=event))
        self._news.set()

    def started(self) -> list[tuple[str, int]]:
        """Every start that was ordered, repeats once."""
        return list(
            dict.fromkeys(
                (o.action.spec.member, o.action.incarnation) for o in self.orders if isinstance(o.action, StartMember)
            )
        )
