"""What values say together: contradictions are refused, and what follows from other keys is changed and told."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimaster.settings import Resolved, SettingsError, load
from aimaster.settings.case import Case, changed, look
from aimaster.settings.job import JobSettings
from aimaster.settings.resolve import follow

GRPO = "train.train_policy"


def load_flags(flags: dict[str, str], *, gpus: int = 0) -> Resolved:
    return load(None, [f"--{key}={value}" for key, value in flags.items()], {}, gpus=gpus)


LOGPROBS, DECOUPLED = f"{GRPO}.use_rollout_logprobs_for_loss", f"{GRPO}.use_decoupled_loss"
PIPELINE = {"policy.parallelism.pp_size": "2", "policy.parallelism.pp_micro_batch_size": "4"}
CONTRADICTIONS: list[tuple[dict[str, str], str, dict[str, str]]] = [
    ({"train.async_tp_enabled": "true", "train.compile": "false"}, "train.async_tp_enabled", {"train.compile": "true"}),
    ({"policy.lora.r": "8", "policy.parallelism.tp_size": "2"}, "policy.lora", {"policy.parallelism.tp_size": "1"}),
    (
        {"policy.freeze_pattern": "[]", "policy.trainable_pattern": "[]"},
        "policy.trainable_pattern",
        {"policy.freeze_pattern": "none"},
    ),
    (
        {"train.train_batch_per_replica": "6", f"{GRPO}.mini_batch": "4"},
        "train.train_batch_per_replica",
        {f"{GRPO}.mini_batch": "3"},
    ),
    (
        {"policy.parallelism.dp_shard_size": "8"},
        "train.train_batch_per_replica",
        {"policy.parallelism.dp_shard_size": "4"},
    ),
    ({**PIPELINE, f"{GRPO}.mini_batch": "2"}, f"{GRPO}.mini_batch", {f"{GRPO}.mini_batch": "4"}),
    (
        {**PIPELINE, f"{GRPO}.mini_batch": "4", "train.fsdp_offload": "true"},
        "train.fsdp_offload",
        {"train.fsdp_offload": "false"},
    ),
    ({"train.ckpt.upload_s3": "final"}, "train.ckpt.upload_s3", {"train.ckpt.s3_bucket": "mine"}),
    ({"train.ckpt.upload_s3": "all"}, "train.ckpt.upload_s3", {"train.ckpt.upload_s3": "false"}),
    ({f"{GRPO}.reward_function": "[]"}, f"{GRPO}.reward_function", {f"{GRPO}.reward_function": "gsm8k"}),
    (
        {"validation.enable": "true", "validation.use_remote_reward": "true"},
        "validation.use_remote_reward",
        {f"{GRPO}.use_remote_reward": "true"},
    ),
    (
        {f"{GRPO}.on_policy": "true", "train.sync_weight_interval": "2"},
        f"{GRPO}.on_policy",
        {"train.sync_weight_interval": "1"},
    ),
    ({LOGPROBS: "true", DECOUPLED: "true"}, LOGPROBS, {LOGPROBS: "false"}),
    (
        {f"{GRPO}.uncentralized_training": "true", f"{GRPO}.variant": "dapo"},
        f"{GRPO}.uncentralized_training",
        {f"{GRPO}.variant": "grpo"},
    ),
    (
        {f"{GRPO}.type": "sft", f"{GRPO}.enable_dp_load_balancing": "true"},
        f"{GRPO}.enable_dp_load_balancing",
        {"train.max_num_steps": "9"},
    ),
    ({"aimaster.engine": "tiny"}, "aimaster.engine", {"aimaster.model.hidden_size": "64"}),
    ({"aimaster.engine": "hf", "aimaster.model.hidden_size": "64"}, "aimaster.engine", {"aimaster.engine": "tiny"}),
    (
        {"aimaster.model.hidden_size": "66"},
        "aimaster.model.hidden_size",
        {"aimaster.model.num_attention_heads": "3", "aimaster.model.num_key_value_heads": "1"},
    ),
    (
        {"aimaster.model.hidden_size": "64", "policy.model_max_length": "64"},
        "policy.model_max_length",
        {"aimaster.model.max_position_embeddings": "64"},
    ),
    ({"aimaster.placement.node-1": '["policy-0"]'}, "aimaster.placement", {"aimaster.nodes": "2"}),
    ({"aimaster.placement.node-0": '["policy-1"]'}, "aimaster.placement", {"policy.parallelism.n_init_replicas": "2"}),
    (
        {"aimaster.prompt_template": "Question:"},
        "aimaster.prompt_template",
        {"aimaster.prompt_template": "Q: {prompt}"},
    ),
    ({"aimaster.env.node-1.A": "b"}, "aimaster.env", {"aimaster.nodes": "2"}),
]


@pytest.mark.parametrize(("flags", "key", "cure"), CONTRADICTIONS)
def test_contradictions_are_refused(flags: dict[str, str], key: str, cure: dict[str, str]) -> None:
    """Keys that cannot stand together are refused, naming one of them; the cure that the message names is accepted."""
    with pytest.raises(SettingsError) as caught:
        load_flags(flags)
    assert [problem.key for problem in caught.value.problems] == [key]
    load_flags(flags | cure)


def test_lora_with_compile_is_refused_on_gpus() -> None:
    """GRPO with LoRA refuses compile where compile has an effect."""
    with pytest.raises(SettingsError, match="compile"):
        load_flags({"policy.lora.r": "8", "policy.parallelism.tp_size": "1"}, gpus=8)
    load_flags({"policy.lora.r": "8"}, gpus=0)


CHANGES: list[tuple[dict[str, str], str, Any]] = [
    ({f"{GRPO}.on_policy": "true"}, f"{GRPO}.allowed_outdated_steps", 0),
    ({"train.sync_weight_interval": "8"}, f"{GRPO}.allowed_outdated_steps", 7),
    ({"train.sync_weight_interval": "3"}, f"{GRPO}.allowed_outdated_steps", 4),
    ({f"{GRPO}.max_inflight_steps": "2"}, f"{GRPO}.max_inflight_steps", 5),
    ({f"{GRPO}.max_inflight_steps": "9"}, f"{GRPO}.max_inflight_steps", 9),
    ({f"{GRPO}.variant": "dapo"}, f"{GRPO}.outdated_rollout_fetch_batch_size", 128),
    (
        {f"{GRPO}.variant": "dapo", f"{GRPO}.outdated_rollout_fetch_batch_size": "3"},
        f"{GRPO}.outdated_rollout_fetch_batch_size",
        3,
    ),
    ({f"{GRPO}.use_decoupled_loss": "true"}, f"{GRPO}.collect_rollout_logprobs", True),
    ({f"{GRPO}.use_decoupled_loss": "true"}, f"{GRPO}.rollout_as_token_ids", True),
    ({f"{GRPO}.use_decoupled_loss": "true"}, f"{GRPO}.use_rollout_logprobs_for_loss", False),
    ({}, f"{GRPO}.use_rollout_logprobs_for_loss", True),
    ({}, f"{GRPO}.collect_rollout_logprobs", True),
    ({f"{GRPO}.use_rollout_logprobs_for_loss": "false"}, f"{GRPO}.use_rollout_logprobs_for_loss", False),
    ({f"{GRPO}.use_rollout_logprobs_for_loss": "false"}, f"{GRPO}.collect_rollout_logprobs", False),
    ({"distillation.enable": "true"}, f"{GRPO}.bypass_reward", True),
    ({"train.master_dtype": "bfloat16", "aimaster.device": "cuda"}, "train.transfer_dtype", "bfloat16"),
    ({"train.deterministic": "true"}, "train.seed", 42),
    ({"train.seed": "7"}, "aimaster.seed", 7),
    ({"train.seed": "7", "aimaster.seed": "8"}, "aimaster.seed", 8),
    ({"train.ckpt.save_freq": "30"}, "aimaster.snapshots.flush_every", 30),
    ({"train.ckpt.save_freq": "30", "aimaster.snapshots.flush_every": "4"}, "aimaster.snapshots.flush_every", 4),
    ({"train.ckpt.max_keep": "-1"}, "aimaster.snapshots.keep", -1),
    ({}, "policy.parallelism.tp_size", 1),
    ({"aimaster.model.max_position_embeddings": "48"}, "policy.model_max_length", 48),
    ({"aimaster.model.hidden_size": "64"}, "aimaster.engine", "tiny"),
]


@pytest.mark.parametrize(("flags", "key", "value"), CHANGES)
def test_what_follows_is_set_and_told(flags: dict[str, str], key: str, value: Any) -> None:
    """A value that follows from others is set, and its origin says what it follows from; a given one stands."""
    resolved = load_flags(flags)
    assert look(resolved.job, key) == value
    if value != look(JobSettings(), key) and key not in flags:
        assert resolved.origins[key]
        assert not resolved.origins[key].startswith("flag")


def test_gpus_keep_two_tensor_parallel_ranks() -> None:
    """Cosmos-RL's default of two tensor-parallel ranks stands where GPUs are."""
    assert load_flags({}, gpus=4).job.policy.parallelism.tp_size == 2


