"""What would stop a well-formed job here is found before anything starts: a dry run warns, a run refuses."""

from pathlib import Path

import pytest

from aimaster.settings import load
from aimaster.settings.effects import REFUSED
from aimaster.settings.obstacles import REWARD_GROUP, REWARDS
from aimaster.settings.resolve import count_gpus

GRPO = "train.train_policy"


def texts(*flags: str, gpus: int = 0) -> dict[str, str]:
    resolved = load(None, flags, {}, gpus=gpus)
    return {obstacle.key: obstacle.text for obstacle in resolved.obstacles}


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_the_examples_have_none_of_their_own(root: Path, name: str) -> None:
    """The shipped examples are well-formed: no warning, and nothing absent but the model that `make model` makes."""
    resolved = load(root / "examples" / f"{name}.toml", [], {}, gpus=0)
    assert resolved.warnings == ()
    assert {obstacle.key for obstacle in resolved.obstacles} <= {"policy.model_name_or_path"}
    assert all("`make model` makes it" in obstacle.text for obstacle in resolved.obstacles)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "is not here"),
        ([], "no config.json"),
        (["config.json"], "holds no weights"),
        (["config.json", "pytorch_model.bin"], None),
        (["config.json", "model.safetensors.index.json"], "holds no weights"),
        (["config.json", "model.safetensors"], "is no safetensors file, or only its beginning"),
    ],
)
def test_a_model_folder_needs_a_config_and_weights(tmp_path: Path, files: list[str] | None, said: str | None) -> None:
    """A model folder that is absent, or lacks its config or weights, is told by what it lacks."""
    folder = tmp_path / "model"
    if files is not None:
        folder.mkdir()
        for name in files:
            (folder / name).write_text('{"model_type": "llama"}', encoding="utf-8")
    text = texts("--policy.model_name_or_path", str(folder)).get("policy.model_name_or_path")
    assert (text is None) if said is None else (text is not None and said in text)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (b"", "is no JSON"),
        (b"\x00\x01 garbage", "is no JSON"),
        (b'{"model_type": ', "is no JSON"),
        (b"[]", "names no model_type"),
        (b'{"hidden_size": 64}', "names no model_type"),
        (b'{"model_type": 3}', "names no model_type"),
    ],
)
def test_a_config_that_is_none_is_told(tmp_path: Path, config: bytes, said: str) -> None:
    """A config.json that is no JSON, or of no model, is told with its path before a member would fail on it."""
    (tmp_path / "config.json").write_bytes(config)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    text = texts("--policy.model_name_or_path", str(tmp_path))["policy.model_name_or_path"]
    assert text.startswith(f"{tmp_path / 'config.json'} {said}")


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (0, "is empty"),
        (4, "only its beginning"),
        (12, "only its beginning"),
        (-1, "bytes"),
        (None, None),
    ],
)
def test_weights_that_were_not_copied_whole_are_told(tmp_path: Path, cut: int | None, said: str | None) -> None:
    """By their sizes and headers alone, before a member would fail on them."""
    header = b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    whole = len(header).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(whole[:cut])
    text = texts("--policy.model_name_or_path", str(tmp_path)).get("policy.model_name_or_path")
    assert (text is None) if said is None else (text is not None and said in text)


