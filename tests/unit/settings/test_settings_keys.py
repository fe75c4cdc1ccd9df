"""Every key of Cosmos-RL is known with its type and default; every misspelling is refused with the nearest name."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aimaster.settings import JobSettings, SettingsError, load
from aimaster.settings.case import changed, look
from aimaster.settings.check import known_keys
from aimaster.settings.policy import LoraSettings
from aimaster.settings.toml_text import toml_value
from aimaster.settings.train_policy import RemoteRewardSettings, SftSettings

Load = Callable[..., Any]
NESTED_BY_CHOICE = {
    "policy.lora": LoraSettings(),
    "policy.diffusers.lora": LoraSettings(),
    "validation.remote_reward": RemoteRewardSettings(),
}
KEYS = [
    line.split("\t") for line in (Path(__file__).parents[2] / "data" / "cosmos-keys.tsv").read_text().splitlines()[1:]
]
GRPO_KEYS = [(key, hint, default) for key, hint, default in KEYS if not key.startswith("SFT.")]
SFT_KEYS = [
    (key.replace("SFT", "train.train_policy"), hint, default) for key, hint, default in KEYS if key.startswith("SFT.")
]


def everything(*, sft: bool = False) -> JobSettings:
    job = JobSettings()
    for key, table in NESTED_BY_CHOICE.items():
        job = changed(job, key, table)
    return changed(job, "train.train_policy", SftSettings()) if sft else job


def document(values: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {toml_value(value)}" for key, value in values.items())


def load_text(folder: Path, text: str) -> Any:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, [], {}, gpus=64)


def as_ours(default: Any) -> Any:
    return tuple(default) if isinstance(default, list) else default


@pytest.mark.parametrize("sft", [False, True])
def test_every_key_has_the_default_of_cosmos_rl(sft: bool) -> None:
    """A key that is not given has Cosmos-RL's default; names of rewards and splits are held as maps and lists."""
    job = everything(sft=sft)
    spelled = {"reward_function": {"single_choice": 1.0}, "split": (), "filter_reward_metric": ()}
    for key, _, default in SFT_KEYS if sft else GRPO_KEYS:
        name = key.rsplit(".", 1)[-1]
        if name == "type":
            continue
        expected = as_ours(ast.literal_eval(default))
        if key == "validation.reward_function":
            expected = {}
        elif name in spelled:
            expected = spelled[name]
        assert look(job, key) == expected, key


@pytest.mark.parametrize("sft", [False, True])
def test_every_key_is_accepted(tmp_path: Path, sft: bool) -> None:
    """A file that gives every key its default loads without a warning about any, and each value's origin is the file."""
    values = {
        key: ast.literal_eval(default)
        for key, _, default in (SFT_KEYS if sft else GRPO_KEYS)
        if default != "(required)"
    }
    values = {key: value for key, value in values.items() if value is not None and not key.endswith(".type")}
    values["train.train_policy.type"] = "sft" if sft else "grpo"
    values |= {
        "custom": {"mine": 1},
        "train.compile": False,
        "policy.parallelism.tp_size": 1,
    }  # as GRPO with LoRA must have them
    resolved = load_text(tmp_path, document(values))
    assert resolved.warnings == ()
    changed_by_rules = {key for key, origin in resolved.origins.items() if "job.toml" not in origin}
    assert not changed_by_rules & set(values)
    assert set(values) <= set(resolved.origins)


@pytest.mark.parametrize("sft", [False, True])
def test_every_wrong_type_is_found_in_one_go(tmp_path: Path, sft: bool) -> None:
    """A date fits no key: a file that gives one to every key is refused with one problem for each, naming file and key."""
    keys = [key for key, _, _ in (SFT_KEYS if sft else GRPO_KEYS) if not key.endswith(".type") and key != "custom"]
    text = "\n".join(f"{key} = 1979-05-27" for key in keys)
    with pytest.raises(SettingsError) as caught:
        load_text(tmp_path, f'train.train_policy.type = "{"sft" if sft else "grpo"}"\n{text}')
    assert sorted(problem.key for problem in caught.value.problems) == sorted(keys)
    assert {problem.where for problem in caught.value.problems} == {str(tmp_path / "job.toml")}