def test_aipo_alone_is_warned_of() -> None:
    """A cap on a ratio that is always 1 is warned of; with the correction on it is not."""
    off = {f"{GRPO}.aipo_rho": "2.0", f"{GRPO}.use_rollout_logprobs_for_loss": "false"}
    assert [warning.key for warning in load_flags(off).warnings] == [f"{GRPO}.aipo_rho"]
    assert load_flags({f"{GRPO}.aipo_rho": "2.0"}).warnings == ()


@pytest.mark.parametrize(
    ("keys", "type_name"),
    [
        (f"{GRPO}.kl_beta = 0.1", "GrpoSettings"),
        (f'{GRPO}.conversation_column_name = "chat"', "SftSettings"),
        (f"{GRPO}.mini_batch = 2", "GrpoSettings"),
    ],
)
def test_a_missing_type_is_told_by_the_keys(tmp_path: Path, keys: str, type_name: str) -> None:
    """Without `type`, the block is GRPO or SFT as the keys beside it tell, and a note says so."""
    path = tmp_path / "job.toml"
    path.write_text(keys, encoding="utf-8")
    resolved = load(path, [], {}, gpus=0)
    assert type(resolved.job.train.train_policy).__name__ == type_name
    assert any(note.key == f"{GRPO}.type" for note in resolved.notes)


