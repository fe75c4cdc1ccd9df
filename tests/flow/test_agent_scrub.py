"""What goes bad in a node's snapshot memory: the agent finds it before anybody needs it, and what can be made good is."""

import asyncio
import os
import subprocess
import sys

import aiohttp
import pytest

from aimaster.wire.checkpoint import FetchReply, FetchRequest, Version
from aimaster.wire.messages import Found, SnapshotMoved
from easyckpt import shm, storage
from tests.flow.agent_master import Master, Run, ask_agent, seal_segment, tell_sealed, until

OFTEN = {"AIMASTER_AGENT__SCRUB_SECONDS": "0.3"}


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run", nodes=("node-0", "node-1"))
    yield run
    run.close()


def flip(path, at=-50):
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END)
        byte = file.read(1)
        file.seek(at, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))


def damages(master):
    return [event.finding for event in master.events(Found) if event.finding.sign == "snapshot.segment_damaged"]


async def metrics(master) -> str:
    async with aiohttp.ClientSession() as session:
        return await (await session.get(f"{master.hellos[0].url}/metrics")).text()


async def test_a_bit_that_flips_in_memory_is_a_finding_and_the_segment_is_nobodys_good_one(run):
    """Nothing else reads it: the scrub finds it, tells the master once, shows the place as damaged, and offers it to no member."""
    run.agent(**OFTEN)
    async with Master(run) as master:
        await master.connected("node-0")
        good = seal_segment(run.segments(), 3, flush=False)
        await tell_sealed(run.memory(), good)
        bad = seal_segment(run.segments(), 4, flush=False)
        await tell_sealed(run.memory(), bad)
        flip(bad)
        (finding,) = await until(lambda: damages(master))
        assert (finding.severity, finding.node) == ("error", "node-0")
        assert bad.name in finding.details["message"]

        def shown():
            return {place.version.step: place.damaged for place in master.pulses["node-0"].snapshots}

        await until(lambda: shown() == {3: False, 4: True})
        await until(lambda: any(p.verified_at for p in master.pulses["node-0"].snapshots if p.version.step == 3))
        reply = await ask_agent(run.memory(), "/v1/snapshots/fetch", FetchRequest(role="policy"), FetchReply)
        assert [place.version.step for place in reply.places] == [3]
        text = await metrics(master)
        assert 'easyckpt_segments_damaged_total{tier="shm"} 1.0' in text
        assert (
            float(
                next(line for line in text.splitlines() if line.startswith("easyckpt_scrubbed_bytes_total")).split()[-1]
            )
            > 0
        )
        assert len(damages(master)) == 1
        assert bad.exists(), "no trainer lives that would save again"


async def test_a_damaged_copy_is_dropped_and_sent_again(run):
    """The peer's memory goes bad: it says so and lets the copy go; the owner, offering it again, sees that it is not there and sends it."""
    run.configure()
    code = "from agents import peers\npeers.OFFER_SECONDS = 0.2\n"
    site = run.places.run / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(code)
    run.agent("node-0", PYTHONPATH=str(site))
    run.agent("node-1", **OFTEN)
    async with Master(run) as master:
        await master.introduce(run.nodes)
        path = seal_segment(run.segments("node-0"), 5, flush=False)
        await tell_sealed(run.memory("node-0"), path)
        copy = run.segments("node-1") / "policy-0.r0.peer.s0.safetensors"
        await until(lambda: [one.header.step for one in shm.scan(run.segments("node-1"))] == [5])
        flip(copy)
        (finding,) = await until(lambda: damages(master))
        assert finding.node == "node-1"

        def is_good():
            held = shm.scan(run.segments("node-1"))
            return len(held) == 1 and held[0].path.read_bytes() == path.read_bytes()

        await until(is_good)
        await until(lambda: all(not place.damaged for place in master.pulses["node-1"].snapshots))


TRAINER = """
import sys, time
import torch
from easyckpt import Checkpointer
ckpt = Checkpointer(folder=sys.argv[1], member="policy-0", role="policy", on_sealed=lambda *_: None)
model = torch.nn.Linear(300, 300, bias=False).requires_grad_(False)
state = {"base": model, "adapter": torch.zeros(40)}
for line in sys.stdin:
    step = int(line)
    state["adapter"].fill_(step)
    print(ckpt.save(step, state), flush=True)
    ckpt.wait()
"""


@pytest.fixture
def save(run):
    """A trainer in a process of its own: saves the step that it is told."""
    run.segments().mkdir(parents=True)
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(run.segments())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def save(step):
        trainer.stdin.write(f"{step}\n")
        trainer.stdin.flush()
        assert trainer.stdout.readline() == "True\n"

    yield save
    trainer.communicate(timeout=20)


async def test_a_damaged_slot_of_a_living_trainer_is_written_anew(run, save):
    """Of an adapter's base weights, which a save leaves in its slot: the agent removes the segment, and the next save copies all of it."""
    folder = run.segments()
    for step in (1, 2):
        await asyncio.to_thread(save, step)
    await until(lambda: len(shm.scan(folder)) == 2)
    bad = shm.scan(folder)[0].path
    flip(bad)
    run.agent(**OFTEN)
    async with Master(run) as master:
        await master.connected("node-0")
        (finding,) = await until(lambda: damages(master))
        assert "step 2" in finding.details["message"]
        await until(lambda: not bad.exists())
        await asyncio.to_thread(save, 3)
        await until(lambda: {segment.header.step for segment in shm.scan(folder)} == {1, 3})
        for segment in shm.scan(folder):
            shm.verify(segment.path)
        await until(
            lambda: {place.version for place in master.pulses["node-0"].snapshots} == {Version(0, 1), Version(0, 3)}
        )
        assert [event.finding.sign for event in master.events(Found)] == ["snapshot.segment_damaged"], "and no loss"


async def test_a_flush_that_finds_damage_takes_an_older_step_and_says_which_segment_it_was(run):
    """At the usual pace, long before the scrub's turn: the flush suspects, the scrubber looks at once."""
    agent = run.agent()
    async with Master(run) as master:
        await master.connected("node-0")
        agent.terminate()
        agent.wait(timeout=10)
        older, bad = seal_segment(run.segments(), 6), seal_segment(run.segments(), 7)
        assert older != bad
        flip(bad)
        run.agent()
        moved = await master.event(SnapshotMoved)
        assert moved.place.version == Version(0, 6)
        (finding,) = await until(lambda: damages(master))
        assert bad.name in finding.details["message"]
        assert [record.step for record in storage.list_manifests(run.places.storage, "policy")] == [6]
        assert [event.finding.sign for event in master.events(Found)] == ["snapshot.segment_damaged"], "storage is well"
