"""Puts a policy member together and runs it until the controller says stop."""

from pathlib import Path

import torch

from aimaster.client import start_member
from aimaster.settings import JobSettings, from_json
from aimaster.telemetry.logs import set_up_logs
from aimaster.wire.checkpoint import SaveTrouble, SealedNotice, Version
from aimaster.wire.ids import NodeId
from aimaster.wire.places import segments
from easyckpt import Checkpointer
from easyckpt.events import Event
from easyckpt.events import log as log_event
from easyckpt.layout import SegmentHeader
from rl_runtime.config import chosen_device, policy_settings
from rl_runtime.controller.settings import controller_settings
from rl_runtime.data import load_heldout, load_rows
from rl_runtime.drills import Drills
from rl_runtime.elastic import ElasticGroup
from rl_runtime.links.agent import AgentLink
from rl_runtime.links.controller import ControllerLink
from rl_runtime.member import Surroundings, read_environment
from rl_runtime.policy.gradients import FOLDER
from rl_runtime.policy.loop import PolicyLoop
from rl_runtime.policy.state import ROLE, MemberState


def run_policy() -> None:
    around = read_environment()
    identity = around.identity
    set_up_logs(role=ROLE, member=identity.member, node=identity.node)
    torch.set_num_threads(1)
    job = from_json(around.places.resolved.read_bytes())
    settings = policy_settings(job)
    progress = start_member(
        group_timeout_seconds=settings.group_timeout_seconds,
        lease_factor=settings.lease_factor,
        fence_leases=settings.fence_leases,
    )
    rows = load_rows(job)
    steps = controller_settings(job, len(rows)).steps

    def beat(phase: str) -> None:
        version = state.version
        if version is None:
            progress.beat(phase)
        else:
            progress.beat(phase, step=version.step, lineage=version.lineage)

    agent = AgentLink(around.memory, around.run, beat=beat)
    link = ControllerLink(around.run, beat=beat)
    checkpointer = _checkpointer(around, job, agent, slots=settings.snapshot_slots)
    state = MemberState(
        settings,
        checkpointer,
        agent,
        rows=rows,
        heldout=load_heldout(job),
        steps=steps,
        device=chosen_device(settings.device),
        beat=beat,
    )
    group = ElasticGroup(host=link.local_host(), beat=lambda: beat("reduce"))
    drills = Drills(settings.drills, member=identity.member, incarnation=identity.incarnation)
    kept = _gradients(around) if settings.record_gradients else None
    loop = PolicyLoop(identity, link, state, group, drills, beat=beat, gradients=kept)
    loop.run()
    loop.close()
    progress.beat("end")  # a phase of its own: a process of some gigabytes takes its time to go, which is no hang
    progress.close()


def _checkpointer(around: Surroundings, job: JobSettings, agent: AgentLink, *, slots: int) -> Checkpointer:
    """The member's engine; what it seals and what it loses is told to the node's agent."""
    member = around.identity.member

    def on_sealed(path: Path, header: SegmentHeader) -> None:
        agent.sealed(
            SealedNotice(
                member=member,
                rank=header.rank,
                name=path.name,
                version=Version(header.lineage, header.step),
                flush=header.flush,
            )
        )

    def on_event(event: Event) -> None:
        log_event(event)
        if event.kind == "save_failed":
            agent.lost(SaveTrouble(member=member, version=Version(event.lineage, event.step), text=event.text))

    return Checkpointer(
        job.aimaster.snapshots.storage or around.places.storage,
        member=member,
        role=ROLE,
        folder=segments(around.memory),
        slots=slots,
        flush_every=None,
        on_sealed=on_sealed,
        on_event=on_event,
    )


def _gradients(around: Surroundings) -> Path:
    """Return the folder beside the member's log in which its gradients are kept."""
    return around.places.member(NodeId(around.identity.node), around.identity.member) / FOLDER
