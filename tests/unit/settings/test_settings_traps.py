"""The traps of a public sample configuration, each accepted or refused as its author would want, and said."""

from pathlib import Path

import pytest

from aimaster.settings import GrpoSettings, Resolved, SettingsError, load

GRPO = "train.train_policy"


def load_text(folder: Path, text: str, *, gpus: int = 0) -> Resolved:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, [], {}, gpus=gpus)


def grpo_of(resolved: Resolved) -> GrpoSettings:
    policy = resolved.job.train.train_policy
    assert isinstance(policy, GrpoSettings)
    return policy


@pytest.fixture
def sample(data: Path) -> Resolved:
    return load(data / "pai-sample.toml", [], {}, gpus=0)


def test_the_sample_passes_with_one_warning_for_each_oddity(sample: Resolved) -> None:
    """The sample is accepted as it stands: one warning for each legacy key and one for resume, and no other."""
    assert sorted(warning.key for warning in sample.warnings) == [
        "policy.parallelism.cp_rotate_method",
        "rollout.parallelism.cp_rotate_method",
        "train.resume",
    ]
    assert sample.legacy == {
        "policy.parallelism.cp_rotate_method": "allgather",
        "rollout.parallelism.cp_rotate_method": "allgather",
    }
    assert {obstacle.key for obstacle in sample.obstacles} == {
        f"{GRPO}.dataset.name",
        "policy.model_name_or_path",
        "policy.parallelism",
        "rollout.parallelism",
    }


def test_every_key_of_the_sample_has_the_file_as_its_origin(sample: Resolved) -> None:
    """All 64 known keys are told to come from the file, also where a rule then changed the value."""
    assert sum("pai-sample.toml" in origin for origin in sample.origins.values()) == 64


@pytest.mark.parametrize("word", ["flase", "False", "fals", "falsee", "no", "off", "0", "FALSE"])
def test_a_near_miss_of_false_is_false(tmp_path: Path, word: str) -> None:
    """T1: a string one slip away from false is false, with exactly one warning that says how to write it."""
    resolved = load_text(tmp_path, f'train.resume = "{word}"')
    assert resolved.job.train.resume is False
    (warning,) = resolved.warnings
    assert warning.key == "train.resume"
    assert "write false without quotes" in warning.text


@pytest.mark.parametrize("word", ["true", "True", "ture", "tru", "yes", "on", "1"])
def test_a_near_miss_of_true_is_true(tmp_path: Path, word: str) -> None:
    """T2: "true" as a string resumes."""
    resolved = load_text(tmp_path, f'train.resume = "{word}"')
    assert resolved.job.train.resume is True
    assert len(resolved.warnings) == 1


def test_an_existing_path_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1: an existing path is resumed from, even one whose name is a near-miss; the path is kept as written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flase" / "policy" / "l000-s000000020-e001").mkdir(parents=True)
    (tmp_path / "flase" / "policy" / "l000-s000000020-e001" / "manifest.json").write_text("{}")
    resolved = load_text(tmp_path, 'train.resume = "flase"')
    assert resolved.job.train.resume == "flase"
    assert resolved.warnings == ()
    assert "train.resume" not in {obstacle.key for obstacle in resolved.obstacles}


def test_a_missing_path_stops_a_run(tmp_path: Path) -> None:
    """T1: a path that is not there and is no near-miss is kept for a dry run and stops a run."""
    resolved = load_text(tmp_path, 'train.resume = "/nowhere/step_20"')
    assert resolved.job.train.resume == "/nowhere/step_20"
    (obstacle,) = [o for o in resolved.obstacles if o.key == "train.resume"]
    assert "neither true, false nor an existing path" in obstacle.text


def test_a_path_without_a_checkpoint_stops_a_run(tmp_path: Path) -> None:
    """A folder in which no checkpoint lies is told at once, not by the member that would read it."""
    (obstacle,) = [o for o in load_text(tmp_path, f'train.resume = "{tmp_path}"').obstacles if o.key == "train.resume"]
    assert "holds no checkpoint" in obstacle.text


@pytest.mark.parametrize(
    "key", ["train.compile", "rollout.enforce_eager", "logging.report_mfu", "aimaster.shuffle_rewards"]
)
def test_any_boolean_is_read_kindly(tmp_path: Path, key: str) -> None:
    """A near-miss of a boolean is accepted for every boolean key, with one warning; another string is refused."""
    resolved = load_text(tmp_path, f'{key} = "flase"')
    assert [warning.key for warning in resolved.warnings] == [key]
    with pytest.raises(SettingsError, match=key):
        load_text(tmp_path, f'{key} = "perhaps"')


@pytest.mark.parametrize(
    ("text", "trainer", "sampler", "warned"),
    [
        ("", 1.0, 1.0, False),
        (f"{GRPO}.temperature = 0.9", 0.9, 0.9, False),
        ("rollout.sampling_config.temperature = 0.8", 0.8, 0.8, False),
        (f"{GRPO}.temperature = 0.9\nrollout.sampling_config.temperature = 0.9", 0.9, 0.9, False),
        (f"{GRPO}.temperature = 0.9\nrollout.sampling_config.temperature = 1.0", 0.9, 1.0, True),
    ],
)
def test_one_temperature_serves_both(
    tmp_path: Path, text: str, trainer: float, sampler: float, *, warned: bool
) -> None:
    """T3: one given temperature is that of trainer and sampler; two that differ are kept, with a warning."""
    resolved = load_text(tmp_path, text)
    assert grpo_of(resolved).temperature == trainer
    assert resolved.job.rollout.sampling_config.temperature == sampler
    assert bool(resolved.warnings) is warned


