"""Drills: faults inflicted on purpose while a run goes on, `FAULT:SUBJECT@STEP` with commas between them.

    kill:policy-1@20   SIGKILL         subjects: any member, `master`, `agent-NODE`
    stop:rollout-1@50  SIGSTOP         as above
    hang:policy-0@30   its training thread sleeps in C with the GIL held (`:pipe`, `:spin` behind it: blocked, spinning); the member does it itself
    node:node-1@40     the node is lost: its agent stopped, its shims, members and agent killed, both its folders deleted

`due` is pure: a drill is due when its step is committed and its subject lives. Each is announced to the master before it is
done, so that its incident is shown as a drill.
"""

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec
import psutil

from aimaster.cli.reach import start_ticks
from aimaster.wire.ids import NodeId, RunId
from aimaster.wire.places import RunPlaces, node_memory
from aimaster.wire.status import JobStatus, MemberStatus
from aimaster.wire.topology import JobPlan

Fault = Literal["kill", "stop", "hang", "node"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
HANGS = ("", "gil", "pipe", "spin")
HANGING_ROLES = ("policy", "rollout")
MASTER = "master"
AGENT = "agent-"


class Drill(msgspec.Struct, frozen=True, kw_only=True):
    """One fault to inflict. Example: `kill:policy-1@20`."""

    fault: Fault
    subject: str
    step: int
    how: str = ""
    """Of a hang: `gil`, `pipe` or `spin`; empty means `gil`."""

    def __str__(self) -> str:
        return f"{self.fault}:{self.subject}@{self.step}" + (f":{self.how}" if self.how else "")


class DrillError(ValueError):
    """The text is no drill; the message names the part and what is expected."""


def parse_drills(text: str) -> tuple[Drill, ...]:
    """The drills of a text, in its order."""
    return tuple(_parse(part.strip()) for part in text.split(",") if part.strip())


def _parse(part: str) -> Drill:
    fault, colon, rest = part.partition(":")
    subject, at, step = rest.rpartition("@")
    how = ""
    if fault == "hang":
        step, _, how = step.partition(":")
    if fault not in FAULTS or how not in HANGS or not colon or not at or not subject or not step.isdecimal():
        raise DrillError(
            f"{part!r} is no drill: expected FAULT:SUBJECT@STEP, FAULT one of {', '.join(FAULTS)}; for example kill:policy-1@20"
        )
    return Drill(fault=fault, subject=subject, step=int(step), how=how)


def check_drills(drills: Sequence[Drill], plan: JobPlan) -> None:
    """DrillError when a subject is not of this job, or the fault is not one it can have."""
    agents = [f"{AGENT}{node}" for node in plan.nodes]
    for drill in drills:
        if drill.fault == "node":
            subjects: list[str] = list(plan.nodes)
        elif drill.fault == "hang":
            subjects = [member for member, spec in plan.members.items() if spec.role in HANGING_ROLES]
        else:
            subjects = [*plan.members, MASTER, *agents]
        if drill.subject not in subjects:
            choices = ", ".join(subjects) or "nobody here"
            raise DrillError(f"drill {drill}: {drill.fault} wants one of {choices}; there is no {drill.subject!r}")


def step_of(status: JobStatus) -> int:
    """The step that drills count: the newest committed; of a wrapped command, the newest any rank reported."""
    reported = [member.progress.step for member in status.members if member.progress is not None]
    return max(status.step, *reported) if status.kind == "command" and reported else status.step


def due(waiting: Sequence[Drill], status: JobStatus) -> tuple[Drill, ...]:
    """Those of `waiting` to inflict now. A dead subject is waited for.

    A hang is announced a step early: the member does it by itself, in its first start only.
    """
    step = step_of(status)
    return tuple(drill for drill in waiting if drill.step - (drill.fault == "hang") <= step and _lives(drill, status))


def _lives(drill: Drill, status: JobStatus) -> bool:
    if drill.fault == "node" or drill.subject == MASTER or drill.subject.startswith(AGENT):
        return True
    member = _member(drill.subject, status)
    if drill.fault == "hang" and member is not None and member.incarnation > 0:
        return False  # told at the end as not reached
    return member is not None and member.process is not None and member.state in ("running", "suspected")


def _member(name: str, status: JobStatus) -> MemberStatus | None:
    return next((member for member in status.members if member.member == name), None)


# -- inflicting ---------------------------------------------------------------------------------------------------------


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """Process ids of what the front itself started."""

    master: int | None
    agents: dict[NodeId, int]


def inflict(drill: Drill, status: JobStatus, engine: Engine, places: RunPlaces, run_id: RunId) -> str:
    """Do it; what was done, in words. The target is looked at again after it was pinned down by a pidfd."""
    if drill.fault == "hang":
        return f"drill {drill}: {drill.subject} is about to hang"
    if drill.fault == "node":
        return lose_node(NodeId(drill.subject), engine, places, run_id)
    number = signal.SIGKILL if drill.fault == "kill" else signal.SIGSTOP
    pid, ticks = _target(drill.subject, status, engine)
    if pid is None or not send(pid, ticks, number):
        return f"drill {drill}: {drill.subject} had just ended by itself"
    return f"drill {drill}: sent {number.name} to {drill.subject} (process {pid})"


def _target(subject: str, status: JobStatus, engine: Engine) -> tuple[int | None, int | None]:
    if subject == MASTER:
        return engine.master, None
    if subject.startswith(AGENT):
        return engine.agents.get(NodeId(subject.removeprefix(AGENT))), None
    member = _member(subject, status)
    if member is None or member.process is None:
        return None, None
    return member.process.pid, member.process.start_ticks


def send(pid: int, ticks: int | None, number: signal.Signals) -> bool:
    """Signal the process of this pid and start time; False when it is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if ticks is not None and start_ticks(pid) != ticks:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def lose_node(node: NodeId, engine: Engine, places: RunPlaces, run_id: RunId) -> str:
    """As a power cut: nothing on the node acts any more, then nothing of it is left."""
    agent = engine.agents.get(node)
    if agent is not None:
        send(agent, None, signal.SIGSTOP)
    killed = 0
    for folder in sorted(places.node(node).glob("members/*")):
        killed += sum(_kill_tree(pid, ticks) for pid, ticks in _processes(folder / "pid.json"))
    if agent is not None:
        killed += _kill_tree(agent, None)
    shutil.rmtree(places.node(node), ignore_errors=True)
    shutil.rmtree(node_memory(run_id, node), ignore_errors=True)
    return f"drill node:{node}: killed its {killed} processes and deleted its folders"


def _processes(pid_file: Path) -> list[tuple[int, int]]:
    """Every process identity in a shim's pid.json, the shim's first."""
    try:
        record = msgspec.json.decode(pid_file.read_bytes())
    except (OSError, msgspec.DecodeError):
        return []
    found = [
        (entry["pid"], entry["start_ticks"]) for entry in record.values() if isinstance(entry, dict) and "pid" in entry
    ]
    return sorted(found, key=lambda entry: entry[1])


def _kill_tree(pid: int, ticks: int | None) -> int:
    """SIGKILL a process and all below it; how many were there."""
    if ticks is not None and start_ticks(pid) != ticks:
        return 0
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(send(process.pid, None, signal.SIGKILL) for process in tree)
