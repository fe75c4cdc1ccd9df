"""What the controller takes from the job's configuration, in one small frozen record, and what follows from it."""

import math
from collections.abc import Sequence

import msgspec

from aimaster.settings import GrpoSettings, JobSettings
from aimaster.wire.ids import MemberId
from rl_runtime.controller.errors import ConfigurationError


class ControllerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All numbers that decide what the controller does."""

    steps: int
    """The run is finished after this step."""
    n_init: int
    """Policy members that a new run waits for."""
    n_generation: int
    """Samples in a group."""
    batch_samples: int
    """Samples in a dealt batch, whatever the membership."""
    mini_batch: int = 8
    """Samples in a share."""
    allowed_outdated_steps: int = 4
    seed: int = 0
    """Of the order of prompts."""
    shuffle: bool = True
    sampling_seed: int = 42
    unbiased_advantage: bool = False
    advantage_low: float = -5.0
    advantage_high: float = 5.0
    min_prefix_tokens: int | None = None
    """Beginnings at least so long that completions of different advantage share are not trained; None: all is trained."""
    filter_groups: bool = False
    """Groups without spread are not dealt."""
    filter_metrics: tuple[str, ...] = ()
    """Rewards whose spread counts for that; empty: the sum."""
    shuffle_rewards: bool = False
    """The negative control: rewards are permuted across each batch."""
    overlong_buffer: int = 0
    """Width of the length penalty's ramp; 0: no penalty."""
    overlong_factor: float = 1.0
    max_response_length: int = 1 << 30
    flush_every: int = 0
    """A flush to storage every so many steps; 0: only at the end."""
    learning_rate: float = 1e-6
    warmup_steps: int = 0
    warmup_start_factor: float = 0.0
    decay_steps: int = 0
    decay_type: str = "none"
    min_rate_factor: float = 0.0
    prompt_lease_seconds: float = 120.0
    group_timeout_seconds: float = 10.0
    master_silence_seconds: float = 2.0
    """A death waits so long for the master's proposal."""
    abort_settle_seconds: float = 2.0
    """An abort waits so long for news of a death."""
    join_hold_seconds: float = 60.0
    join_hold_shortest_seconds: float = 2.0
    gather_seconds: float = 2.0
    """With nobody in, the first candidates are compared for so long before one is chosen."""
    lost_patience_seconds: float = 20.0
    """With nothing that could be restored by anybody who asks, others are waited for so long before the run is given up."""
    start_patience_seconds: float = 30.0
    """A new run with too few members begins after so long all the same."""
    founder_patience_seconds: float = 180.0
    """A member that was told to begin or restore and says nothing for so long is no longer waited for."""

    @property
    def groups(self) -> int:
        """Groups in a dealt batch."""
        return self.batch_samples // self.n_generation

    @property
    def room(self) -> int:
        """Samples that may be under way and not dealt: the bound at dispatch."""
        return (self.allowed_outdated_steps + 1) * self.batch_samples

    def rules(self) -> str:
        """What else decides how samples become a batch: a ledger's batches can only be dealt again under the same rules."""
        return (
            f"mini_batch={self.mini_batch} n_init={self.n_init} unbiased={self.unbiased_advantage} low={self.advantage_low:g} "
            f"high={self.advantage_high:g} prefix={self.min_prefix_tokens} shuffle_rewards={self.shuffle_rewards} overlong={self.overlong_buffer},"
            f"{self.overlong_factor:g},{self.max_response_length if self.overlong_buffer else 0}"
        )