def test_a_shard_that_the_index_names_has_to_be_there(tmp_path: Path) -> None:
    """A model of several files is whole when all of them are."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    (tmp_path / "a.bin").write_bytes(b"weights")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"x": "a.bin", "y": "b.bin"}}', encoding="utf-8")
    assert "lacks b.bin" in texts("--policy.model_name_or_path", str(tmp_path))["policy.model_name_or_path"]


def test_rows_need_the_named_columns(tmp_path: Path) -> None:
    """A data set that is absent, empty, or lacks a named column is told, with the columns it has."""
    flags = (
        "--train.train_policy.prompt_column_name",
        "question",
        "--train.train_policy.response_column_name",
        "answr",
    )
    name = f"{GRPO}.dataset.name"
    folder = tmp_path / "rows"
    assert "is not here" in texts(*flags, f"--{name}", str(folder))[name]
    folder.mkdir()
    assert "neither JSONL nor Parquet" in texts(*flags, f"--{name}", str(folder))[name]
    (folder / "train.jsonl").write_text('{"question": "1+1", "answer": "2"}\n', encoding="utf-8")
    found = texts(*flags, f"--{name}", str(folder))
    assert name not in found
    assert f"{GRPO}.prompt_column_name" not in found
    assert "which has answer, question" in found[f"{GRPO}.response_column_name"]


def test_a_split_needs_a_file(tmp_path: Path) -> None:
    """A split that no file of the data set is named after is told, with those that there are."""
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1+1", "answer": "2"}\n', encoding="utf-8")
    flags = ("--train.train_policy.prompt_column_name", "question", f"--{GRPO}.dataset.name", str(tmp_path))
    assert f"{GRPO}.dataset.split" not in texts(*flags, f"--{GRPO}.dataset.split", "train")
    said = texts(*flags, f"--{GRPO}.dataset.split", "validation")[f"{GRPO}.dataset.split"]
    assert said.endswith("holds no validation; it holds test, train")


def test_a_task_needs_no_data_set() -> None:
    """A built-in task stands for a data set; without either, both are named."""
    assert f"{GRPO}.dataset.name" not in texts("--aimaster.task", "sort6")
    assert "aimaster.task" in texts()[f"{GRPO}.dataset.name"]


OTHERWISE = {
    "mode": "colocated",
    "policy.lora.r": "4",
    "policy.trainable_map": "{lm_head = true}",
    "policy.freeze_pattern": '["embed"]',
    "policy.trainable_pattern": '["head"]',
    "rollout.sampling_config.top_p": "0.9",
    "rollout.sampling_config.top_k": "5",
    "rollout.sampling_config.repetition_penalty": "1.1",
    f"{GRPO}.algo": "mine",
    f"{GRPO}.trainer_type": "mine",
    f"{GRPO}.kl_beta": "0.1",
    f"{GRPO}.mu_iterations": "2",
    f"{GRPO}.batch_size_per_optimize": "4",
    f"{GRPO}.positive_nll_coef": "0.1",
    f"{GRPO}.entropy_coeff": "0.1",
    f"{GRPO}.off_policy_masking_delta": "0.1",
    f"{GRPO}.reference_reset_interval": "5",
}
"""A value for each refused key that is no boolean."""


@pytest.mark.parametrize("key", REFUSED)
def test_another_algorithm_is_refused_not_half_done(key: str) -> None:
    """A key that would change what is learnt, and is not done here, stops a run; it is never taken in silence."""
    name = "policy.lora.r" if key == "policy.lora" else key
    obstacles = texts(f"--{name}", OTHERWISE.get(name, "true"))
    assert "not done by this runtime" in obstacles[key]
    assert key not in texts()


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        (("--train.train_policy.type", "sft"), f"{GRPO}.type"),
        (("--aimaster.engine", "vllm"), "aimaster.engine"),
        (("--train.train_batch_per_replica", "10", "--rollout.n_generation", "4"), "train.train_batch_per_replica"),
        (("--train.train_policy.reward_function", "gms8k"), f"{GRPO}.reward_function"),
        (("--train.optm_lr", "[1e-5, 1e-6]"), "train.optm_lr"),
        (("--train.optm_lr", "{lm_head = 1e-5}"), "train.optm_lr"),
        (("--train.optm_name", '["AdamW", "Adam"]'), "train.optm_name"),
    ],
)
def test_what_this_runtime_does_not_do_is_told(flags: tuple[str, ...], key: str) -> None:
    """A job that is well-formed and that this runtime cannot do is told so before it starts, never half done."""
    assert key in texts(*flags)


@pytest.mark.parametrize(("visible", "most"), [("", 0), ("-1", 0), ("0", 1), ("0,1", 2)])
def test_hidden_devices_do_not_count(visible: str, most: int) -> None:
    """CUDA_VISIBLE_DEVICES hides devices."""
    assert count_gpus({"CUDA_VISIBLE_DEVICES": visible}) <= most


def test_the_rewards_are_those_of_the_runtime() -> None:
    """The names that settings accept are those that the runtime has, its own entry points' group included."""
    desk = pytest.importorskip("rl_runtime.rewards.desk")
    assert set(REWARDS) == {*desk.QUICK, *desk.MATHS}
    assert desk.ENTRY_POINTS == REWARD_GROUP


def test_a_users_own_reward_is_no_obstacle() -> None:
    """`module:function` is the user's own and is looked for where it is used."""
    assert f"{GRPO}.reward_function" not in texts("--train.train_policy.reward_function", "mine:score")


@pytest.mark.parametrize(
    "task", ["sort6", "sort12", "add2", "copy6", "one_step", "onestep", "sort", "sort0", "sort123", "sum2", "Sort6", ""]
)
def test_the_tasks_are_those_of_the_runtime(task: str) -> None:
    """The tasks that settings accept are those that the runtime makes."""
    tasks = pytest.importorskip("rl_runtime.data.tasks")
    refused = "aimaster.task" in texts("--aimaster.task", task)
    assert refused == (bool(task) and tasks.task_maker(task) is None)
