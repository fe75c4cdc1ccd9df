"""Every number has a range: what has no meaning is refused with its key, wherever it comes from, and nothing is made."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aimaster.cli.app import main
from aimaster.settings import JobSettings, SettingsError, load
from aimaster.settings.check import fields_of, tables_of
from aimaster.settings.table import Table
from aimaster.settings.train_policy import GrpoSettings, SftSettings

GRPO = "train.train_policy"
BELOW_ZERO = {
    "train.ckpt.max_keep",
    "aimaster.snapshots.keep",
    "rollout.sampling_config.top_k",
    "validation.top_k",
    f"{GRPO}.max_retry_for_on_policy",
    f"{GRPO}.advantage_low",
    f"{GRPO}.advantage_high",
    f"{GRPO}.entropy_coeff",
    f"{GRPO}.reward_function",
    "validation.reward_function",
    "policy.diffusers.logit_mean",
    *(f"{role}.parallelism.dp_shard_size" for role in ("policy", "rollout", "distillation")),
    *(
        f"{table}.remote_reward.{name}"
        for table in (GRPO, "validation")
        for name in ("scale", "reward_clip_min", "reward_clip_max")
    ),
}
"""Keys in which -1 has a meaning: no limit, a weight, a bound, a mean, an old default."""


def holds(info: msgspec.inspect.Type, kinds: tuple[type, ...]) -> msgspec.inspect.Type | None:
    match info:
        case msgspec.inspect.UnionType(types=types):
            return next((found for item in types if (found := holds(item, kinds)) is not None), None)
        case msgspec.inspect.DictType(value_type=inner) | msgspec.inspect.VarTupleType(item_type=inner):
            return info if holds(inner, kinds) is not None else None
        case msgspec.inspect.TupleType(item_types=inners):
            return info if any(holds(inner, kinds) is not None for inner in inners) else None
        case _:
            return info if isinstance(info, kinds) else None


def numeric_keys(policy: type[Table], table: type[Table] = JobSettings, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key that holds numbers, with the shape of a value: the number alone, or what stands round it."""
    shapes = {msgspec.inspect.DictType: "{{gsm8k = {0}}}", msgspec.inspect.VarTupleType: "[{0}]"}
    for name, field in fields_of(table).items():
        below = [option for option in tables_of(field.type) if option not in {GrpoSettings, SftSettings} - {policy}]
        for option in below:
            yield from numeric_keys(policy, option, f"{prefix}{name}.")
        if below or prefix + name == "custom":
            continue
        number = (msgspec.inspect.IntType, msgspec.inspect.FloatType)
        found = holds(msgspec.inspect.type_info(field.type), number)
        if found is not None:
            shape = "[{0}, {0}]" if isinstance(found, msgspec.inspect.TupleType) else shapes.get(type(found), "{0}")
            yield prefix + name, shape


GRPO_KEYS, SFT_KEYS = (dict(numeric_keys(policy)) for policy in (GrpoSettings, SftSettings))


def from_file(folder: Path, values: dict[str, str]) -> None:
    (folder / "job.toml").write_text("\n".join(f"{key} = {text}" for key, text in values.items()), encoding="utf-8")
    load(folder / "job.toml", [], {}, gpus=0)


def from_environment(folder: Path, values: dict[str, str]) -> None:
    environ = {f"AIMASTER_{key.upper().replace('.', '__')}": text for key, text in values.items()}
    load(None, [], environ, gpus=0)


def from_flags(folder: Path, values: dict[str, str]) -> None:
    load(None, [f"--{key}={text}" for key, text in values.items()], {}, gpus=0)


SOURCES = (from_file, from_environment, from_flags)


def refused(source: Callable[..., None], folder: Path, values: dict[str, str]) -> dict[str, str]:
    with pytest.raises(SettingsError) as caught:
        source(folder, values)
    return {problem.key: problem.text for problem in caught.value.problems}


def test_all_tables_are_walked() -> None:
    """The walk meets the keys that it must: plain ones, lists, maps and optional tables."""
    assert {"train.optm_lr", "train.optm_betas", "policy.lora.r", "aimaster.model.hidden_size"} <= set(GRPO_KEYS)
    assert f"{GRPO}.load_balanced_pool_size" in SFT_KEYS
    assert len(GRPO_KEYS) > 150


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400", str(2**70), str(-(2**70))])
@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_what_is_no_number_is_refused_in_every_key(
    tmp_path: Path, source: Callable[..., None], number: str, kind: str
) -> None:
    """NaN, infinities and whole numbers beyond 64 bits are refused in every numeric key, each by its name, in one go."""
    keys = GRPO_KEYS if kind == "grpo" else SFT_KEYS
    values = {key: shape.format(number) for key, shape in keys.items()}
    values[f"{GRPO}.type"] = f'"{kind}"' if source is from_file else kind
    assert set(refused(source, tmp_path, values)) == set(keys)


