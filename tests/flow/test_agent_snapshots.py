import asyncio
import os
import time

import aiohttp
import pytest

from aimaster.wire import codec
from aimaster.wire.actions import StopNode, TakeOverFlush
from aimaster.wire.checkpoint import FetchReply, FetchRequest, SaveTrouble, SnapshotPlace, Version
from aimaster.wire.messages import Found, SnapshotMoved, SnapshotsDeleted
from easyckpt import flush, shm, storage
from easyckpt.errors import EasyckptError
from easyckpt.shardserver import Peer
from tests.flow.agent_master import Master, Run, ask_agent, seal_segment, tell_sealed, until


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run", nodes=("node-0", "node-1", "node-2"))
    yield run
    run.close()


def stored(run) -> list[int]:
    return [record.step for record in storage.list_manifests(run.places.storage, "policy")]


def held(run, node, tier="peer") -> list[int]:
    return [segment.header.step for segment in shm.scan(run.segments(node)) if segment.tier == tier]


async def seal(run, step, *, node="node-0", **fields):
    path = seal_segment(run.segments(node), step, **fields)
    await tell_sealed(run.memory(node), path)
    return path


async def test_a_marked_segment_goes_to_storage(run):
    """A seal told with the flush mark is committed to storage, told to the master, and its pin ends; unmarked ones stay in memory."""
    run.agent()
    async with Master(run) as master:
        await master.connected("node-0")
        await seal(run, 1, flush=False)
        path = await seal(run, 2)
        moved = await master.event(SnapshotMoved)
        assert (moved.place.tier, moved.place.version, moved.place.node, moved.error) == (
            "storage",
            Version(0, 2),
            None,
            None,
        )
        assert stored(run) == [2]
        await until(lambda: not shm.pinned_names(run.segments()))
        assert path.exists()
        shown = await until(lambda: len(master.pulses["node-0"].snapshots) == 2 and master.pulses["node-0"].snapshots)
        assert {place.version.step for place in shown} == {1, 2}


async def test_what_another_node_flushed_is_let_go(run):
    """A marked step that is on storage already is not written again, and its pin ends."""
    run.agent()
    async with Master(run) as master:
        await master.connected("node-0")
        run.segments("node-1").mkdir(parents=True)
        flush.flush_segment(
            shm.read_segment(seal_segment(run.segments("node-1"), 3, name="policy-1")), run.places.storage
        )
        await seal(run, 3)
        await until(lambda: not shm.pinned_names(run.segments()))
        assert stored(run) == [3]
        assert master.events(SnapshotMoved) == []


async def test_old_checkpoints_go(run):
    """Retention: the three newest checkpoints stay on storage; the master is told of those that went."""
    run.agent()
    async with Master(run) as master:
        await master.connected("node-0")
        for step in range(1, 6):
            await seal(run, step)
            await master.event(SnapshotMoved, place=await _place_of(master, step))
        await until(lambda: stored(run) == [5, 4, 3])

        def gone():
            return {folder for event in master.events(SnapshotsDeleted) for folder in event.folders}

        await until(lambda: gone() == {f"policy/l000-s00000000{step}-e000" for step in (1, 2)})


async def _place_of(master, step):
    return await until(
        lambda: next((e.place for e in master.events(SnapshotMoved) if e.place.version.step == step), None)
    )


async def test_memory_outlives_the_agent(run):
    """What was sealed and marked while the agent was dead is flushed by the next one; unsealed left-overs are removed."""
    first = run.agent()
    async with Master(run) as master:
        await master.connected("node-0")
        first.kill()
        first.wait(timeout=10)
        seal_segment(run.segments(), 7)
        torn = run.segments() / "policy-0.r0.s1.safetensors"
        torn.write_bytes(bytes(100))
        run.agent()
        await until(lambda: stored(run) == [7])
        assert not torn.exists()


