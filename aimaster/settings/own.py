"""The table [aimaster]: all that is ours and not Cosmos-RL's.

Where the members run, how long silence is borne, how often something may be restarted, where state is kept, and
the small things a first run needs (a fresh model, a warm start, a built-in task, a drill).
"""

from typing import Literal

from aimaster.settings.table import Count, LimitOrAll, NonNegative, Positive, PositiveFloat, Seconds, Seed, Table


class LeaseSettings(Table, frozen=True, kw_only=True):
    """How long silence is borne before it means something."""

    startup_hang_seconds: Seconds = 600.0
    """A phase whose pace is not learnt yet may be silent for so long."""
    learnt_factor: PositiveFloat = 4.0
    """A progress lease is so many times the slowest step seen in its phase."""
    shortest_seconds: Seconds = 3.0
    """No learnt progress lease is shorter."""
    self_fence_leases: PositiveFloat = 10.0
    """A member ends itself after so many of its own leases without progress."""
    group_timeout_seconds: Seconds = 10.0
    """A collective that moves no byte for so long is aborted."""
    join_hold_seconds: Seconds = 60.0
    """The others never wait longer at a step boundary for a member that joins."""
    join_hold_shortest_seconds: Seconds = 2.0
    """A join is given at least so long."""
    master_silence_seconds: Seconds = 2.0
    """After so long without the master, the controller opens the next epoch itself, on a death notice only."""
    abort_settle_seconds: Seconds = 2.0
    """So long after an aborted reduction a death may still be announced before the epoch is tried again."""
    agent_silence_seconds: Seconds = 10.0
    """After so long without an agent, a node's members may be placed elsewhere."""
    prompt_seconds: Seconds = 120.0
    """A prompt that is leased to a rollout member goes to another after so long without a token."""


class BudgetSettings(Table, frozen=True, kw_only=True):
    """How often a member is started again before the job stops with its reason. A user's exception is never retried."""

    member_restarts: NonNegative = 10
    """Restarts of one member within the window."""
    window_seconds: Seconds = 600.0
    """Older restarts are forgiven."""


class SnapshotSettings(Table, frozen=True, kw_only=True):
    """How often state is kept, where, and how much of it."""

    save_every: Positive = 1
    """A snapshot into the node's memory every so many steps."""
    replicate_every: NonNegative = 1
    """Each so-many-th snapshot is copied to peer nodes; 0: never."""
    copies: NonNegative = 1
    """Peer nodes that hold a copy, in other failure domains first (AIMASTER_AGENT__LABELS of each node names its own)."""
    copy_mib_per_second: NonNegative = 0
    """All copies of a node together send no faster; 0: no cap."""
    flush_every: NonNegative = 0
    """Each so-many-th step is written to storage; 0: as train.ckpt.save_freq says."""
    keep: LimitOrAll = 0
    """Checkpoints kept on storage, -1 keeps all; 0: as train.ckpt.max_keep says."""
    keep_every: NonNegative = 0
    """A checkpoint of each so-many-th step is never removed; 0: none."""
    slots: Literal[1, 2] = 2
    """Slots in memory for each rank. With one, a death during a save costs the way back to the peer or storage."""
    storage: str = ""
    """Folder or mount for checkpoints; empty: the run folder's own."""


class WarmStartSettings(Table, frozen=True, kw_only=True):
    """A short supervised start, so that a fresh model earns some reward."""

    steps: NonNegative = 0
    """Supervised steps before the first prompt; 0: none."""
    batch: Positive = 64
    """Rows of each."""
    learning_rate: PositiveFloat = 3e-3
    """Its rate, after a warm-up of a third of the steps."""


class ModelSettings(Table, frozen=True, kw_only=True):
    """A fresh Llama-shaped model, given by its sizes (names as in a Hugging Face config.json)."""

    hidden_size: Positive = 64
    """Width."""
    num_hidden_layers: Count = 2
    """Layers."""
    num_attention_heads: Count = 4
    """Attention heads; must divide the width."""
    num_key_value_heads: Count = 4
    """Key and value heads; must divide the attention heads."""
    intermediate_size: Positive = 192
    """Width of the feed-forward part."""
    max_position_embeddings: Positive = 32
    """Longest prompt and answer together."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary embedding."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Guard of the norms."""
    tie_word_embeddings: bool = False
    """Whether input and output embeddings are one tensor."""


class AimasterSettings(Table, frozen=True, kw_only=True):
    """What is ours: nodes, leases, budgets, snapshots, and what a first run needs."""

    nodes: Count = 1
    """Nodes, each with one agent; on one machine they are folders and processes."""
    placement: dict[str, tuple[str, ...]] = {}
    """Members of each node (`node-0 = ["controller-0", "policy-0"]`); empty: dealt round the nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; auto: CUDA where a device is there."""
    host: str = "127.0.0.1"
    """Address that all listen on; anything wider needs a token."""
    seed: Seed = 0
    """Root of all randomness; train.seed, where given, sets it."""
    engine: Literal["tiny", "hf", "vllm"] = "hf"
    """Rollout engine: a batched decoder for tiny models, transformers, or vLLM."""
    task: str = ""
    """Built-in task instead of a data set: sort6, add2, copy6, one_step; empty: train.train_policy.dataset."""
    prompt_template: str = ""
    """Text round each prompt of a data set, in which {prompt} stands for it: worked examples, a chat's marks; empty: the prompt alone."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end an answer, as the model's end token does; they are part of it."""
    heldout_prompts: Positive = 256
    """Prompts never trained on that give the reward before and after."""
    reward_workers: Count = 1
    """Processes that score answers."""
    reward_seconds: Seconds = 10.0
    """Deadline of one score; past it the answer earns nothing and the worker is replaced."""
    shuffle_rewards: bool = False
    """Deal the rewards of a batch at random: the negative control, with which nothing may be learnt."""
    record_gradients: bool = False
    """Keep each committed step's reduced gradient beside the member's log, to replay and compare; never removed."""
    drill: str = ""
    """Faults to inflict: `kill:policy-1@20,stop:rollout-1@50`."""
    env: dict[str, dict[str, str]] = {}
    """Environment variables of a node's agent and of every member started there (`env.node-0.NAME = "value"`); `all`: of all members."""
    leases: LeaseSettings = LeaseSettings()
    """How long silence is borne."""
    budgets: BudgetSettings = BudgetSettings()
    """How often something is tried again."""
    snapshots: SnapshotSettings = SnapshotSettings()
    """How often state is kept, and where."""
    warm_start: WarmStartSettings = WarmStartSettings()
    """A short supervised start."""
    model: ModelSettings | None = None
    """A fresh model by its sizes; absent: policy.model_name_or_path is loaded."""
