"""Orders of the master, each carried out once however often it arrives, refused when its master's term is past, and always answered.

Outcomes are kept in the node's folder (`orders`, one a line), so a restarted agent answers a repeated order from there. Orders to one
member are carried out one after the other, those to different members side by side.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from agents.trainer import RefusedError, Trainer
from aimaster.wire.actions import (
    DumpStacks,
    KillMember,
    Order,
    PeerAddress,
    SetPeers,
    StartMember,
    StopMember,
    StopNode,
    TakeOverFlush,
)
from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import MemberId, NodeId, OrderId, Term
from aimaster.wire.messages import AgentEvent, OrderDone

REMEMBERED = 5000
log = structlog.get_logger()


class Node(Protocol):
    """What orders need of the node beyond its members."""

    async def dump_stacks(self, member: MemberId) -> str: ...
    def set_peers(self, peers: dict[NodeId, PeerAddress]) -> None: ...
    async def take_over_flush(self, members: tuple[MemberId, ...], newest: Version | None) -> str: ...
    async def stop_node(self, *, grace_seconds: float, remove_memory: bool) -> None: ...
    def leave(self) -> None: ...


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    order_id: OrderId
    term: Term
    ok: bool
    detail: str = ""


class Orders:
    """Takes orders from the link; used by the event loop alone."""

    def __init__(
        self,
        folder: Path,
        trainer: Trainer,
        node: Node,
        *,
        report: Callable[[AgentEvent, float], None],
        spawn: Callable[[str, Coroutine[Any, Any, None]], None],
    ) -> None:
        self.term = Term(0)
        """The highest term seen."""
        self.refused = 0
        self._path = folder / "orders"
        self._trainer = trainer
        self._node = node
        self._report = report
        self._spawn = spawn
        self._outcomes: dict[OrderId, _Outcome] = {}
        self._running: set[OrderId] = set()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._load()

    def see_term(self, term: Term) -> None:
        """A master of this term has answered."""
        self.term = max(self.term, term)

    def take(self, order: Order) -> None:
        """Begin to carry out an order, or answer it at once."""
        known = self._outcomes.get(order.order_id)
        if known is not None:
            self._report(OrderDone(order_id=known.order_id, ok=known.ok, detail=known.detail), time.time())
        elif order.order_id in self._running:
            return
        elif order.term < self.term:
            self.refused += 1
            detail = f"term {order.term} is past, this agent has seen {self.term}"
            self._report(OrderDone(order_id=order.order_id, ok=False, detail=detail), time.time())
        else:
            self.see_term(order.term)
            self._running.add(order.order_id)
            self._spawn(f"order {order.order_id}", self._carry_out(order))

    async def _carry_out(self, order: Order) -> None:
        action = order.action
        subject = action.spec.member if isinstance(action, StartMember) else getattr(action, "member", "node")
        if isinstance(action, TakeOverFlush):
            subject = f"flush of {action.node}"  # it may take long, and holds up nothing
        try:
            async with self._locks[subject]:
                detail = await self._act(order)
            outcome = _Outcome(order_id=order.order_id, term=order.term, ok=True, detail=detail)
        except (RefusedError, OSError) as error:
            outcome = _Outcome(order_id=order.order_id, term=order.term, ok=False, detail=str(error))
        finally:
            self._running.discard(order.order_id)
        log.info(
            "order_done",
            order=order.order_id,
            action=type(action).__name__,
            cause=order.cause,
            ok=outcome.ok,
            detail=outcome.detail,
        )
        self._remember(outcome)
        self._report(OrderDone(order_id=outcome.order_id, ok=outcome.ok, detail=outcome.detail), time.time())
        if isinstance(action, StopNode):
            self._node.leave()

    async def _act(self, order: Order) -> str:
        match order.action:
            case StartMember(spec=spec, incarnation=incarnation):
                return await self._trainer.start(spec, incarnation)
            case KillMember(member=member, incarnation=incarnation):
                await self._trainer.kill(self._trainer.find(member, incarnation))
                return "killed"
            case StopMember(member=member, incarnation=incarnation, grace_seconds=grace):
                await self._trainer.stop(self._trainer.find(member, incarnation), grace)
                return "stopped"
            case DumpStacks(member=member, incarnation=incarnation):
                self._trainer.find(member, incarnation)
                return await self._node.dump_stacks(member)
            case SetPeers(peers=peers):
                self._node.set_peers(peers)
                return f"{len(peers)} peers"
            case TakeOverFlush(members=members, newest=newest):
                return await self._node.take_over_flush(members, newest)
            case StopNode(grace_seconds=grace, remove_memory=remove):
                await self._node.stop_node(grace_seconds=grace, remove_memory=remove)
                return "stopped"

    def _remember(self, outcome: _Outcome) -> None:
        self._outcomes[outcome.order_id] = outcome
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(outcome) + b"\n")
        except OSError as error:  # a full disk: remembered in memory; orders are harmless to repeat as well
            log.warning("order_not_written", order=outcome.order_id, error=str(error))

    def _load(self) -> None:
        try:
            lines = self._path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        for line in lines[-REMEMBERED:]:
            try:
                outcome = msgspec.json.decode(line, type=_Outcome)
            except msgspec.MsgspecError:  # cut short by a kill
                continue
            self._outcomes[outcome.order_id] = outcome
            self.see_term(outcome.term)
        if len(lines) > 2 * REMEMBERED:
            fresh = self._path.with_suffix(".new")
            fresh.write_bytes(b"".join(line + b"\n" for line in lines[-REMEMBERED:]))
            fresh.replace(self._path)
