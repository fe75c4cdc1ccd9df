"""The tables [train.train_policy] and [train.train_policy.dataset]: GRPO or SFT, chosen by `type`.

Names and defaults are Cosmos-RL's. A plain string or a list of names stands for a map where the field is one
(`reward_function = "gsm8k"` is `{gsm8k = 1.0}`); `spelling.py` does that before typing.
"""

from typing import Literal

import msgspec

from aimaster.settings.table import (
    Below1,
    LimitOrAll,
    NonNegative,
    NonNegativeFloat,
    OpenShare,
    Positive,
    PositiveFloat,
    Seed,
    Table,
)


class DatasetSettings(Table, frozen=True, kw_only=True):
    """Where rows come from."""

    name: str = ""
    """Hub name or local path."""
    subset: str | None = ""
    """Subset."""
    revision: str | None = ""
    """Branch, tag or commit."""
    split: tuple[str, ...] = ()
    """One or more splits."""
    test_size: Below1 | NonNegative | None = None
    """Hold-out share or count."""
    local_dir: str = ""
    """Local directory."""


class RemoteRewardFunction(Table, frozen=True, kw_only=True):
    """One score of the reward service."""

    name: str
    """Service-side name."""
    weight: float = 1.0
    """Weight."""
    score_key: str | None = None
    """Result key(s), + joins."""
    clip_min: float = -5.0
    """Floor."""
    clip_max: float = 5.0
    """Ceiling."""


class RemoteRewardSettings(Table, frozen=True, kw_only=True):
    """How the reward service is asked and its scores are summed."""

    scale: float = 1.0
    """Multiplies the sum."""
    reward_fns: tuple[RemoteRewardFunction, ...] = (
        RemoteRewardFunction(name="dance_grpo", score_key="overall_reward"),
    )
    """Scores that are asked for."""
    reward_clip_min: float = -5.0
    """Total floor."""
    reward_clip_max: float = 5.0
    """Total ceiling."""
    batch_size: Positive = 1
    """Completions per request."""


class OverlongSettings(Table, frozen=True, kw_only=True):
    """The soft length penalty of DAPO."""

    enable_overlong_penalty: bool = False
    """Soft length penalty (DAPO)."""
    buffer_length: NonNegative = 4096
    """Width of the penalty ramp."""
    penalty_factor: NonNegativeFloat = 1.0
    """Largest penalty."""


