"""Puts a rollout member together and runs it until the controller says stop."""

import torch

from aimaster.client import start_member
from aimaster.settings import from_json
from aimaster.telemetry.logs import set_up_logs
from aimaster.wire.places import segments
from rl_runtime.config import chosen_device, rollout_settings
from rl_runtime.drills import Drills
from rl_runtime.links.agent import AgentLink
from rl_runtime.links.controller import ControllerLink
from rl_runtime.member import read_environment
from rl_runtime.models.load import load_model
from rl_runtime.rewards.desk import RewardDesk
from rl_runtime.rollout.loop import RolloutLoop
from rl_runtime.rollout.make import make_engine
from rl_runtime.rollout.weights import WeightSource


def run_rollout() -> None:
    around = read_environment()
    identity = around.identity
    set_up_logs(role="rollout", member=identity.member, node=identity.node)
    torch.set_num_threads(1)
    job = from_json(around.places.resolved.read_bytes())
    settings = rollout_settings(job)
    progress = start_member(
        group_timeout_seconds=settings.group_timeout_seconds,
        lease_factor=settings.lease_factor,
        fence_leases=settings.fence_leases,
    )
    bundle = load_model(settings.model)

    def beat(phase: str) -> None:
        if engine.version is None:
            progress.beat(phase)
        else:
            progress.beat(phase, step=engine.version.step, lineage=engine.version.lineage)

    engine = make_engine(
        settings.engine,
        bundle,
        slots=settings.slots,
        temperature=settings.temperature,
        stop_texts=settings.stop_texts,
        device=chosen_device(settings.device),
        beat=lambda: beat("generate"),
    )
    agent = AgentLink(around.memory, around.run, beat=beat)
    desk = RewardDesk(
        settings.reward.weights, workers=settings.reward.workers, deadline_seconds=settings.reward.deadline_seconds
    )
    loop = RolloutLoop(
        identity,
        settings,
        ControllerLink(around.run, beat=beat),
        WeightSource(segments(around.memory), agent, beat=beat),
        bundle,
        engine,
        desk,
        Drills(settings.drills, member=identity.member, incarnation=identity.incarnation),
        beat=beat,
    )
    loop.run()
    desk.close()
    progress.beat("end")  # a phase of its own: a process of some gigabytes takes its time to go, which is no hang
    progress.close()
