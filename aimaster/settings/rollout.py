"""The table [rollout] and its sub-tables. Names and defaults are Cosmos-RL's."""

from typing import Literal

from aimaster.settings.parallelism import ParallelismSettings
from aimaster.settings.table import NonNegativeFloat, Positive, Ratio, Table


class SamplingSettings(Table, frozen=True, kw_only=True):
    """How the engine samples."""

    temperature: NonNegativeFloat = 1.0
    """What the engine really samples at; NOT linked to train_policy.temperature."""
    top_p: Ratio = 1.0
    """Nucleus."""
    top_k: int = -1
    """Top-k."""
    repetition_penalty: float = 1.0
    """Penalty."""
    use_flashinfer: bool = False
    """Sampler kernel."""


class MultiTurnSettings(Table, frozen=True, kw_only=True):
    """Conversations of several turns."""

    enable: bool = False
    """Multi-turn loop."""
    enable_tools: bool = False
    """Tool calls."""
    enable_thinking: bool = False
    """Thinking template flag."""
    custom_chat_template_path: str | None = None
    """Template file."""
    max_assistant_turns: int = 5
    """Turn cap."""
    add_generation_prompt: bool = True
    """Template flag."""
    continue_final_message: bool = False
    """Template flag."""


class AsyncSettings(Table, frozen=True, kw_only=True):
    """Concurrency of an asynchronous engine."""

    max_concurrent_requests: Positive = 10
    """Engine concurrency."""


class RolloutSettings(Table, frozen=True, kw_only=True):
    """Engine, group size, lengths."""

    parallelism: ParallelismSettings = ParallelismSettings()
    """Members and the mesh inside one."""
    enforce_eager: bool = True
    """VLLM eager mode."""
    include_stop_str_in_output: bool = False
    """Keep stop text."""
    gpu_memory_utilization: Ratio = 0.8
    """Share of GPU memory for the engine."""
    enable_chunked_prefill: bool = False
    """VLLM chunked prefill."""
    max_response_length: Positive = 2048
    """New-token cap."""
    n_generation: Positive = 16
    """Completions per prompt (group size)."""
    n_generation_to_batch: bool = False
    """Unroll group into batch dim."""
    n_generation_mini_batch: int | None = None
    """Split of group (diffusion)."""
    batch_size: Positive = 1
    """Prompts per engine call."""
    quantization: Literal["none", "fp8"] = "none"
    """Engine quantisation."""
    seed: int | None = None
    """The engine's seed; 0 or unset is 42."""
    sampling_config: SamplingSettings = SamplingSettings()
    """How the engine samples."""
    vllm_use_flashinfer: bool = False
    """Attention kernel."""
    backend: str = "vllm"
    """Engine or registered custom name."""
    multi_turn_config: MultiTurnSettings = MultiTurnSettings()
    """Conversations of several turns."""
    mode: Literal["sync", "async"] = "sync"
    """Sync or async loop."""
    async_config: AsyncSettings = AsyncSettings()
    """Concurrency."""
    async_r2r_sync: Literal["disabled", "generation", "inference"] = "disabled"
    """Background R2R mode."""
    prefetch_rollout: bool = False
    """Background prompt fetch."""
    prefetch_queue_maxsize: int = 2
    """Its depth."""
    broadcast_all_params: bool = False
    """R2R sends frozen params too."""
