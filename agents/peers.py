"""Snapshots between nodes, agent to agent: the newest of each own member is copied to one peer, and what a member lacks is fetched.

Bytes are those of the segment; the receiver proves every digest and seals last, so a broken copy is refused and never a candidate.
The peer is the next node in the ring of names; when it does not answer, the one after it. A peer replaced under its old name has a
new address and gets the newest copy again.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import structlog

from agents.config import Keeping, bearer
from agents.keeper import Keeper
from aimaster.wire import codec
from aimaster.wire.checkpoint import FetchReply, FetchRequest, SnapshotPlace, Version
from aimaster.wire.ids import NodeId
from aimaster.wire.messages import AgentEvent, SnapshotMoved
from easyckpt import layout, replica
from easyckpt.errors import EasyckptError, Foreign
from easyckpt.shm import Segment

LIST_SECONDS = 2.0
COPY_SECONDS = 600.0
RETRY_SECONDS = 1.0
FEED_BYTES = 1 << 20
NEVER = (-1, -1)
log = structlog.get_logger()


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
        self.urls: dict[NodeId, str] = {}
        self.copies: dict[str, int] = {"sent": 0, "failed": 0, "received": 0, "refused": 0, "fetched": 0}
        self._node = node
        self._keeper = keeper
        self._keeping = keeping
        self._token_file = token_file
        self._session = session
        self._report = report
        self._copied: dict[str, tuple[str, tuple[int, int]]] = {}
        """By member and rank: where the newest copy went, and its version."""
        self._silent: set[NodeId] = set()
        """Peers that did not answer last time; said once."""
        self._retry: asyncio.TimerHandle | None = None
        self._arriving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By member and rank: two copies that arrive at once would share a slot."""

    def set(self, urls: dict[NodeId, str]) -> None:
        """Addresses of all agents of the run, this one included or not."""
        self.urls = {node: url for node, url in urls.items() if node != self._node}
        self._keeper.sealed.set()

    def ring(self) -> list[NodeId]:
        """The peers in the order in which they are tried."""
        names = sorted(self.urls)
        return [name for name in names if name > self._node] + [name for name in names if name < self._node]

    # -- copies to a peer --------------------------------------------------------------------------------------------

    async def copy_forever(self) -> None:
        """Copy the newest sealed segment of each own member whenever something was sealed; an overtaken one is skipped."""
        while True:
            await self._keeper.sealed.wait()
            self._keeper.sealed.clear()
            if self._keeping.replicate_every <= 0 or not self.urls:
                continue
            for segment in self._due():
                if not await self._copy(segment):
                    self._try_again()

    def _try_again(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._keeper.sealed.set)

    def _due(self) -> list[Segment]:
        newest: dict[str, Segment] = {}
        for segment in self._keeper.segments():
            if segment.tier == "shm" and segment.header.step % self._keeping.replicate_every == 0:
                newest.setdefault(f"{segment.header.member}.r{segment.header.rank}", segment)
        due = []
        for key, segment in newest.items():
            where, version = self._copied.get(key, ("", NEVER))
            if where not in self.urls.values() or version < segment.header.version:
                due.append(segment)
        return due

    async def _copy(self, segment: Segment) -> bool:
        for peer in self.ring():
            url = self.urls[peer]
            try:
                answer = await self._put(url, segment)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if peer not in self._silent:
                    log.info("peer_silent", peer=peer, error=str(error)[:200])
                self._silent.add(peer)
                continue
            except EasyckptError as error:  # overwritten before it was pinned: a newer one is there
                log.debug("copy_overtaken", name=segment.path.name, error=str(error))
                return True
            self._silent.discard(peer)
            if answer is None:
                self.copies["sent"] += 1
                self._copied[f"{segment.header.member}.r{segment.header.rank}"] = (url, segment.header.version)
                return True
            self.copies["failed"] += 1
            log.warning("copy_refused", peer=peer, name=segment.path.name, reason=answer)
            place = msgspec.structs.replace(self._keeper.place(segment), tier="peer", node=peer)
            self._report(SnapshotMoved(place=place, error=answer), time.time())
            return False
        return False

    async def _put(self, url: str, segment: Segment) -> str | None:
        """None when the peer holds it, else the peer's reason."""
        with replica.Outgoing(segment.path, deadline=COPY_SECONDS) as outgoing:
            if outgoing.segment.header != segment.header:
                return None  # a newer one lies there by now; its own seal wakes the copy
            async with self._session.put(
                f"{url}/v1/replicas/{segment.path.name}",
                params={"version": "{}.{}".format(*segment.header.version)},
                data=_pieces(outgoing),
                headers=bearer(self._token_file) | {"Content-Length": str(outgoing.total_bytes)},
                timeout=aiohttp.ClientTimeout(total=COPY_SECONDS, sock_connect=LIST_SECONDS, sock_read=60.0),
            ) as response:
                return None if response.status == 200 else (await response.text())[:500]

    async def receive(self, name: str, content: aiohttp.StreamReader, version: Version | None = None) -> SnapshotPlace:
        """Take a segment that arrives, unless it is here already: `version` is what its sender says of it.

        Raises EasyckptError when it is not proven; nothing of it is a candidate then.
        """
        parsed = layout.parse_name(name)
        if parsed is None:
            raise Foreign(f"{name!r} is not the name of a segment; the copy is refused")
        async with self._arriving[f"{parsed.member}.r{parsed.rank}"]:
            for place in self._keeper.places():
                if (place.member, place.rank, place.version) == (parsed.member, parsed.rank, version):
                    async for _ in content.iter_any():  # a sender that is cut off would take it for a failure
                        pass
                    return place
            incoming = replica.Incoming(self._keeper.folder, name)
            try:
                held = bytearray()
                async for piece in content.iter_any():
                    held += piece
                    if len(held) >= FEED_BYTES:
                        await asyncio.to_thread(incoming.feed, bytes(held))
                        held.clear()
                incoming.feed(held)
                return self._keeper.place(incoming.commit())
            finally:
                incoming.abort()

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
        lists = await asyncio.gather(*(self._list(node) for node in self.ring()))
        for node, held in zip(self.ring(), lists, strict=True):
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
            except (aiohttp.ClientError, TimeoutError, OSError, EasyckptError) as error:
                self.copies["refused"] += 1
                log.warning(
                    "fetch_failed", peer=node, version=msgspec.to_builtins(group[0].version), error=str(error)[:300]
                )
        return ()

    async def _list(self, node: NodeId) -> tuple[SnapshotPlace, ...]:
        url = self.urls.get(node)
        if url is None:
            return ()
        try:
            async with self._session.get(
                f"{url}/v1/snapshots",
                headers=bearer(self._token_file),
                timeout=aiohttp.ClientTimeout(total=LIST_SECONDS),
            ) as response:
                response.raise_for_status()
                return codec.decode(await response.read(), tuple[SnapshotPlace, ...])
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError):
            return ()

    async def _get(self, node: NodeId, place: SnapshotPlace) -> SnapshotPlace:
        timeout = aiohttp.ClientTimeout(total=COPY_SECONDS, sock_connect=LIST_SECONDS, sock_read=60.0)
        url = f"{self.urls[node]}/v1/snapshots/{place.name}"
        async with self._session.get(url, headers=bearer(self._token_file), timeout=timeout) as response:
            response.raise_for_status()
            got = await self.receive(place.name, response.content, place.version)
        if got.version != place.version:
            raise EasyckptError(f"{place.name} of {node} was overwritten meanwhile: it holds {got.version} now")
        self.copies["fetched"] += 1
        return got


def whole(
    held: tuple[SnapshotPlace, ...] | list[SnapshotPlace], request: FetchRequest
) -> list[tuple[SnapshotPlace, ...]]:
    """The snapshots of the asked role and version of which all ranks are there, one tuple of places each."""
    groups: dict[tuple[str, Version, str], dict[int, SnapshotPlace]] = {}
    for place in held:
        if place.role != request.role or (request.at is not None and place.version != request.at):
            continue
        if request.newer_than is not None and place.version <= request.newer_than:
            continue
        groups.setdefault((place.member, place.version, place.tier), {}).setdefault(place.rank, place)
    return [
        tuple(ranks[rank] for rank in sorted(ranks))
        for ranks in groups.values()
        if len(ranks) == next(iter(ranks.values())).ranks
    ]


async def _pieces(outgoing: replica.Outgoing) -> AsyncIterator[bytes]:
    for piece in outgoing:
        yield piece
        await asyncio.sleep(0)
