"""The tables [logging], [profiler] and [validation]: what is watched while the job runs."""

from aimaster.settings.table import LimitOrAll, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Ratio, Table
from aimaster.settings.train_policy import DatasetSettings, RemoteRewardSettings


class LoggingSettings(Table, frozen=True, kw_only=True):
    """Where figures go."""

    logger: tuple[str, ...] = ()
    """Sinks: console, wandb, tensorboard-like custom fns."""
    log_interval: Positive = 100
    """Averaging period."""
    multi_modal_log_interval: Positive | None = None
    """Media period."""
    project_name: str = "cosmos_rl"
    """Project."""
    group_name: str | None = None
    """Group."""
    experiment_name: str | None = None
    """Run name, else output_dir."""
    report_mfu: bool = False
    """Report the share of peak FLOPs used."""


class SubProfilerSettings(Table, frozen=True, kw_only=True):
    """What the profiler records."""

    do_profile: bool = False
    """Profile from the start."""
    active_steps: Positive = 1
    """Active."""
    warmup_steps: NonNegative = 1
    """Warm-up."""
    wait_steps: NonNegative = 1
    """Wait."""
    rank_filter: tuple[NonNegative, ...] = ()
    """Ranks."""
    record_shape: bool = False
    """Shapes."""
    profile_memory: bool = False
    """Memory."""
    with_stack: bool = False
    """Stacks."""
    with_modules: bool = False
    """Modules."""


class ProfilerSettings(Table, frozen=True, kw_only=True):
    """The profiler."""

    enable_profiler: bool = False
    """Torch profiler."""
    enable_nsys: bool = False
    """Nsys hooks."""
    sub_profiler_config: SubProfilerSettings = SubProfilerSettings()
    """What is recorded."""


class ValidationSettings(Table, frozen=True, kw_only=True):
    """Held-out prompts, scored every so many steps."""

    enable: bool = False
    """Run validation."""
    val_before_train: bool = False
    """Also at step 0."""
    freq: Positive = 20
    """Every N steps."""
    batch_size: Positive | None = None
    """Prompts per call."""
    dataset: DatasetSettings = DatasetSettings()
    """Where held-out rows come from."""
    temperature: NonNegativeFloat = 0.0
    """Temperature."""
    top_p: Ratio | None = None
    """Nucleus."""
    top_k: LimitOrAll | None = 1
    """Top-k."""
    repetition_penalty: PositiveFloat = 1.0
    """Penalty."""
    n_generation: Positive = 1
    """Completions per prompt."""
    max_response_length: Positive | None = None
    """Cap."""
    reward_function: dict[str, float] = {}
    """Rewards; empty = training rewards."""
    use_remote_reward: bool | None = None
    """None = same as training."""
    remote_reward: RemoteRewardSettings | None = None
    """None = same as training."""
