"""The table `parallelism` of [policy], [rollout] and [distillation]: replicas and the mesh inside one."""

from typing import Literal

from aimaster.settings.table import Count, Positive, Table


class ParallelismSettings(Table, frozen=True, kw_only=True):
    """How many members, and how many ranks in which mesh each has."""

    n_init_replicas: Count = 1
    """Replicas to wait for before starting; later ones are dynamic."""
    tp_size: Count = 2
    """Tensor parallel."""
    cp_size: Count = 1
    """Context parallel."""
    ep_size: Count = 1
    """Expert parallel."""
    dp_shard_size: Count = 1
    """FSDP shard."""
    pp_size: Count = 1
    """Pipeline."""
    pp_dynamic_shape: bool = False
    """Variable PP shapes."""
    pp_micro_batch_size: Positive = 1
    """PP micro-batch."""
    dp_replicate_size: Literal[1] = 1
    """In-replica DDP; must be 1 for GRPO."""
    pp_schedule: Literal["1F1B", "GPipe", "Interleaved1F1B"] = "Interleaved1F1B"
    """PP schedule."""
    pp_layers_per_stage: Positive = 2
    """Layers per virtual stage."""