def controller_settings(job: JobSettings, rows: int) -> ControllerSettings:
    """Derive the record for a data set of so many rows; raises ConfigurationError."""
    policy = job.train.train_policy
    if not isinstance(policy, GrpoSettings):
        raise ConfigurationError(
            'train.train_policy.type is "sft"; this runtime trains by GRPO only: set type = "grpo", or run your own trainer with `aimaster run -- COMMAND`'
        )
    n_init = job.policy.parallelism.n_init_replicas
    n_generation = job.rollout.n_generation
    batch = job.train.train_batch_per_replica * n_init
    if batch % n_generation:
        raise ConfigurationError(
            f"a dealt batch of {batch} samples (train.train_batch_per_replica {job.train.train_batch_per_replica} x {n_init} policy replicas) "
            f"is no whole number of groups of rollout.n_generation {n_generation}; change one of the three"
        )
    steps = job.train.epoch * rows * n_generation // batch
    if job.train.max_num_steps is not None:
        steps = min(steps, job.train.max_num_steps)
    if steps < 1:
        raise ConfigurationError(
            f"{job.train.epoch} pass(es) over {rows} rows give {job.train.epoch * rows * n_generation} samples, less than one dealt batch of {batch}; "
            "use more rows, more epochs (train.epoch) or a smaller train.train_batch_per_replica"
        )
    leases, overlong = job.aimaster.leases, policy.overlong_reward
    snapshots, ckpt = job.aimaster.snapshots, job.train.ckpt
    return ControllerSettings(
        steps=steps,
        n_init=n_init,
        n_generation=n_generation,
        batch_samples=batch,
        mini_batch=policy.mini_batch,
        allowed_outdated_steps=0 if policy.on_policy else policy.allowed_outdated_steps,
        seed=job.aimaster.seed + policy.dataloader_seed,
        shuffle=policy.dataloader_shuffle,
        sampling_seed=job.rollout.seed or 42,
        unbiased_advantage=policy.unbiased_advantage,
        advantage_low=policy.advantage_low,
        advantage_high=policy.advantage_high,
        min_prefix_tokens=policy.min_filter_prefix_tokens,
        filter_groups=policy.variant == "dapo",
        filter_metrics=policy.filter_reward_metric,
        shuffle_rewards=job.aimaster.shuffle_rewards,
        overlong_buffer=overlong.buffer_length if overlong.enable_overlong_penalty else 0,
        overlong_factor=overlong.penalty_factor,
        max_response_length=job.rollout.max_response_length,
        flush_every=snapshots.flush_every or (ckpt.save_freq if ckpt.enable_checkpoint else 0),
        learning_rate=_first_rate(job.train.optm_lr),
        warmup_steps=_warmup_steps(job.train.optm_warmup_steps, steps),
        warmup_start_factor=job.train.optm_warmup_start_factor,
        decay_steps=round((job.train.optm_decay_ratio or 0.0) * steps),
        decay_type=job.train.optm_decay_type or "none",
        min_rate_factor=job.train.optm_min_lr_factor,
        prompt_lease_seconds=leases.prompt_seconds,
        group_timeout_seconds=leases.group_timeout_seconds,
        master_silence_seconds=leases.master_silence_seconds,
        abort_settle_seconds=leases.abort_settle_seconds,
        join_hold_seconds=leases.join_hold_seconds,
        join_hold_shortest_seconds=leases.join_hold_shortest_seconds,
    )


def learning_rate(settings: ControllerSettings, step: int) -> float:
    """Return the rate of `step` (from 1): a ramp, a plateau, a decay over the last `decay_steps`."""
    peak = settings.learning_rate
    if step <= settings.warmup_steps:
        start = settings.warmup_start_factor
        return peak * (start + (1.0 - start) * step / settings.warmup_steps)
    begin = max(settings.steps - settings.decay_steps, settings.warmup_steps)
    if settings.decay_type == "none" or step <= begin:
        return peak
    gone = (step - begin) / (settings.steps - begin)
    return peak * (settings.min_rate_factor + (1.0 - settings.min_rate_factor) * _left(settings.decay_type, gone))


def flusher(settings: ControllerSettings, step: int, members: Sequence[MemberId]) -> MemberId | None:
    """Return the member that writes its snapshot of this step to storage; they take turns."""
    if step >= settings.steps:
        return members[0]
    if not settings.flush_every or step % settings.flush_every:
        return None
    return members[step // settings.flush_every % len(members)]


def _left(decay_type: str, gone: float) -> float:
    match decay_type:
        case "sqrt":
            return 1.0 - math.sqrt(gone)
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * gone))
        case _:
            return 1.0 - gone


def _first_rate(rate: float | tuple[float, ...] | dict[str, float]) -> float:
    if isinstance(rate, (int, float)):
        return float(rate)
    if isinstance(rate, dict) or len(set(rate)) != 1:
        raise ConfigurationError(
            f"train.optm_lr = {rate!r}: this runtime has one optimiser with one rate; give a single number"
        )
    return rate[0]


def _warmup_steps(value: float, steps: int) -> int:
    return round(value * steps) if 0.0 < value < 1.0 else int(value)
