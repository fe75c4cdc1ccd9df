"""The tables [policy], [policy.lora], [policy.diffusers] and [vla]: which model, and what of it is trained."""

from typing import Literal

from aimaster.settings.parallelism import ParallelismSettings
from aimaster.settings.table import (
    Below1,
    Count,
    Dtype,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Ratio,
    Table,
)


class LoraSettings(Table, frozen=True, kw_only=True):
    """Low-rank adapters."""

    r: Positive = 8
    """Rank."""
    lora_names: tuple[str, ...] = ("default",)
    """Adapters."""
    lora_path: str | None = None
    """Start weights."""
    lora_alpha: PositiveFloat = 8.0
    """Alpha."""
    lora_dropout: Below1 = 0.0
    """Dropout."""
    target_modules: str | tuple[str, ...] | None = None
    """Modules or all-linear."""
    primary_adapter: str | None = None
    """Adapter used for inference."""
    use_rslora: bool = False
    """Rank-stabilised scaling."""
    modules_to_save: tuple[str, ...] | None = None
    """Extra trainable modules."""
    alpha_pattern: dict[str, PositiveFloat] | None = None
    """Per-module alpha."""
    r_pattern: dict[str, Positive] | None = None
    """Per-module rank."""
    init_lora_weights: bool | str = True
    """Init method."""


class DiffusersSampleSettings(Table, frozen=True, kw_only=True):
    """Sampler of a diffusion model."""

    num_steps: Positive = 40
    """Training sampler steps."""
    eval_num_steps: Positive = 40
    """Eval sampler steps."""
    guidance_scale: NonNegativeFloat = 4.5
    """CFG weight."""
    global_std: bool = True
    """Std over the batch."""
    noise_level: NonNegativeFloat = 1.0
    """SDE noise."""
    deterministic_sampling: bool = False
    """No noise."""
    solver: str = "dpm2"
    """Solver name."""


class DiffusersTokenizerSettings(Table, frozen=True, kw_only=True):
    """Tokenizer of a diffusion model."""

    chunk_duration: Positive = 81
    """Frames per chunk."""
    load_mean_std: bool = False
    """Load stats."""
    compile_encode: bool = False
    """Compile encoder."""
    temporal_window: Positive = 16
    """Window."""


class DiffusersSettings(Table, frozen=True, kw_only=True):
    """A diffusion model."""

    dtype: Dtype = "float32"
    """Transformer/encoder dtype."""
    is_video: bool = False
    """Video model."""
    max_prompt_length: Positive = 300
    """Prompt tokens."""
    weighting_scheme: str = "logit_normal"
    """Timestep sampler."""
    train_flow_shift: PositiveFloat = 3.0
    """Flow shift."""
    offload: bool = True
    """Move parts to CPU."""
    logit_mean: float = 0.0
    """Sampler mean."""
    logit_std: PositiveFloat = 1.0
    """Sampler std."""
    inference_size: tuple[Positive, ...] = (1024, 1024)
    """H, w."""
    inference_frames: Positive = 41
    """Frames out."""
    train_frames: Positive = 41
    """Frames in training."""
    timesteps_fraction: Ratio = 1.0
    """Share of steps trained."""
    nft_beta: NonNegativeFloat = 1.0
    """DiffusionNFT beta."""
    weight_copy_decay_type: NonNegative = 0
    """Old-weight decay."""
    lora: LoraSettings | None = None
    """Low-rank adapters."""
    sample: DiffusersSampleSettings = DiffusersSampleSettings()
    """The sampler."""
    tokenizer: DiffusersTokenizerSettings = DiffusersTokenizerSettings()
    """The tokenizer."""


class PolicySettings(Table, frozen=True, kw_only=True):
    """The model that learns."""

    parallelism: ParallelismSettings = ParallelismSettings()
    """Members and the mesh inside one."""
    diffusers: DiffusersSettings | None = DiffusersSettings()
    """A diffusion model."""
    is_diffusers: bool = False
    """Diffusion model flag."""
    model_name_or_path: str = "Qwen/Qwen2.5-VL-7B-Instruct"
    """Hub id or path."""
    model_safetensor_path: str | None = None
    """Weights elsewhere."""
    model_revision: str | None = None
    """Revision."""
    model_max_length: Positive = 4096
    """Prompt+response cap; longer rows are ignored."""
    model_gradient_checkpointing: bool = True
    """Recompute activations."""
    lora: LoraSettings | None = None
    """Low-rank adapters."""
    trainable_map: dict[str, bool] | None = None
    """Exact name to trainable flag."""
    freeze_pattern: tuple[str, ...] | None = None
    """Regex list to freeze."""
    trainable_pattern: tuple[str, ...] | None = None
    """Regex list to train, rest frozen."""
    enable_liger_kernel: bool = False
    """Fused kernels."""
    enable_liger_cross_entropy: bool = False
    """SFT only."""
    enable_liger_fused_cross_entropy: bool = False
    """SFT only."""
    aux_loss_coeff: NonNegativeFloat = 0.0
    """MoE auxiliary loss."""


class VlaSettings(Table, frozen=True, kw_only=True):
    """A vision-language-action model and its simulators."""

    vla_type: Literal["openvla-oft", "openvla", "cosmos-policy"] = "openvla-oft"
    """Model family."""
    num_envs: Count = 1
    """Simulators."""
    use_proprio: bool = False
    """Proprioception."""
    proprio_dim: NonNegative = 7
    """Its size."""
    num_images_in_input: NonNegative = 1
    """Images."""
    training_chunk_size: Positive = 16
    """Chunks per pass."""
    save_video: bool = False
    """Record."""
    continuous: bool = False
    """Continuous simulation."""
    trace_verbosity: NonNegative = 1
    """Trace level."""
    unnorm_key: str = "libero_10_no_noops"
    """Action stats key."""
    max_steps: Positive | None = None
    """Episode cap."""
    use_subprocess: bool | None = None
    """Isolate simulator."""