def test_greedy_sampling_is_no_training(tmp_path: Path) -> None:
    """T3: a sampler at temperature 0 cannot be trained from."""
    with pytest.raises(SettingsError, match="greedy"):
        load_text(tmp_path, "rollout.sampling_config.temperature = 0")


@pytest.mark.parametrize(
    "key",
    [
        "policy.parallelism.cp_rotate_method",
        "rollout.parallelism.cp_rotate_method",
        "train.enable_validation",
        "train.validation_step",
        "train.validation_batch_per_replica",
        "rollout.val_batch_size",
    ],
)
def test_legacy_keys_are_accepted_and_kept(tmp_path: Path, key: str) -> None:
    """T4: a key that Cosmos-RL once had is accepted whatever its value, kept beside the configuration, warned of once."""
    resolved = load_text(tmp_path, f"{key} = 4")
    assert resolved.legacy == {key: 4}
    assert [warning.key for warning in resolved.warnings] == [key]


def test_the_old_default_of_dp_shard_size(tmp_path: Path) -> None:
    """T4: -1, the default of mid-2025, is read as today's 1, with one warning."""
    resolved = load_text(tmp_path, "policy.parallelism.dp_shard_size = -1")
    assert resolved.job.policy.parallelism.dp_shard_size == 1
    assert len(resolved.warnings) == 1


def test_dapo_says_what_it_turns_on(sample: Resolved) -> None:
    """T5: dapo drops groups without spread and raises the fetch size; what it does not turn on is said as well."""
    assert grpo_of(sample).outdated_rollout_fetch_batch_size == 128
    assert sample.origins[f"{GRPO}.outdated_rollout_fetch_batch_size"] == f"follows {GRPO}.variant = dapo"
    (note,) = [note for note in sample.notes if note.key == f"{GRPO}.variant"]
    assert "dropped; no clip-higher, no length penalty" in note.text


def test_names_stand_for_lists_and_maps(sample: Resolved, tmp_path: Path) -> None:
    """T6, T7: a reward's name is a map of weight 1, a list of names a map of ones, a split's name a list of one."""
    assert grpo_of(sample).reward_function == {"gsm8k": 1.0}
    assert grpo_of(sample).dataset.split == ("train",)
    several = grpo_of(load_text(tmp_path, f'{GRPO}.reward_function = ["gsm8k", "format"]'))
    assert several.reward_function == {"gsm8k": 1.0, "format": 1.0}
    weighted = grpo_of(load_text(tmp_path, f"{GRPO}.reward_function = {{gsm8k = 0.9, format = 0.1}}"))
    assert weighted.reward_function == {"gsm8k": 0.9, "format": 0.1}


def test_the_redis_port_is_kept_and_said_to_be_unused(sample: Resolved) -> None:
    """T8: the quoted port is accepted, and a note says that it is not used."""
    assert sample.job.redis == "12800"
    assert any(note.key == "redis" and "not used" in note.text for note in sample.notes)


def test_the_room_for_an_answer_is_said(sample: Resolved) -> None:
    """T9: where the whole context is no longer than the answer may be, the real room is told."""
    assert any(note.key == "policy.model_max_length" and "1024 − prompt" in note.text for note in sample.notes)


def test_gpu_keys_are_no_ops_on_a_cpu(sample: Resolved, data: Path) -> None:
    """T10: each key that means nothing on a CPU is accepted with one line, and with none where GPUs are."""
    said = [note.key for note in sample.notes if note.text == "no effect on a CPU"]
    assert {"train.optm_impl", "train.compile", "train.async_tp_enabled", "rollout.quantization"} <= set(said)
    assert len(said) == len(set(said))
    with_gpus = load(data / "pai-sample.toml", [], {}, gpus=16)
    assert not any(note.text == "no effect on a CPU" for note in with_gpus.notes)
    assert with_gpus.job.train.param_dtype == "bfloat16"


def test_bfloat16_is_float32_on_a_cpu(sample: Resolved) -> None:
    """T10: parameters are float32 on a CPU, and the origin says what was given."""
    assert sample.job.train.param_dtype == "float32"
    assert "gave bfloat16" in sample.origins["train.param_dtype"]


def test_batches_and_groups(sample: Resolved) -> None:
    """T11, T12, T13: 24 groups of 16 a step and replica, shared prefixes masked, saved asynchronously every 30 steps, 5 kept."""
    job = sample.job
    assert job.train.train_batch_per_replica // job.rollout.n_generation == 24
    assert grpo_of(sample).mini_batch == 4
    assert grpo_of(sample).min_filter_prefix_tokens == 1
    assert (job.train.ckpt.save_mode, job.aimaster.snapshots.flush_every, job.aimaster.snapshots.keep) == (
        "async",
        30,
        5,
    )


@pytest.mark.parametrize(("gpus", "fits"), [(0, False), (1, False), (8, False), (11, False), (12, True)])
def test_too_few_devices_are_told_with_the_sum(data: Path, gpus: int, *, fits: bool) -> None:
    """T14: a job that needs more GPUs than are here is told so early, with the sum."""
    resolved = load(data / "pai-sample.toml", [], {}, gpus=gpus)
    devices = [o for o in resolved.obstacles if o.key.endswith(("parallelism", "device"))]
    assert (not devices) is fits
    if gpus and not fits:
        assert devices[0].text == f"12 GPUs are needed (policy 1 × 8, rollout 1 × 4), {gpus} are here"


def test_only_the_console_logs(sample: Resolved) -> None:
    """T15: the list of loggers is kept as given."""
    assert sample.job.logging.logger == ("console",)