RACKS = {"node-0": "rack=r1", "node-1": "rack=r1", "node-2": "rack=r2"}


async def test_the_newest_segment_is_copied_to_a_peer_in_another_rack(run):
    """A sealed segment appears in the memory of the node of the other rack, and of that one alone, proven and equal to the byte."""
    for node in run.nodes:
        run.agent(node, AIMASTER_AGENT__LABELS=RACKS[node])
    async with Master(run) as master:
        await master.introduce(run.nodes)
        path = await seal(run, 3, flush=False)
        await until(lambda: held(run, "node-2") == [3])
        copy = run.segments("node-2") / "policy-0.r0.peer.s0.safetensors"
        assert copy.read_bytes() == path.read_bytes()
        await seal(run, 4, flush=False)
        await until(lambda: held(run, "node-2") == [4, 3])
        assert held(run, "node-1") == []
        assert held(run, "node-0") == []
        shown = await until(lambda: len(master.pulses["node-2"].snapshots) == 2 and master.pulses["node-2"].snapshots)
        assert all(abs(place.verified_at - time.time()) < 60 for place in shown)
        await until(lambda: any(place.verified_at for place in master.pulses["node-0"].snapshots))
        assert master.hellos[-1].labels


async def test_the_copy_goes_past_a_dead_peer(run):
    """The best peer's agent is dead: the next best takes the copy; a peer that comes back empty gets it again."""
    agents = {node: run.agent(node, AIMASTER_AGENT__LABELS=RACKS[node]) for node in run.nodes}
    async with Master(run) as master:
        await master.introduce(run.nodes)
        agents["node-2"].kill()
        agents["node-2"].wait(timeout=10)
        await seal(run, 5, flush=False)
        await until(lambda: held(run, "node-1") == [5])
        agents["node-1"].kill()
        agents["node-1"].wait(timeout=10)
        for path in run.segments("node-1").iterdir():
            path.unlink()
        agents["node-1"] = run.agent("node-1")
        await until(lambda: len(master.hellos) == 4)
        await master.introduce(("node-0", "node-1"))
        await until(lambda: held(run, "node-1") == [5])


async def test_a_lost_nodes_flush_is_taken_over_by_those_who_hold_its_copies(run):
    """Node 0 is gone with its memory and nothing of it was flushed: on the master's word its copy goes to storage, once, though two nodes
    hold one; steps that were never committed stay where they are; the master hears of it.
    """
    run.configure("--aimaster.snapshots.copies", "2")
    agents = {node: run.agent(node) for node in run.nodes}
    async with Master(run) as master:
        await master.introduce(run.nodes)
        for step in (6, 7):
            await seal(run, step, flush=False)
            await until(lambda step=step: step in held(run, "node-1") and step in held(run, "node-2"))
        agents["node-0"].kill()
        agents["node-0"].wait(timeout=10)
        for path in run.segments("node-0").iterdir():
            path.unlink()
        order = TakeOverFlush(node="node-0", members=("policy-0",), newest=Version(0, 6))
        done = await asyncio.gather(*(master.order(node, order) for node in ("node-1", "node-2")))
        assert sorted(one.detail for one in done) == [
            "flushed step 6 of policy-0",
            "nothing newer than storage has is held here",
        ]
        assert stored(run) == [6]
        (moved,) = master.events(SnapshotMoved)
        assert (moved.place.tier, moved.place.version) == ("storage", Version(0, 6))
        flush.verify_stored(run.places.storage, storage.list_manifests(run.places.storage, "policy")[0])


