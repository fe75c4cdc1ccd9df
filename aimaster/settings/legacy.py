"""Keys that Cosmos-RL once had and now ignores: accepted, kept beside the configuration, one warning each."""

from collections.abc import Sequence

LEGACY = {
    "train.enable_validation": "has no effect since mid-2025; use validation.enable",
    "train.validation_step": "has no effect since mid-2025; use validation.freq",
    "train.validation_batch_per_replica": "has no effect since mid-2025; use validation.batch_size",
    "rollout.val_batch_size": "has no effect since mid-2025; use validation.batch_size",
    "*.parallelism.cp_rotate_method": "has no effect since mid-2025; leave it out",
}


def legacy_text(path: Sequence[str]) -> str | None:
    """What to say of a legacy key; None where the key is not one."""
    return LEGACY.get(".".join(path)) or LEGACY.get(".".join(["*", *path[1:]]))