@pytest.mark.parametrize("key", sorted(GRPO_KEYS | SFT_KEYS))
def test_a_number_below_zero_is_refused_where_it_has_no_meaning(tmp_path: Path, key: str) -> None:
    """-1 is refused with its key, but for the few keys in which it means something."""
    shape = GRPO_KEYS.get(key) or SFT_KEYS[key]
    values = {key: shape.format(-1)} | ({} if key in GRPO_KEYS else {f"{GRPO}.type": "sft"})
    if key in BELOW_ZERO:
        if not key.endswith("_high") and not key.endswith("_max"):
            from_flags(tmp_path, values)
        return
    assert set(refused(from_flags, tmp_path, values)) == {key}


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("train.optm_lr", "-1e-6", "0.0"),
        ("train.optm_betas", "[0.9, 1.0]", "[0.0, 0.95]"),
        ("train.epsilon", "0.0", "1e-8"),
        ("train.optm_warmup_steps", "1.5", "0.1"),
        ("train.optm_decay_ratio", "1.1", "1.0"),
        ("train.seed", "4294967296", "4294967295"),
        ("train.ckpt.max_keep", "0", "-1"),
        (f"{GRPO}.epsilon_low", "1.0", "0.9"),
        (f"{GRPO}.epsilon_high", "0.0", "1.5"),
        (f"{GRPO}.dataset.test_size", "1.0", "5"),
        (f"{GRPO}.advantage_low", "6.0", "-1.0"),
        ("rollout.n_generation", "1", "2"),
        ("rollout.sampling_config.top_p", "0.0", "1.0"),
        ("rollout.parallelism.n_init_replicas", "10001", "10000"),
        ("policy.model_max_length", "1", "2"),
        ("aimaster.nodes", "10001", "10000"),
        ("aimaster.leases.startup_hang_seconds", "1e12", "86400"),
    ],
)
@pytest.mark.parametrize("source", SOURCES)
def test_ranges_end_where_meaning_ends(
    tmp_path: Path, source: Callable[..., None], key: str, bad: str, good: str
) -> None:
    """The last value with a meaning is taken and the first without one is refused, from each source."""
    source(tmp_path, {key: good})
    assert set(refused(source, tmp_path, {key: bad})) == {key}


@pytest.mark.parametrize("text", ["nan", "[1.0, [-inf]]", "{deep = {er = 1e400}}", "9223372036854775808"])
@pytest.mark.parametrize("source", SOURCES)
def test_free_tables_hold_real_numbers_too(tmp_path: Path, source: Callable[..., None], text: str) -> None:
    """What a run keeps as JSON must come back as it was: no NaN and no longer integer in the user's own table either."""
    assert set(refused(source, tmp_path, {"custom.mine": text})) == {"custom"}


@pytest.mark.parametrize("source", SOURCES)
def test_a_number_of_thousands_of_digits_is_a_problem_not_a_crash(tmp_path: Path, source: Callable[..., None]) -> None:
    """A number too long to be read at all is told in a sentence."""
    (text,) = refused(source, tmp_path, {"train.epoch": "9" * 5000}).values()
    assert len(text) < 300


@pytest.mark.parametrize("task", ["sort6", "copy6", "add2"])
def test_a_prompt_of_a_task_leaves_room_for_an_answer(task: str) -> None:
    """With a fresh model the length of a task's prompt is known: the room behind it must take one token at least."""
    rows = pytest.importorskip("rl_runtime.data.tasks")
    from rl_runtime.models.characters import CharacterTokenizer

    flags = ["--aimaster.task", task, "--aimaster.model.hidden_size", "64", "--policy.model_max_length"]
    least = len(CharacterTokenizer().encode(rows.task_row(task, 0, held_out=False)["prompt"])) + 1
    load(None, [*flags, str(least)], {}, gpus=0)
    with pytest.raises(SettingsError, match=f"leaves no room for an answer.*give at least {least}"):
        load(None, [*flags, str(least - 1)], {}, gpus=0)


@pytest.mark.parametrize("dry", [False, True])
@pytest.mark.parametrize(
    ("key", "value"), [("train.optm_lr", "nan"), ("train.seed", str(2**70)), ("rollout.n_generation", "1")]
)
def test_a_bad_number_ends_with_2_and_makes_nothing(
    root: Path, tmp_path: Path, monkeypatch: Any, capsys: Any, dry: bool, key: str, value: str
) -> None:
    """A run and a dry run alike end with 2 and the key, and leave no folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["run", str(root / "examples" / "tiny.toml"), f"--{key}", value, *(["--dry-run"] if dry else [])])
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert key in told.err
    assert told.out == ""
    assert list(tmp_path.iterdir()) == []
