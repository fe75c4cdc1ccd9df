"""Which keys of Cosmos-RL have an effect here, so that none is taken in silence.

A key is honoured; or it asks for another algorithm than is done here, and a run refuses it (`REFUSED`); or it is kept without effect,
and said to be, once, where somebody gave it a value other than its default.
"""

from typing import Any

GRPO = "train.train_policy"

HONOURED = frozenset(
    {
        "train.ckpt.enable_checkpoint",
        "train.ckpt.max_keep",
        "train.ckpt.save_freq",
        "train.deterministic",
        "train.epoch",
        "train.epsilon",
        "train.max_num_steps",
        "train.optm_betas",
        "train.optm_decay_ratio",
        "train.optm_decay_type",
        "train.optm_grad_norm_clip",
        "train.optm_impl",
        "train.optm_lr",
        "train.optm_min_lr_factor",
        "train.optm_name",
        "train.optm_warmup_start_factor",
        "train.optm_warmup_steps",
        "train.optm_weight_decay",
        "train.resume",
        "train.seed",
        "train.train_batch_per_replica",
        f"{GRPO}.type",
        f"{GRPO}.advantage_high",
        f"{GRPO}.advantage_low",
        f"{GRPO}.aipo_rho",
        f"{GRPO}.allowed_outdated_steps",
        f"{GRPO}.bypass_reward",
        f"{GRPO}.collect_rollout_logprobs",
        f"{GRPO}.dataloader_seed",
        f"{GRPO}.dataloader_shuffle",
        f"{GRPO}.dataset.local_dir",
        f"{GRPO}.dataset.name",
        f"{GRPO}.dataset.split",
        f"{GRPO}.dataset.subset",
        f"{GRPO}.dataset.test_size",
        f"{GRPO}.epsilon_high",
        f"{GRPO}.epsilon_low",
        f"{GRPO}.filter_reward_metric",
        f"{GRPO}.loss_type",
        f"{GRPO}.lower_bound_ratio",
        f"{GRPO}.min_filter_prefix_tokens",
        f"{GRPO}.mini_batch",
        f"{GRPO}.on_policy",
        f"{GRPO}.overlong_reward.buffer_length",
        f"{GRPO}.overlong_reward.enable_overlong_penalty",
        f"{GRPO}.overlong_reward.penalty_factor",
        f"{GRPO}.prompt_column_name",
        f"{GRPO}.response_column_name",
        f"{GRPO}.reward_function",
        f"{GRPO}.rollout_as_token_ids",
        f"{GRPO}.temperature",
        f"{GRPO}.unbiased_advantage",
        f"{GRPO}.unbiased_loss_max_tokens",
        f"{GRPO}.use_rollout_logprobs_for_loss",
        f"{GRPO}.variant",
        "rollout.batch_size",
        "rollout.max_response_length",
        "rollout.n_generation",
        "rollout.parallelism.n_init_replicas",
        "rollout.sampling_config.temperature",
        "rollout.seed",
        "policy.model_max_length",
        "policy.model_name_or_path",
        "policy.parallelism.n_init_replicas",
        "custom",
        "redis",  # said to be unused by its own rule
    }
)

REFUSED: dict[str, tuple[Any, ...]] = {
    "mode": ("disaggregated",),
    "train.ema_enable": (False,),
    "policy.is_diffusers": (False,),
    "policy.lora": (None,),
    "policy.trainable_map": (None,),
    "policy.freeze_pattern": (None,),
    "policy.trainable_pattern": (None,),
    "distillation.enable": (False,),
    "rollout.multi_turn_config.enable": (False,),
    "rollout.sampling_config.top_p": (1.0,),
    "rollout.sampling_config.top_k": (-1, 0),
    "rollout.sampling_config.repetition_penalty": (1.0,),
    f"{GRPO}.algo": ("grpo",),
    f"{GRPO}.trainer_type": ("grpo",),
    f"{GRPO}.kl_beta": (0.0,),
    f"{GRPO}.mu_iterations": (1,),
    f"{GRPO}.batch_size_per_optimize": (None,),
    f"{GRPO}.positive_nll_coef": (None,),
    f"{GRPO}.entropy_coeff": (0.0,),
    f"{GRPO}.off_policy_masking_delta": (None,),
    f"{GRPO}.use_decoupled_loss": (False,),
    f"{GRPO}.use_remote_reward": (False,),
    f"{GRPO}.group_reward_calculation": (False,),
    f"{GRPO}.uncentralized_training": (False,),
    f"{GRPO}.reference_reset_interval": (None,),
}
"""Keys that change what is learnt, with the values that this runtime can do."""

GPU_ONLY = (
    "train.optm_impl",
    "train.fsdp_reduce_dtype",
    "train.fsdp_offload",
    "train.fsdp_reshard_after_forward",
    "train.async_tp_enabled",
    "train.compile",
    "train.activation_offload",
    "train.fa_version",
    "train.fp8.enable_fp8",
    "train.fp4.enable_fp4",
    "rollout.gpu_memory_utilization",
    "rollout.enable_chunked_prefill",
    "rollout.enforce_eager",
    "rollout.quantization",
    "rollout.vllm_use_flashinfer",
    "policy.model_gradient_checkpointing",
    "policy.enable_liger_kernel",
)
"""Keys about speed on GPUs, each with a line of its own on a CPU."""


def is_quiet(key: str) -> bool:
    """Whether nothing need be said of this key here: it has its effect, or its own rule speaks of it."""
    told = key in HONOURED or key in REFUSED or any(key.startswith(f"{table}.") for table in REFUSED)
    return told or key.startswith("aimaster.") or key.endswith((".parallelism.tp_size", "_dtype"))
