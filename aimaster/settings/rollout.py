"""The table [rollout] and its sub-tables. Names and defaults are Cosmos-RL's."""

from typing import Literal

from aimaster.settings.parallelism import ParallelismSettings
from aimaster.settings.table import (
    LimitOrAll,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Ratio,
    Seed,
    Table,
)


class SamplingSettings(Table, frozen=True, kw_only=True):
    """How the engine samples."""

    temperature: NonNegativeFloat = 1.0
    """What the engine samples at; unless given, that of train.train_policy."""
    top_p: Ratio = 1.0
    """Share of the probability that is sampled from."""
    top_k: LimitOrAll = -1
    """Number of likeliest tokens that are sampled from; -1: all."""
    repetition_penalty: PositiveFloat = 1.0
    """Penalty on tokens seen before; 1: none."""
    use_flashinfer: bool = False
    """FlashInfer's sampling kernel."""


class MultiTurnSettings(Table, frozen=True, kw_only=True):
    """Conversations of several turns."""

    enable: bool = False
    """Whether conversations have several turns."""
    enable_tools: bool = False
    """Tool calls."""
    enable_thinking: bool = False
    """Whether the chat template lets the model think."""
    custom_chat_template_path: str | None = None
    """A chat template of one's own."""
    max_assistant_turns: Positive = 5
    """The model speaks at most so often."""
    add_generation_prompt: bool = True
    """Whether the chat template opens the model's turn."""
    continue_final_message: bool = False
    """Whether the model continues the last message."""


class AsyncSettings(Table, frozen=True, kw_only=True):
    """Concurrency of an asynchronous engine."""

    max_concurrent_requests: Positive = 10
    """Requests in the engine at once."""


class RolloutSettings(Table, frozen=True, kw_only=True):
    """Engine, group size, lengths."""

    parallelism: ParallelismSettings = ParallelismSettings()
    """Members and the mesh inside one."""
    enforce_eager: bool = True
    """Run vLLM without CUDA graphs."""
    include_stop_str_in_output: bool = False
    """Whether the text that ended an answer is part of it."""
    gpu_memory_utilization: Ratio = 0.8
    """Share of GPU memory for the engine."""
    enable_chunked_prefill: bool = False
    """Prefill long prompts in chunks beside decoding (vLLM)."""
    max_response_length: Positive = 2048
    """An answer has at most so many tokens."""
    n_generation: Positive = 16
    """Answers to each prompt: the size of a group."""
    n_generation_to_batch: bool = False
    """Whether a group is unrolled into the batch."""
    n_generation_mini_batch: Positive | None = None
    """Parts of a group made at once (diffusion)."""
    batch_size: Positive = 1
    """Prompts in the engine at once."""
    quantization: Literal["none", "fp8"] = "none"
    """Quantisation of the engine's weights."""
    seed: Seed | None = None
    """The engine's seed; 0 or unset is 42."""
    sampling_config: SamplingSettings = SamplingSettings()
    """How the engine samples."""
    vllm_use_flashinfer: bool = False
    """FlashInfer's attention kernel."""
    backend: str = "vllm"
    """Cosmos-RL's engine name; ours is aimaster.engine."""
    multi_turn_config: MultiTurnSettings = MultiTurnSettings()
    """Conversations of several turns."""
    mode: Literal["sync", "async"] = "sync"
    """Whether the engine's loop is asynchronous."""
    async_config: AsyncSettings = AsyncSettings()
    """Concurrency of an asynchronous engine."""
    async_r2r_sync: Literal["disabled", "generation", "inference"] = "disabled"
    """Weights between rollouts in the background."""
    prefetch_rollout: bool = False
    """Fetch prompts ahead."""
    prefetch_queue_maxsize: NonNegative = 2
    """How many ahead."""
    broadcast_all_params: bool = False
    """Whether frozen weights are sent too."""
