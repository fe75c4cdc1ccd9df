"""What policy and rollout members take from the job's configuration, each in one small frozen record, derived here alone.

A key that this runtime cannot honour is refused here by name: half-honoured algorithms are worse than a clear error.
"""

from typing import Literal, TypeVar

import msgspec

from aimaster.settings import GrpoSettings, JobSettings
from rl_runtime.algo.loss import LossSettings
from rl_runtime.models.load import ModelChoice

DEFAULT_SAMPLING_SEED = 42
STREAM_TOKENS = 64

T = TypeVar("T")


class UnsupportedSettingError(Exception):
    """A valid key that asks for what this runtime does not do; a message for the user."""


class HangDrill(msgspec.Struct, frozen=True, kw_only=True):
    """A hang this member is to inflict on itself, once, in its first incarnation."""

    member: str
    step: int
    how: Literal["gil", "pipe", "spin"] = "gil"


class WarmStart(msgspec.Struct, frozen=True, kw_only=True):
    """The supervised start of a fresh model."""

    steps: int
    rows: int
    """In each step."""
    learning_rate: float
    seed: int


class OptimizerChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which optimizer, without its learning rate: that comes with each step."""

    name: Literal["AdamW", "Adam"] = "AdamW"
    kernel: Literal["fused", "foreach", "for-loop"] = "fused"
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    largest_norm: float = 1.0
    """Gradients are scaled down to it; 0: never."""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """The mean reward over prompts that are never trained on, at the sampling temperature."""

    prompts: int
    """0: none."""
    seed: int
    temperature: float
    most_tokens: int
    stop_texts: tuple[str, ...] = ()
    slots: int


class RewardChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which rewards, and how long one may take."""

    weights: dict[str, float]
    workers: int
    deadline_seconds: float


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides what a policy member does."""

    model: ModelChoice
    engine: Literal["tiny", "hf"]
    loss: LossSettings
    optimizer: OptimizerChoice
    micro_rows: int
    """Rows of one forward pass."""
    seed: int
    device: str
    warm_start: WarmStart
    evaluation: Evaluation
    reward: RewardChoice
    snapshot_slots: int
    save_every: int
    group_timeout_seconds: float
    lease_factor: float
    fence_leases: float
    record_gradients: bool = False
    """Each committed step's reduced gradient is kept on disk."""
    origin: str = ""
    """Checkpoint or run folder whose state a new run starts from; empty: the configured model."""
    drills: tuple[HangDrill, ...] = ()


