"""The whole configuration of a job as one frozen record; its attributes mirror the TOML file.

job.train.train_policy.epsilon_low
job.aimaster.leases.group_timeout_seconds
"""

from typing import Any, Literal

from aimaster.settings.distillation import DistillationSettings
from aimaster.settings.observe import LoggingSettings, ProfilerSettings, ValidationSettings
from aimaster.settings.own import AimasterSettings
from aimaster.settings.policy import PolicySettings, VlaSettings
from aimaster.settings.rollout import RolloutSettings
from aimaster.settings.table import Table
from aimaster.settings.train import TrainSettings


class JobSettings(Table, frozen=True, kw_only=True):
    """All tables of the file."""

    train: TrainSettings = TrainSettings()
    """Optimiser, precision, batch, length of the run."""
    rollout: RolloutSettings = RolloutSettings()
    """Engine, group size, lengths."""
    policy: PolicySettings = PolicySettings()
    """The model that learns."""
    logging: LoggingSettings = LoggingSettings()
    """Where figures go."""
    profiler: ProfilerSettings = ProfilerSettings()
    """The profiler."""
    validation: ValidationSettings = ValidationSettings()
    """Held-out prompts, scored every so many steps."""
    distillation: DistillationSettings = DistillationSettings()
    """On-policy distillation."""
    vla: VlaSettings = VlaSettings()
    """A vision-language-action model."""
    custom: dict[str, Any] = {}
    """Free table handed to the user's own code."""
    redis: str = ""
    """Port of Cosmos-RL's embedded redis, as a string. Kept, unused: no redis is started here."""
    eth_ips: str = ""
    """Further addresses of the controller's host, `;` between them."""
    mode: Literal["disaggregated", "colocated", "colocated_separated"] = "disaggregated"
    """Process layout: separate jobs, one process, or separate processes that share GPUs."""
    aimaster: AimasterSettings = AimasterSettings()
    """What is ours."""