async def test_what_goes_wrong_in_memory_is_a_finding(run):
    """A segment that somebody unlinked, a file that is none of ours, a save that a member lost: each is named once, nothing is touched."""
    run.agent()
    async with Master(run) as master:
        await master.connected("node-0")
        path = await seal(run, 1, flush=False)
        await until(lambda: master.pulses["node-0"].snapshots)
        stranger = run.segments() / "core.1234"
        stranger.write_bytes(b"x" * 100)
        path.unlink()
        trouble = SaveTrouble(member="policy-0", version=Version(0, 3), text="no room in /dev/shm")
        await ask_agent(run.memory(), "/v1/snapshots/trouble", trouble)

        def found():
            return {event.finding.sign: event.finding.details["message"] for event in master.events(Found)}

        await until(lambda: len(found()) == 3)
        assert path.name in found()["snapshot.segment_lost"]
        assert "core.1234" in found()["snapshot.foreign_file"]
        assert "no room in /dev/shm" in found()["snapshot.save_failed"]
        assert stranger.exists()
        await seal(run, 2, flush=False)
        await until(lambda: [place.version.step for place in master.pulses["node-0"].snapshots] == [2])
        assert len(master.events(Found)) == 3


async def test_a_corrupt_copy_is_refused(run):
    """One flipped byte: the receiver says so, nothing of it is a candidate, and the copy before it is untouched; so it does without the token."""
    run.agent("node-1")
    async with Master(run) as master:
        await master.connected("node-1")
        run.segments("node-0").mkdir(parents=True)
        good, bad = seal_segment(run.segments("node-0"), 1), seal_segment(run.segments("node-0"), 2)
        peer = Peer(master.shards("node-1"), token=run.token)
        assert await asyncio.to_thread(peer.push, good) == good.stat().st_size
        data = bytearray(bad.read_bytes())
        flipped = bytearray(data)
        flipped[-100] ^= 1
        bad.write_bytes(flipped)
        with pytest.raises(EasyckptError, match=r"refused.*digest"):
            await asyncio.to_thread(peer.push, bad)
        bad.write_bytes(data)
        with pytest.raises(EasyckptError, match="token"):
            await asyncio.to_thread(Peer(master.shards("node-1"), token="guessed").push, bad)
        assert held(run, "node-1") == [1]
        async with aiohttp.ClientSession() as session:
            metrics = await (await session.get(f"{master.hellos[0].url}/metrics")).text()
            assert 'easyckpt_copies_total{outcome="refused"} 1.0' in metrics
        await asyncio.to_thread(peer.push, bad)
        assert held(run, "node-1") == [2, 1]


async def test_a_member_fetches_from_memory_peers_and_storage(run):
    """Own memory first, then a peer's by a verified copy, then the place on storage; `newer_than` and `at` are kept to."""
    for node in run.nodes:
        run.agent(node)
    async with Master(run) as master:
        await master.introduce(run.nodes)

        async def fetch(node, **fields):
            reply = await ask_agent(
                run.memory(node), "/v1/snapshots/fetch", FetchRequest(role="policy", **fields), FetchReply
            )
            return [(place.tier, place.version.step) for place in reply.places]

        assert await fetch("node-2") == []
        await seal(run, 3, flush=True)
        await until(lambda: stored(run) == [3] and held(run, "node-1") + held(run, "node-2") == [3])
        assert await fetch("node-0") == [("shm", 3)]
        assert await fetch("node-1") == [("peer", 3)]
        assert await fetch("node-2") == [("peer", 3)]
        assert held(run, "node-2") == [3]
        assert await fetch("node-2", newer_than=Version(0, 3)) == []
        await seal(run, 4, flush=False)
        assert await fetch("node-2", newer_than=Version(0, 3)) == [("peer", 4)]
        assert await fetch("node-2", at=Version(0, 3)) == [("peer", 3)]
        for node in run.nodes:
            for path in run.segments(node).glob("*.safetensors"):
                path.unlink()
        assert await fetch("node-2") == [("storage", 3)]