class RolloutSettings(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides what a rollout member does."""

    model: ModelChoice
    engine: Literal["tiny", "hf"]
    slots: int
    """Completions made at once."""
    temperature: float
    most_tokens: int
    """Of a completion."""
    stop_texts: tuple[str, ...] = ()
    """End a completion, as the model's end token does."""
    reward: RewardChoice
    stream_tokens: int
    """A completion is streamed whenever it has grown by so many tokens."""
    device: str
    lease_factor: float
    fence_leases: float
    group_timeout_seconds: float
    drills: tuple[HangDrill, ...] = ()


def policy_settings(job: JobSettings) -> PolicySettings:
    """Derive a policy member's record."""
    grpo = _grpo(job)
    ours = job.aimaster
    return PolicySettings(
        model=model_choice(job),
        engine=_engine(job),
        loss=LossSettings(
            variant=grpo.variant,
            loss_type=grpo.loss_type,
            epsilon_low=grpo.epsilon_low,
            epsilon_high=grpo.epsilon_high,
            lower_bound_ratio=grpo.lower_bound_ratio,
            aipo_rho=grpo.aipo_rho,
            unbiased_loss_max_tokens=grpo.unbiased_loss_max_tokens,
            temperature=grpo.temperature,
        ),
        optimizer=OptimizerChoice(
            name=_one(job.train.optm_name, "train.optm_name"),
            kernel=_one(job.train.optm_impl, "train.optm_impl"),
            betas=job.train.optm_betas,
            epsilon=job.train.epsilon,
            weight_decay=job.train.optm_weight_decay,
            largest_norm=job.train.optm_grad_norm_clip,
        ),
        micro_rows=grpo.mini_batch,
        seed=ours.seed,
        device=ours.device,
        warm_start=WarmStart(
            steps=ours.warm_start.steps,
            rows=ours.warm_start.batch,
            learning_rate=ours.warm_start.learning_rate,
            seed=ours.seed,
        ),
        evaluation=_evaluation(job),
        reward=_reward(job),
        snapshot_slots=ours.snapshots.slots,
        save_every=ours.snapshots.save_every,
        group_timeout_seconds=ours.leases.group_timeout_seconds,
        lease_factor=ours.leases.learnt_factor,
        fence_leases=ours.leases.self_fence_leases,
        record_gradients=ours.record_gradients,
        origin=job.train.resume if isinstance(job.train.resume, str) else "",
        drills=hang_drills(ours.drill),
    )


def rollout_settings(job: JobSettings) -> RolloutSettings:
    """Derive a rollout member's record."""
    _grpo(job)
    ours = job.aimaster
    return RolloutSettings(
        model=model_choice(job),
        engine=_engine(job),
        slots=_slots(job),
        temperature=job.rollout.sampling_config.temperature,
        most_tokens=job.rollout.max_response_length,
        stop_texts=ours.stop_texts,
        reward=_reward(job),
        stream_tokens=STREAM_TOKENS,
        device=ours.device,
        lease_factor=ours.leases.learnt_factor,
        fence_leases=ours.leases.self_fence_leases,
        group_timeout_seconds=ours.leases.group_timeout_seconds,
        drills=hang_drills(ours.drill),
    )


def model_choice(job: JobSettings) -> ModelChoice:
    """Return which model the job trains."""
    sizes = job.aimaster.model
    if sizes is None:
        return ModelChoice(shape=None, folder=job.policy.model_name_or_path, max_length=job.policy.model_max_length)
    from rl_runtime.models.characters import CharacterTokenizer
    from rl_runtime.models.tiny import Shape

    shape = Shape(vocab_size=CharacterTokenizer().vocab_size, **msgspec.structs.asdict(sizes))
    shape.check()
    return ModelChoice(shape=shape, max_length=sizes.max_position_embeddings, seed=job.aimaster.seed)


def hang_drills(drill: str) -> tuple[HangDrill, ...]:
    """Return the hangs among the drills: `hang:MEMBER@STEP`, `hang:MEMBER@STEP:pipe`; the rest is inflicted from outside."""
    drills = []
    for item in filter(None, (part.strip() for part in drill.split(","))):
        kind, _, rest = item.partition(":")
        if kind != "hang":
            continue
        where, _, how = rest.partition(":")
        member, _, step = where.partition("@")
        drills.append(msgspec.convert({"member": member, "step": int(step), "how": how or "gil"}, HangDrill))
    return tuple(drills)


def chosen_device(device: str) -> str:
    """Return `cuda` or `cpu`; `auto` takes what is there. Imports torch."""
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def _grpo(job: JobSettings) -> GrpoSettings:
    """Return the GRPO table, after refusing what it may ask in vain."""
    grpo = job.train.train_policy
    if not isinstance(grpo, GrpoSettings):
        raise UnsupportedSettingError("train.train_policy.type: this runtime trains by grpo only")
    asked_in_vain = {
        "train.train_policy.kl_beta": (grpo.kl_beta, 0.0),
        "train.train_policy.mu_iterations": (grpo.mu_iterations, 1),
        "train.train_policy.batch_size_per_optimize": (grpo.batch_size_per_optimize, None),
        "train.train_policy.positive_nll_coef": (grpo.positive_nll_coef, None),
        "train.train_policy.entropy_coeff": (grpo.entropy_coeff, 0.0),
        "train.train_policy.off_policy_masking_delta": (grpo.off_policy_masking_delta, None),
        "train.train_policy.use_remote_reward": (grpo.use_remote_reward, False),
        "rollout.sampling_config.top_p": (job.rollout.sampling_config.top_p, 1.0),
        "rollout.sampling_config.repetition_penalty": (job.rollout.sampling_config.repetition_penalty, 1.0),
    }
    for key, (value, only) in asked_in_vain.items():
        if value != only:
            raise UnsupportedSettingError(
                f"{key} = {value!r}: this runtime does not do that; set {only!r} or leave it out"
            )
    if job.rollout.sampling_config.top_k not in (-1, 0):
        raise UnsupportedSettingError(
            "rollout.sampling_config.top_k: this runtime samples from all tokens; leave it out"
        )
    return grpo


def _engine(job: JobSettings) -> Literal["tiny", "hf"]:
    if job.aimaster.engine == "vllm":
        raise UnsupportedSettingError('aimaster.engine = "vllm" is not there yet: use "hf"')
    if (job.aimaster.engine == "tiny") != (job.aimaster.model is not None):
        raise UnsupportedSettingError(
            'aimaster.engine = "tiny" and the table [aimaster.model] go together: give both, or neither and a model folder'
        )
    return job.aimaster.engine


def _slots(job: JobSettings) -> int:
    return job.rollout.batch_size * job.rollout.n_generation


def _reward(job: JobSettings) -> RewardChoice:
    weights = dict(_grpo(job).reward_function)
    if _grpo(job).bypass_reward:
        weights = {}
    return RewardChoice(
        weights=weights, workers=job.aimaster.reward_workers, deadline_seconds=job.aimaster.reward_seconds
    )


def _evaluation(job: JobSettings) -> Evaluation:
    return Evaluation(
        prompts=job.aimaster.heldout_prompts,
        seed=job.rollout.seed or DEFAULT_SAMPLING_SEED,
        temperature=job.rollout.sampling_config.temperature,
        most_tokens=job.rollout.max_response_length,
        stop_texts=job.aimaster.stop_texts,
        slots=max(_slots(job), min(job.aimaster.heldout_prompts, 64)),
    )


def _one(value: T | tuple[T, ...], key: str) -> T:
    """Return the single choice of a key that Cosmos-RL lets be a list."""
    if not isinstance(value, tuple):
        return value
    if len(set(value)) != 1:
        raise UnsupportedSettingError(f"{key} = {list(value)}: this runtime has one optimizer; give one value")
    return value[0]
