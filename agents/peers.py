"""Snapshots between nodes, agent to agent: the newest of each own member is copied to peers, and what a member lacks is fetched.

Which peers: those in other failure domains first (rack, switch: the nodes' labels), never this node, spread evenly. Bytes go over plain sockets
in threads, after a cut from where they stopped, under a cap where one is set; the receiver proves every digest and seals last. A peer that does
not answer is left out for a while and the next best one holds the copy. A peer replaced under its old name has a new address and gets it again.
"""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
import structlog

from agents.config import Keeping, bearer
from agents.keeper import Keeper
from aimaster.telemetry.tokens import secret_of
from aimaster.wire import codec
from aimaster.wire.actions import PeerAddress
from aimaster.wire.checkpoint import FetchReply, FetchRequest, SnapshotPlace, Version
from aimaster.wire.ids import NodeId
from aimaster.wire.messages import AgentEvent, SnapshotMoved
from easyckpt import placement
from easyckpt.errors import Corrupt, EasyckptError, Pinned, Torn, Unsealed
from easyckpt.events import Event
from easyckpt.shardserver import Peer
from easyckpt.shardwire import Bandwidth
from easyckpt.shm import Segment

LIST_SECONDS = 2.0
COPY_SILENCE_SECONDS = 10.0
"""A copy that moves no byte for so long is cut, and goes on over a new connection for as long again."""
RETRY_SECONDS = 1.0
AVOID_SECONDS = 10.0
"""A peer that did not answer, or refused, is left out for so long."""
OFFER_SECONDS = 60.0
"""A copy is offered again after so long: a peer that has it still says so at once, one that lost or dropped it takes it."""
COPY_THREADS = 8
log = structlog.get_logger()


class _Held(NamedTuple):
    """A copy that a peer has taken."""

    address: str
    version: tuple[int, int]
    offered_at: float
    """Monotonic seconds."""


