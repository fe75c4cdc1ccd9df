"""The table [train] and its [train.ckpt], [train.fp8], [train.fp4]. Names and defaults are Cosmos-RL's."""

from typing import Literal

from aimaster.settings.table import (
    Below1,
    Dtype,
    LimitOrAll,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Seed,
    Share,
    Table,
)
from aimaster.settings.train_policy import GrpoSettings, SftSettings

OptimizerName = Literal["AdamW", "Adam"]
OptimizerKernel = Literal["fused", "foreach", "for-loop"]
ScaleRecipe = Literal["dynamic_scaling", "delayed_scaling"]
ScaleGrain = Literal["rowwise", "tensorwise"]


class Fp8Settings(Table, frozen=True, kw_only=True):
    """8-bit floating point in training."""

    enable_fp8: bool = False
    """Fp8 matmuls in training."""
    fp8_recipe: ScaleRecipe = "dynamic_scaling"
    """Scale recipe."""
    quant_recipe: ScaleGrain = "rowwise"
    """Scale granularity."""


class Fp4Settings(Table, frozen=True, kw_only=True):
    """4-bit floating point in training."""

    enable_fp4: bool = False
    """Fp4 matmuls in training."""
    fp4_recipe: ScaleRecipe = "dynamic_scaling"
    """Scale recipe."""
    quant_recipe: ScaleGrain = "rowwise"
    """Scale granularity."""


class CkptSettings(Table, frozen=True, kw_only=True):
    """What is kept on storage, and how often."""

    enable_checkpoint: bool = False
    """Master switch."""
    save_freq: Positive = 20
    """Every N steps."""
    save_freq_in_epoch: NonNegative = 0
    """Every N epochs, 0 = off."""
    save_mode: Literal["async", "sync"] = "async"
    """Background or blocking write."""
    max_keep: LimitOrAll = 5
    """Newest N kept, -1 keeps all."""
    export_safetensors: bool = True
    """HF export at each save, else only at the end."""
    upload_hf: bool = False
    """Push export to the hub."""
    hf_repo_name: str = "Comos-Reason1"
    """Hub repo."""
    upload_s3: bool | Literal["final", "all"] = False
    """False, final or all."""
    s3_bucket: str | None = None
    """Bucket; needed when upload_s3 is set."""
    s3_prefix: str = "outputs"
    """Key prefix."""


class TrainSettings(Table, frozen=True, kw_only=True):
    """Optimiser, precision, batch, length of the run."""

    train_policy: GrpoSettings | SftSettings = GrpoSettings()
    """GRPO or SFT block, chosen by type."""
    optm_name: OptimizerName | tuple[OptimizerName, ...] = "AdamW"
    """Optimiser; list allowed for several."""
    optm_lr: NonNegativeFloat | tuple[NonNegativeFloat, ...] | dict[str, NonNegativeFloat] = 1e-06
    """Learning rate; list per optimiser, or map module path to rate."""
    optm_impl: OptimizerKernel | tuple[OptimizerKernel, ...] = "fused"
    """Optimiser kernel style."""
    optm_weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    optm_betas: tuple[Below1, Below1] = (0.9, 0.999)
    """Adam betas."""
    optm_warmup_steps: NonNegative | Share = 20
    """Warm-up length; float in 0..1 means fraction of total steps."""
    optm_warmup_start_factor: Share = 0.0
    """First lr as a share of optm_lr."""
    optm_decay_ratio: Share | None = None
    """Share of all steps spent decaying."""
    optm_decay_type: Literal["sqrt", "cosine", "linear", "none"] | None = None
    """Decay curve."""
    optm_min_lr_factor: Share = 0.0
    """Lr floor as a share."""
    optm_grad_norm_clip: NonNegativeFloat = 1.0
    """Global grad-norm cap."""
    ema_enable: bool = False
    """Keep an averaged copy (diffusers only)."""
    ema_decay: Share = 0.9999
    """Averaging factor."""
    ema_update_step_interval: NonNegative = 0
    """Averaging period, 0 = each step."""
    master_dtype: Dtype = "float32"
    """Dtype the optimiser holds."""
    param_dtype: Dtype = "bfloat16"
    """Forward/backward dtype."""
    transfer_dtype: Dtype | None = None
    """Wire dtype for weight sync; unset = master_dtype, i.e. float32 by default (twice the bytes of bf16)."""
    logprob_dtype: Dtype = "float32"
    """Dtype for log-prob maths."""
    fsdp_reduce_dtype: Literal["float32"] = "float32"
    """Gradient reduce dtype."""
    fsdp_offload: bool = False
    """Park sharded params on CPU."""
    fsdp_reshard_after_forward: Literal["always", "never", "default"] = "default"
    """When to drop gathered params."""
    train_batch_per_replica: Positive = 8
    """ROLLOUTS (not prompts) one policy replica trains per step; must divide by mini_batch (and PP rules)."""
    fp8: Fp8Settings = Fp8Settings()
    """8-bit floating point."""
    fp4: Fp4Settings = Fp4Settings()
    """4-bit floating point."""
    ckpt: CkptSettings = CkptSettings()
    """What is kept on storage."""
    resume: bool | str = False
    """A path: a new run starts from that checkpoint or run folder. An unfinished run is resumed whatever is said here."""
    epoch: Positive = 1
    """Passes over the data."""
    output_dir: str = "./outputs"
    """Root; a timestamp directory is appended."""
    timestamp: str = ""
    """Fixes that suffix and the wandb id."""
    epsilon: PositiveFloat = 1e-06
    """Optimiser epsilon."""
    async_tp_enabled: bool = False
    """Overlap communication of tensor-parallel ranks; needs compile."""
    compile: bool = True
    """Torch.compile the model."""
    sync_weight_interval: Positive = 1
    """Push weights to rollout every N steps."""
    coalesce_weight_sync: bool = False
    """Skip superseded pushes, keep only newest."""
    deterministic: bool = False
    """Slow, repeatable kernels; the seed is 42 unless given."""
    activation_offload: bool = False
    """Park activations on CPU."""
    fa_version: Literal[2, 3] | None = None
    """FlashAttention major version."""
    seed: Seed | None = None
    """Trainer seed."""
    local_dataset: bool | None = True
    """Replicas hold the dataset, controller sends indices only."""
    force_use_hf: bool | None = False
    """Prefer the HF model class over the native one."""
    non_text: bool = False
    """Payloads carry tensors/images."""
    max_num_steps: Positive | None = None
    """Hard cap on steps."""
    sequence_packing: bool = False
    """Pack sequences in one row."""
    save_ckpt_at_exit: bool = True
    """Save when a listed signal arrives."""
    signal_to_handle: tuple[Literal["SIGUSR1"], ...] = ("SIGUSR1",)
    """Those signals."""