def test_a_wrong_type_names_the_choices() -> None:
    """An unknown `type` is refused with the known ones."""
    with pytest.raises(SettingsError, match='is "ppo"; write one of grpo, sft'):
        load_flags({f"{GRPO}.type": "ppo"})


@given(
    interval=st.integers(1, 9),
    outdated=st.integers(0, 9),
    inflight=st.none() | st.integers(0, 9),
    variant=st.sampled_from(["grpo", "dapo", "gspo"]),
    temperatures=st.tuples(st.sampled_from([0.5, 1.0]), st.sampled_from([0.5, 1.0])),
    flags=st.lists(st.booleans(), min_size=5, max_size=5),
    gpus=st.sampled_from([0, 8]),
)
def test_following_twice_changes_nothing_more(
    interval: int,
    outdated: int,
    inflight: int | None,
    variant: str,
    temperatures: tuple[float, float],
    flags: list[bool],
    gpus: int,
) -> None:
    """The rules are ordered so that one pass is enough: what a first pass gave, a second leaves as it is."""
    values = {
        "train.sync_weight_interval": interval,
        f"{GRPO}.allowed_outdated_steps": outdated,
        f"{GRPO}.max_inflight_steps": inflight,
        f"{GRPO}.variant": variant,
        f"{GRPO}.temperature": temperatures[0],
        "rollout.sampling_config.temperature": temperatures[1],
        f"{GRPO}.on_policy": flags[0],
        f"{GRPO}.use_decoupled_loss": flags[1],
        f"{GRPO}.use_rollout_logprobs_for_loss": flags[2],
        "distillation.enable": flags[3],
        "train.deterministic": flags[4],
    }
    job = JobSettings()
    for key, value in values.items():
        job = changed(job, key, value)
    once, _ = follow(Case(job=job, sources=frozenset(), origins={}, gpus=gpus))
    twice, _ = follow(once)
    assert twice.job == once.job
