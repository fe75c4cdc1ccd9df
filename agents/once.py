"""`aimaster-agent --once`: what the daemon would report, read here and now; starts, adopts and changes nothing."""

import time
from pathlib import Path

import msgspec

from agents.config import Sight
from agents.member import Ended, Ordered, Started, read_record
from agents.sensors.all import Sensors
from agents.sensors.reader import SensorReader
from agents.shim import start_ticks
from aimaster.client import read_progress
from aimaster.wire import places
from aimaster.wire.health import Reading
from aimaster.wire.ids import Incarnation, MemberId, NodeId
from aimaster.wire.messages import MemberPicture, Progress
from aimaster.wire.places import RunPlaces
from aimaster.wire.topology import JobPlan
from easyckpt import shm


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The node at one moment."""

    node: str
    at: float
    members: tuple[MemberPicture, ...]
    ended: dict[MemberId, Ended]
    """How members that run no more ended."""
    segments: tuple[str, ...]
    readings: tuple[Reading, ...]
    unsupported: dict[str, str]
    """Sensors that cannot read here, with the reason."""


def look(run: RunPlaces, node: NodeId, plan: JobPlan, sight: Sight) -> Seen:
    """Read everything once."""
    memory = places.node_memory(plan.run_id, node)
    pictures, ended = [], {}
    for path in sorted(run.node(node).glob("members/*/spec.json")):
        ordered, started = read_record(path, Ordered), read_record(path.with_name("pid.json"), Started)
        if ordered is None or started is None:
            continue
        pictures.append(_picture(ordered, started, memory_progress(memory, ordered.spec.member)))
        how = read_record(path.with_name("exit.json"), Ended)
        if how is not None:
            ended[ordered.spec.member] = how
    pids = {picture.member: picture.process.pid for picture in pictures if picture.alive}
    folders = {"run": run.run, "memory": memory, "storage": run.storage}
    sensors = Sensors(node, folders, lambda: dict(pids.items()), sight=sight, interval_seconds=5.0)
    reader = SensorReader(sensors.row)
    readings = reader.read_once()
    if "gpu" in reader.active:
        readings += tuple(sensors.gpu.read_fresh(time.time()))
    sensors.close()
    return Seen(
        node=node,
        at=time.time(),
        members=tuple(pictures),
        ended=ended,
        segments=tuple(segment.path.name for segment in shm.scan(places.segments(memory))),
        readings=readings,
        unsupported=reader.unsupported,
    )


def memory_progress(memory: Path, member: MemberId) -> Progress:
    """What the member's training thread said last."""
    reading = read_progress(places.progress_file(memory, member))
    if reading is None:
        return Progress()
    return Progress(
        phase=reading.phase,
        step=reading.step,
        lineage=reading.lineage,
        beats=reading.beats,
        age_seconds=time.monotonic() - reading.monotonic,
        lease_seconds=reading.lease_hint_seconds,
    )


def render(seen: Seen) -> str:
    """The same for people."""
    lines = [f"node {seen.node}"]
    for one in seen.members:
        state = "running" if one.alive else "ended"
        progress = f"{one.progress.phase} step {one.progress.step}, silent {one.progress.age_seconds:.1f} s"
        lines.append(f"  {one.member:<16} {state:<8} pid {one.process.pid:<8} {progress}")
    lines += [f"  segment {name}" for name in seen.segments]
    for reading in seen.readings:
        values = " ".join(f"{name}={value}" for name, value in reading.values.items())
        lines.append(f"  {reading.kind:<16} {reading.state:<11} {values}")
    lines += [f"  {name}: not supported here: {reason}" for name, reason in seen.unsupported.items()]
    return "\n".join(lines)


def _picture(ordered: Ordered, started: Started, progress: Progress) -> MemberPicture:
    return MemberPicture(
        member=ordered.spec.member,
        role=ordered.spec.role,
        incarnation=Incarnation(started.incarnation),
        process=started.member,
        alive=start_ticks(started.member.pid) == started.member.start_ticks,
        progress=progress,
    )