def slip(key: str) -> str:
    table, _, name = key.rpartition(".")
    middle = len(name) // 2
    slipped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    slipped = slipped if slipped != name else name + name[-1]
    return f"{table}.{slipped}" if table else slipped


def test_every_misspelling_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    """Two letters swapped in every key of a file: each is refused in one go, and each message names a key of its table."""
    keys = [
        key
        for key in known_keys()
        if not key.startswith("train.train_policy.") or key.startswith("train.train_policy.dataset.")
    ]
    slips = {slip(key): key for key in keys if len(key.rsplit(".", 1)[-1]) > 3}
    with pytest.raises(SettingsError) as caught:
        load_text(tmp_path, "\n".join(f"{key} = 1" for key in slips))
    named = {problem.key: problem.text for problem in caught.value.problems}
    assert set(named) == set(slips)
    exact = [key for key, meant in slips.items() if named[key] == f"unknown key; did you mean {meant}?"]
    assert len(exact) >= 0.98 * len(slips), [named[key] for key in slips if key not in exact]


def test_the_typo_of_the_readme(tmp_path: Path) -> None:
    """`n_generatoin` is refused with file, key path and the name that was meant."""
    with pytest.raises(SettingsError) as caught:
        load_text(tmp_path, "[rollout]\nn_generatoin = 8\n")
    expected = f"{tmp_path / 'job.toml'}: rollout.n_generatoin: unknown key; did you mean rollout.n_generation?"
    assert str(caught.value) == expected


def test_a_key_in_the_wrong_table_is_sent_to_its_own(tmp_path: Path) -> None:
    """A known key under another table is refused with the path where it belongs."""
    with pytest.raises(SettingsError, match=r"policy\.optm_lr: unknown key; did you mean train\.optm_lr\?"):
        load_text(tmp_path, "policy.optm_lr = 1e-6")


def test_a_key_that_resembles_nothing_is_refused_all_the_same(tmp_path: Path) -> None:
    """Where no name is near, the key is refused without a guess."""
    with pytest.raises(SettingsError, match=r"train\.zzzzqqqq: unknown key$"):
        load_text(tmp_path, "train.zzzzqqqq = 1")


def test_a_table_is_not_a_value(tmp_path: Path) -> None:
    """A value where a table belongs, and a table where a value belongs, are refused."""
    with pytest.raises(SettingsError) as caught:
        load_text(tmp_path, "train = 3\n[rollout.n_generation]\nvalue = 8\n")
    assert {problem.key for problem in caught.value.problems} == {"train", "rollout.n_generation"}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("rollout.n_generation = 0", "rollout.n_generation"),
        ("train.train_batch_per_replica = -8", "train.train_batch_per_replica"),
        ("rollout.gpu_memory_utilization = 1.5", "rollout.gpu_memory_utilization"),
        ("aimaster.leases.group_timeout_seconds = 0", "aimaster.leases.group_timeout_seconds"),
        ('train.param_dtype = "bf16"', "train.param_dtype"),
        ('train.train_policy.variant = "ppo"', "train.train_policy.variant"),
        ("policy.parallelism.dp_replicate_size = 2", "policy.parallelism.dp_replicate_size"),
    ],
)
def test_values_without_meaning_are_refused(tmp_path: Path, text: str, key: str) -> None:
    """A value of the right type outside its range or choice is refused, and the message says what is allowed."""
    with pytest.raises(SettingsError) as caught:
        load_text(tmp_path, text)
    (problem,) = caught.value.problems
    assert problem.key == key
    assert any(word in problem.text for word in (">", "<", "write one of", "invalid enum value"))


def test_records_are_frozen() -> None:
    """A configuration does not change under those who read it."""
    job = JobSettings()
    with pytest.raises(AttributeError):
        job.train.epoch = 2  # type: ignore[misc]
    assert msgspec.json.decode(msgspec.json.encode(job), type=JobSettings) == job