async def test_a_corrupt_peer_is_passed_over(run):
    """The peer's copy has a flipped byte: the member gets the older checkpoint from storage, and the node holds nothing corrupt."""
    for node in ("node-0", "node-2"):
        run.agent(node)
    async with Master(run) as master:
        for node in ("node-0", "node-2"):
            await master.connected(node)
        await seal(run, 3)
        await until(lambda: stored(run) == [3])
        path = seal_segment(run.segments(), 4, flush=False)
        with path.open("r+b") as file:
            file.seek(-50, os.SEEK_END)
            file.write(b"\xff\xfe\xfd")
        await master.introduce(("node-0", "node-2"))
        reply = await ask_agent(run.memory("node-2"), "/v1/snapshots/fetch", FetchRequest(role="policy"), FetchReply)
        assert [place.version.step for place in reply.places] == [3]
        assert 4 not in held(run, "node-2")


async def test_nodes_that_end_together_flush_their_newest_step_once_and_without_a_complaint(run):
    """Replicas of one role hold the same step: one node writes it, the others see it through."""
    nodes = ("node-0", "node-1")
    agents = [run.agent(node) for node in nodes]
    async with Master(run) as master:
        for number, node in enumerate(nodes):
            await master.connected(node)
            await seal(run, 5, node=node, name=f"policy-{number}", flush=False, size_bytes=3_000_000)
        await asyncio.gather(*(master.order(node, StopNode(remove_memory=True)) for node in nodes))
        await until(lambda: all(agent.poll() is not None for agent in agents))
        assert stored(run) == [5]
        assert [event for event in master.events(Found) if event.finding.sign == "agent.flush_failed"] == []
        assert len(master.events(SnapshotMoved)) == 1


@pytest.mark.parametrize("end", ["front", "order"])
async def test_the_newest_snapshot_is_flushed_at_the_end(run, end):
    """When the front is killed or the node is stopped, the newest sealed snapshot goes to storage though it was not marked."""
    front = run.front()
    agent = run.agent(front=front.pid)
    async with Master(run) as master:
        await master.connected("node-0")
        await seal(run, 8, flush=False)
        if end == "front":
            front.kill()
            front.wait(timeout=10)
        else:
            await master.order("node-0", StopNode(remove_memory=True))
        await until(lambda: agent.poll() is not None)
        assert stored(run) == [8]
        assert run.memory().exists() == (end == "front")


async def test_a_storage_that_fails_is_a_finding(run):
    """A flush that fails is told with its reason and tried again; once storage is back, the checkpoint is there."""
    run.places.storage.rmdir()
    run.places.storage.write_text("not a folder")
    run.agent()
    async with Master(run) as master:
        await master.connected("node-0")
        await seal(run, 2)
        found = await until(lambda: master.events(Found))
        assert found[0].finding.sign == "agent.flush_failed"
        assert found[0].finding.details["message"]
        run.places.storage.unlink()
        run.places.storage.mkdir()
        await until(lambda: stored(run) == [2])


async def test_a_segment_can_be_read_from_the_agent(run):
    """GET /v1/snapshots names what is there; the bytes come over a plain socket and prove themselves to the receiver."""
    run.agent()
    async with Master(run) as master:
        await master.connected("node-0")
        path = await seal(run, 2, flush=False)
        headers = {"Authorization": f"Bearer {run.token}"}
        async with aiohttp.ClientSession(master.hellos[0].url, headers=headers) as session:
            places = codec.decode(await (await session.get("/v1/snapshots")).read(), tuple[SnapshotPlace, ...])
            assert [place.name for place in places] == [path.name]
            run.segments("node-1").mkdir(parents=True)
            peer = Peer(master.shards("node-0"), token=run.token)
            got = await asyncio.to_thread(peer.pull, path.name, run.segments("node-1"))
            assert got.header.state_digest == places[0].state_digest
            for name in ("../agent.sock", "policy-9.r0.s0.safetensors"):
                with pytest.raises(EasyckptError):
                    await asyncio.to_thread(peer.pull, name, run.segments("node-1"))
            ready = await session.get("/readyz")
            assert ready.status == 200
            health = await session.get("/healthz")
            assert health.status == 200