class GrpoSettings(Table, frozen=True, kw_only=True, tag_field="type", tag="grpo"):
    """Group relative policy optimisation and its relatives."""

    trainer_type: str = "grpo"
    """Registry name of the trainer class."""
    variant: Literal["grpo", "gspo", "dapo"] = "grpo"
    """Ratio/filter flavour; dapo also turns on zero-variance filtering."""
    dataset: DatasetSettings = DatasetSettings()
    """Where rows come from."""
    dataloader_shuffle: bool = True
    """Shuffle prompts."""
    dataloader_seed: Seed = 0
    """Shuffle seed."""
    data_dispatch_as_rank_in_mesh: bool = False
    """Route item to replica prompt_idx mod mesh size."""
    enable_dataset_cache: bool = False
    """Cache processed items (COSMOS_CACHE)."""
    dataloader_num_workers: NonNegative = 0
    """Loader subprocesses."""
    dataloader_prefetch_factor: Positive | None = None
    """Loader look-ahead."""
    dataloader_batch_size: Positive | None = 1
    """Controller-side iterator batch."""
    prompt_column_name: str = ""
    """Prompt column."""
    response_column_name: str = ""
    """Reference-answer column."""
    reward_function: dict[str, float] = msgspec.field(default_factory=lambda: {"single_choice": 1.0})
    """Name, list of names, or map name to weight."""
    use_remote_reward: bool = False
    """Score through the reward service."""
    remote_reward: RemoteRewardSettings = RemoteRewardSettings()
    """How the reward service is asked."""
    filter_reward_metric: tuple[str, ...] = ()
    """Metric whose in-group spread decides DAPO filtering."""
    bypass_reward: bool = False
    """Constant 0 reward."""
    group_reward_calculation: bool = False
    """Reward fn sees the whole group."""
    temperature: PositiveFloat = 1.0
    """Divides the logits of the trainer, and of the sampler unless rollout.sampling_config gives its own."""
    epsilon_low: OpenShare = 0.2
    """Lower ratio clip."""
    epsilon_high: PositiveFloat = 0.2
    """Upper ratio clip (0.28 for clip-higher)."""
    advantage_low: float = -5.0
    """Advantage floor."""
    advantage_high: float = 5.0
    """Advantage ceiling."""
    positive_nll_coef: NonNegativeFloat | None = None
    """Extra NLL on correct samples (VAPO)."""
    lower_bound_ratio: PositiveFloat = 3.0
    """Dual-clip constant."""
    loss_type: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"] = "token-mean"
    """Loss reduction; token-sum also handled in code."""
    unbiased_loss_max_tokens: Positive | None = None
    """Dr.GRPO fixed divisor; only with seq-mean-token-mean."""
    unbiased_advantage: bool = False
    """True skips the std division."""
    algo: str = "grpo"
    """Advantage rule from the registry."""
    overlong_reward: OverlongSettings = OverlongSettings()
    """The length penalty."""
    kl_beta: NonNegativeFloat = 0.0
    """KL weight; 0 loads no reference model."""
    unbiased_kl_estimate: bool = False
    """Importance-weighted k3."""
    off_policy_masking_delta: NonNegativeFloat | None = None
    """Drop bad stale sequences (DeepSeek V3.2)."""
    aipo_rho: PositiveFloat | None = None
    """Cap on the importance ratio (AIPO)."""
    mu_iterations: Positive = 1
    """Passes over each batch."""
    mini_batch: Positive = 2
    """Micro-batch rows."""
    batch_size_per_optimize: Positive | None = None
    """Rows per optimiser step inside one batch."""
    max_token_len_per_mini_batch: Positive | None = None
    """Token budget per micro-batch."""
    entropy_coeff: float = 0.0
    """Entropy bonus."""
    allowed_outdated_steps: NonNegative = 4
    """Staleness bound in steps, and throttle (N+1) batches."""
    on_policy: bool = False
    """Wait for exact version."""
    uncentralized_training: bool = False
    """Skip the controller for data (colocated only)."""
    outdated_rollout_fetch_batch_size: NonNegative = 0
    """Prompts still given while throttled; validator sets 128 for dapo when left 0."""
    max_inflight_steps: Positive | None = None
    """Hard ceiling in batches, clamped to at least allowed+1."""
    min_filter_prefix_tokens: Positive | None = None
    """Mask shared prefixes of at least this many tokens inside a group."""
    max_retry_for_on_policy: LimitOrAll = -1
    """Refill tries under filtering, -1 = no limit."""
    reference_reset_interval: Positive | None = None
    """Copy policy into reference every N steps."""
    reset_optimizer_with_reference: bool = True
    """Also wipe optimiser then."""
    balance_dp_token: bool = False
    """Weigh loss by token counts over DP."""
    use_decoupled_loss: bool = False
    """Proximal / behaviour split (decoupled PPO)."""
    behav_imp_weight_cap: PositiveFloat | None = None
    """Cap on behaviour weight; above it weight becomes ZERO."""
    rollout_as_token_ids: bool = False
    """Ship ids, not text."""
    collect_rollout_logprobs: bool = False
    """Ship behaviour logprobs."""
    use_rollout_logprobs_for_loss: bool = False
    """Old logprobs = behaviour logprobs."""


class SftSettings(Table, frozen=True, kw_only=True, tag_field="type", tag="sft"):
    """Supervised fine-tuning: known, checked and kept; this runtime trains by GRPO only."""

    trainer_type: str = "sft"
    """Registry name."""
    dataset: DatasetSettings = DatasetSettings()
    """Where rows come from."""
    mini_batch: Positive = 2
    """Micro-batch rows."""
    dataloader_shuffle: bool = True
    """Shuffle rows."""
    dataloader_seed: Seed = 0
    """Shuffle seed."""
    dataloader_batch_size: Positive | None = 1
    """Controller iterator batch."""
    enable_dataset_cache: bool = False
    """Cache processed rows."""
    dataloader_num_workers: NonNegative = 0
    """Loader subprocesses."""
    dataloader_prefetch_factor: Positive | None = None
    """Loader look-ahead."""
    dataloader_drop_last: bool = True
    """Drop short tail."""
    data_dispatch_as_rank_in_mesh: bool = False
    """Shard by mesh rank."""
    conversation_column_name: str = "conversations"
    """Chat column."""
    system_prompt: str = ""
    """Prepended system text."""
    balance_dp_token: bool = True
    """Weigh loss by tokens over DP."""
    enable_dp_load_balancing: bool = False
    """Token-balanced batching."""
    load_balanced_pool_size: Positive = 32
    """Pool per DP rank."""
    load_balanced_max_tokens_for_batch: Positive | None = None
    """Token budget."""
    load_balanced_batching_strategy: str = "prefer_closest"
    """FIFO or closest length."""
    load_balanced_batches_per_optimizer_step: Positive = 1
    """Accumulation."""
    dataloader_broadcast: bool = False
    """Rank 0 loads, others receive."""
