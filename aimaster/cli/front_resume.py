"""Whether a run may go on with the configuration of this start: what it was begun with is in RUN/resolved.json.

MAY_CHANGE   keys about where, how long and how carefully: told, and taken over
all others   decide the model, the data or what the ledger's batches mean: refused before anything starts, with both values
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from aimaster.cli.exits import UsageError
from aimaster.settings import JobSettings, from_json
from aimaster.settings.render import FREE_TABLES, mask_secrets
from aimaster.wire.places import RunPlaces

MAY_CHANGE: Final = frozenset(
    {
        "aimaster.budgets",
        "aimaster.device",
        "aimaster.drill",
        "aimaster.engine",
        "aimaster.env",
        "aimaster.heldout_prompts",
        "aimaster.host",
        "aimaster.leases",
        "aimaster.nodes",
        "aimaster.placement",
        "aimaster.record_gradients",
        "aimaster.reward_seconds",
        "aimaster.reward_workers",
        "aimaster.snapshots.copies",
        "aimaster.snapshots.copy_mib_per_second",
        "aimaster.snapshots.flush_every",
        "aimaster.snapshots.keep",
        "aimaster.snapshots.keep_every",
        "aimaster.snapshots.replicate_every",
        "aimaster.snapshots.save_every",
        "eth_ips",
        "logging",
        "profiler",
        "redis",
        "rollout.async_config",
        "rollout.batch_size",
        "rollout.enable_chunked_prefill",
        "rollout.enforce_eager",
        "rollout.gpu_memory_utilization",
        "rollout.parallelism",
        "rollout.vllm_use_flashinfer",
        "train.ckpt",
        "train.epoch",
        "train.max_num_steps",
        "train.output_dir",
        "train.resume",
        "train.timestamp",
        "train.train_policy.allowed_outdated_steps",
        "validation",
    }
)
"""Keys and whole tables."""


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """A key whose value is not what it was."""

    key: str
    old: str
    new: str

    @property
    def may(self) -> bool:
        parts = self.key.split(".")
        return any(".".join(parts[:length]) in MAY_CHANGE for length in range(1, len(parts) + 1))

    def __str__(self) -> str:
        return f"{self.key}: {self.old} then, {self.new} now"


def check_resume(places: RunPlaces, job: JobSettings) -> list[str]:
    """What changed and may, in words; UsageError names all that may not. Where no ledger was begun, nothing depends on old values."""
    if not places.ledger.exists():
        return []
    try:
        kept = from_json(places.resolved.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"{places.resolved} cannot be read: {error}. It tells what the run was begun with; name another --run-dir."
        ) from error
    changes = list(changed(kept, job))
    refused = [str(change) for change in changes if not change.may]
    if refused:
        lines = "\n  ".join(refused)
        raise UsageError(
            f"the run in {places.run} was begun with another configuration, and goes on only as it was begun:\n  {lines}\n"
            "Use the old values to go on, or begin a new run with another --run-dir. Nothing was started or changed."
        )
    return [str(change) for change in changes]


def changed(old: JobSettings, new: JobSettings) -> Iterator[Changed]:
    """Every key with two values, in order of name; a secret's are hidden."""
    before, now = (dict(leaves(msgspec.to_builtins(job))) for job in (old, new))
    for key in sorted(before.keys() | now.keys()):
        if before.get(key) != now.get(key):
            yield Changed(key=key, old=_shown(key, before), new=_shown(key, now))


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of all that is set."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + str(name), value


def _shown(key: str, values: Mapping[str, Any]) -> str:
    if key not in values:
        return "unset"
    table, _, name = key.rpartition(".")
    free = any(table == one or table.startswith(f"{one}.") for one in FREE_TABLES)
    return msgspec.json.encode(mask_secrets({name: values[key]}, free=free)[name]).decode()