class Peers:
    """The other agents of the run."""

    def __init__(
        self,
        node: NodeId,
        keeper: Keeper,
        keeping: Keeping,
        token_file: Path,
        session: aiohttp.ClientSession,
        report: Callable[[AgentEvent, float], None],
    ) -> None:
        self.addresses: dict[NodeId, PeerAddress] = {}
        self.copies: dict[str, int] = {
            "sent": 0, "failed": 0, "received": 0, "resumed": 0, "refused": 0, "fetched": 0,
        }  # fmt: skip
        self._node = node
        self._keeper = keeper
        self._keeping = keeping
        self._token_file = token_file
        self._session = session
        self._report = report
        cap = keeping.copy_bytes_per_second
        self._bandwidth = Bandwidth(cap) if cap > 0 else None
        self._copied: defaultdict[str, dict[NodeId, _Held]] = defaultdict(dict)
        """By member and rank: who holds the newest copies."""
        self._avoided: dict[NodeId, float] = {}
        """Peers that are left out, and until when."""
        self._busy: set[tuple[str, NodeId]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._fetching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By member and rank: two copies that arrive at once would share a slot."""
        self._threads = ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy")

    def set(self, addresses: dict[NodeId, PeerAddress]) -> None:
        """All agents of the run, this one included or not."""
        for node, address in addresses.items():
            if self.addresses.get(node) != address:
                self._avoided.pop(node, None)  # it is another one, or has moved
        self.addresses = {node: address for node, address in addresses.items() if node != self._node}
        self._keeper.sealed.set()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def hear(self, event: Event) -> None:
        """What the server of this node's segments did; called on its threads."""
        outcome = event.kind.removeprefix("copy_")
        if outcome in ("received", "resumed", "refused"):
            self.copies[outcome] += 1
        if outcome == "refused":
            log.warning("copy_not_taken", reason=event.text)

    # -- copies to peers ---------------------------------------------------------------------------------------------

    async def copy_forever(self) -> None:
        """Copy the newest sealed segment of each own member whenever something was sealed; an overtaken one is skipped."""
        async with asyncio.TaskGroup() as group:
            while True:
                with contextlib.suppress(TimeoutError):  # then what was copied long ago is offered again
                    await asyncio.wait_for(self._keeper.sealed.wait(), OFFER_SECONDS)
                self._keeper.sealed.clear()
                for segment, node in self._due():
                    self._busy.add((_key(segment), node))
                    group.create_task(self._copy(segment, node))

    def holders(self, need_bytes: int = 0) -> list[NodeId]:
        """The peers that are to hold this node's copies now, best first."""
        now = time.monotonic()
        nodes = [placement.Node(name=self._node, labels=self._keeping.labels)]
        nodes += [
            placement.Node(name=node, labels=address.labels)
            for node, address in self.addresses.items()
            if address.shards and self._avoided.get(node, 0.0) <= now
        ]
        chosen = placement.choose_peers(self._node, nodes, copies=self._keeping.copies, need_bytes=need_bytes)
        return [NodeId(name) for name in chosen]

    def _due(self) -> list[tuple[Segment, NodeId]]:
        if self._keeping.replicate_every <= 0 or self._keeping.copies <= 0 or not self.addresses:
            return []
        newest: dict[str, Segment] = {}
        for segment in self._keeper.segments():
            if (
                segment.tier == "shm"
                and segment.header.step % self._keeping.replicate_every == 0
                and not self._keeper.is_damaged(segment)
            ):
                newest.setdefault(_key(segment), segment)
        holders = self.holders()
        if len(holders) < min(self._keeping.copies, len(self.addresses)):
            self._try_again()  # somebody is left out for now
        return [
            (segment, node)
            for key, segment in newest.items()
            for node in holders
            if (key, node) not in self._busy and self._is_wanted(segment, self._copied[key].get(node), node)
        ]

    def _is_wanted(self, segment: Segment, held: _Held | None, node: NodeId) -> bool:
        """Whether a peer may lack it, given what it took last."""
        if held is None or (held.address, held.version) != (self.addresses[node].shards, segment.header.version):
            return True
        return time.monotonic() - held.offered_at >= OFFER_SECONDS

    async def _copy(self, segment: Segment, node: NodeId) -> None:
        key = _key(segment)
        address = self.addresses[node].shards
        try:
            sent_bytes = await asyncio.get_running_loop().run_in_executor(self._threads, self._push, address, segment)
        except (Torn, Unsealed, FileNotFoundError) as error:  # overwritten before it was pinned: a newer one is there
            log.debug("copy_overtaken", name=segment.path.name, error=str(error))
            self._keeper.sealed.set()
        except Pinned as error:  # it takes another copy of this member just now
            log.debug("copy_waits", peer=node, error=str(error))
            self._try_again()
        except (OSError, msgspec.MsgspecError) as error:
            if node not in self._avoided:
                log.info("peer_silent", peer=node, error=str(error)[:200])
            self._avoid(node)
        except EasyckptError as error:
            if isinstance(error, Corrupt):
                self._keeper.suspect(segment)
            self.copies["failed"] += 1
            log.warning("copy_refused", peer=node, name=segment.path.name, reason=str(error))
            place = msgspec.structs.replace(self._keeper.place(segment), tier="peer", node=node)
            self._report(SnapshotMoved(place=place, error=str(error)[:500]), time.time())
            self._avoid(node)
        else:
            self._avoided.pop(node, None)
            self._copied[key][node] = _Held(address, segment.header.version, time.monotonic())
            if sent_bytes:  # else it is there still
                self.copies["sent"] += 1
                self._keeper.note_proven(segment)
            self._keeper.sealed.set()  # something newer may be there by now
        finally:
            self._busy.discard((key, node))

    def _push(self, address: str, segment: Segment) -> int:
        """Returns the bytes that had to be sent."""
        return self._peer(address).push(
            segment.path,
            expected=segment.header,
            bandwidth=self._bandwidth,
            patience_seconds=COPY_SILENCE_SECONDS,
        )

    def _peer(self, address: str) -> Peer:
        host, _, port = address.rpartition(":")
        token = secret_of(self._token_file, "member")
        return Peer((host, int(port)), token=token, timeout_seconds=COPY_SILENCE_SECONDS)

    def _avoid(self, node: NodeId) -> None:
        """Leave a peer out for a while; the next best one is tried now."""
        self._avoided[node] = time.monotonic() + AVOID_SECONDS
        self._keeper.sealed.set()

    def _try_again(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._keeper.sealed.set)

    # -- fetching for a local member ---------------------------------------------------------------------------------

    async def fetch(self, request: FetchRequest) -> FetchReply:
        """The newest whole snapshot of a role (or exactly `at`): from this memory, else a peer's, else where it lies on storage."""
        started = time.monotonic()
        try:
            async with asyncio.timeout(request.deadline_seconds):
                found = await self._fetch(request)
        except TimeoutError:
            found = ()
        return FetchReply(places=found, seconds=time.monotonic() - started)

    async def _fetch(self, request: FetchRequest) -> tuple[SnapshotPlace, ...]:
        offers: list[tuple[int, NodeId, tuple[SnapshotPlace, ...]]] = []
        offers += [(2, self._node, group) for group in whole(self._keeper.places(), request)]
        nodes = sorted(self.addresses)
        lists = await asyncio.gather(*(self._list(node) for node in nodes))
        for node, held in zip(nodes, lists, strict=True):
            offers += [(1, node, group) for group in whole(held, request)]
        try:
            stored = await asyncio.to_thread(self._keeper.stored, request.role)
        except (EasyckptError, OSError) as error:
            log.warning("storage_not_read", error=str(error)[:300])
            stored = []
        offers += [(0, self._node, group) for group in whole(stored, request)]
        for nearness, node, group in sorted(offers, key=lambda offer: (offer[2][0].version, offer[0]), reverse=True):
            if nearness != 1:
                return group
            try:
                return tuple([await self._get(node, place) for place in group])
            except (OSError, EasyckptError) as error:
                self.copies["refused"] += 1
                log.warning(
                    "fetch_failed", peer=node, version=msgspec.to_builtins(group[0].version), error=str(error)[:300]
                )
        return ()

    async def _list(self, node: NodeId) -> tuple[SnapshotPlace, ...]:
        address = self.addresses.get(node)
        if address is None:
            return ()
        try:
            async with self._session.get(
                f"{address.url}/v1/snapshots",
                headers=bearer(self._token_file),
                timeout=aiohttp.ClientTimeout(total=LIST_SECONDS),
            ) as response:
                response.raise_for_status()
                return codec.decode(await response.read(), tuple[SnapshotPlace, ...])
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            return ()

    async def _get(self, node: NodeId, place: SnapshotPlace) -> SnapshotPlace:
        """One shard from a peer's memory, unless it has come here meanwhile."""
        async with self._fetching[f"{place.member}.r{place.rank}"]:
            for here in self._keeper.places():
                if (here.member, here.rank, here.version) == (place.member, place.rank, place.version):
                    return here
            peer = self._peer(self.addresses[node].shards)
            segment = await asyncio.to_thread(peer.pull, place.name, self._keeper.folder)
            got = self._keeper.place(segment)
        if got.version != place.version:
            raise EasyckptError(f"{place.name} of {node} was overwritten meanwhile: it holds {got.version} now")
        self.copies["fetched"] += 1
        return got


def _key(segment: Segment) -> str:
    return f"{segment.header.member}.r{segment.header.rank}"


def whole(
    held: tuple[SnapshotPlace, ...] | list[SnapshotPlace], request: FetchRequest
) -> list[tuple[SnapshotPlace, ...]]:
    """The snapshots of the asked role and version of which all ranks are there, one tuple of places each."""
    groups: dict[tuple[str, Version, str], dict[int, SnapshotPlace]] = {}
    for place in held:
        if place.damaged or place.role != request.role or (request.at is not None and place.version != request.at):
            continue
        if request.newer_than is not None and place.version <= request.newer_than:
            continue
        groups.setdefault((place.member, place.version, place.tier), {}).setdefault(place.rank, place)
    return [
        tuple(ranks[rank] for rank in sorted(ranks))
        for ranks in groups.values()
        if len(ranks) == next(iter(ranks.values())).ranks
    ]
