"""The table [distillation]: a teacher beside the policy. Names and defaults are Cosmos-RL's."""

from typing import Literal

from aimaster.settings.parallelism import ParallelismSettings
from aimaster.settings.table import Dtype, NonNegative, NonNegativeFloat, Positive, Seed, Share, Table


class DistillationSettings(Table, frozen=True, kw_only=True):
    """On-policy distillation."""

    enable: bool = False
    """On-policy distillation."""
    parallelism: ParallelismSettings = ParallelismSettings()
    """Teacher parallelism."""
    model_name_or_path: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    """Teacher."""
    model_revision: str | None = None
    """Revision."""
    compile: bool = True
    """Compile."""
    master_dtype: Dtype = "float32"
    """Dtype."""
    param_dtype: Dtype = "bfloat16"
    """Dtype."""
    logprob_dtype: Dtype = "float32"
    """Dtype."""
    fsdp_reduce_dtype: Literal["float32"] = "float32"
    """Dtype."""
    fsdp_offload: bool = False
    """Offload."""
    fsdp_reshard_after_forward: Literal["always", "never", "default"] = "never"
    """Reshard."""
    batch_size_per_replica: Positive = 8
    """Teacher batch."""
    max_token_len_per_mini_batch: Positive | None = None
    """Token budget."""
    sequence_packing: bool = False
    """Packing."""
    mini_batch: Positive = 1
    """Micro-batch."""
    seed: Seed | None = None
    """Seed."""
    kl_penalty_coef: NonNegativeFloat = 1.0
    """Weight."""
    kl_discount_factor: Share = 0.0
    """Discount."""
    include_prompt: bool = False
    """KL over prompt."""
    top_k: NonNegative = 0
    """0 = sampled KL, >0 = generalised JSD on top-k."""
    jsd_beta: Share = 0.5
    """JSD mix."""
    trainer_token_ids_from_teacher: bool = True
    """Ids travel teacher to trainer."""
    rollout_top_k_recompute: bool = False
    """Recompute top-k after generation."""
