"""Defaults < file < environment < flags, key by key, and every value knows who gave it."""

import codecs
import itertools
import os
from pathlib import Path

import pytest

from aimaster.settings import Resolved, SettingsError, load

SOURCES = ("file", "environment", "flag")


def load_from(
    folder: Path, text: str = "", flags: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> Resolved:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return load(path, flags, environ or {}, gpus=0)


def problems_of(
    folder: Path, text: str = "", flags: tuple[str, ...] = (), environ: dict[str, str] | None = None
) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_from(folder, text, flags, environ)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("present", [set(c) for n in range(4) for c in itertools.combinations(SOURCES, n)], ids=str)
def test_the_last_source_wins(tmp_path: Path, present: set[str]) -> None:
    """For every set of sources that give a key, the value and the origin are those of the last: file, environment, flag."""
    text = "train.epoch = 2" if "file" in present else ""
    environ = {"AIMASTER_TRAIN__EPOCH": "3"} if "environment" in present else {}
    flags = ("--train.epoch", "4") if "flag" in present else ()
    resolved = load_from(tmp_path, text, flags, environ)
    value, origin = 1, None
    for name, given, said in (
        ("file", 2, str(tmp_path / "job.toml")),
        ("environment", 3, "environment AIMASTER_TRAIN__EPOCH"),
        ("flag", 4, "flag --train.epoch"),
    ):
        if name in present:
            value, origin = given, said
    assert resolved.job.train.epoch == value
    assert resolved.origins.get("train.epoch") == origin


def test_sources_are_merged_key_by_key(tmp_path: Path) -> None:
    """A flag for one key of a table leaves its other keys as the file has them."""
    resolved = load_from(tmp_path, "[train]\nepoch = 2\nmax_num_steps = 9", ("--train.epoch=5",))
    assert (resolved.job.train.epoch, resolved.job.train.max_num_steps) == (5, 9)


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (("--train.optm_lr", "1e-5"), "train.optm_lr", 1e-5),
        (("--train.optm_lr=1e-5",), "train.optm_lr", 1e-5),
        (("--train.optm_lr", "[1e-5, 2e-5]"), "train.optm_lr", (1e-5, 2e-5)),
        (("--train.optm_betas", "0.9,0.95"), "train.optm_betas", None),
        (("--train.optm_betas", "[0.9, 0.95]"), "train.optm_betas", (0.9, 0.95)),
        (("--train.coalesce_weight_sync",), "train.coalesce_weight_sync", True),
        (("--train.coalesce_weight_sync", "--train.epoch", "2"), "train.coalesce_weight_sync", True),
        (("--train.coalesce_weight_sync=false",), "train.coalesce_weight_sync", False),
        (("--train.ckpt.max_keep", "-1"), "train.ckpt.max_keep", -1),
        (("--rollout.seed", "none"), "rollout.seed", None),
        (("--redis", "12800"), "redis", "12800"),
        (("--train.output_dir", "2026"), "train.output_dir", "2026"),
        (("--logging.logger", "console,wandb"), "logging.logger", ("console", "wandb")),
        (("--train.train_policy.reward_function", "gsm8k"), "train.train_policy.reward_function", {"gsm8k": 1.0}),
        (("--train.train_policy.reward_function.gsm8k", "2"), "train.train_policy.reward_function", {"gsm8k": 2.0}),
        (("--policy.lora.r", "4", "--train.compile=false"), "policy.lora.r", 4),
        (("--policy.trainable_map", "{lm_head = true}"), "policy.trainable_map", {"lm_head": True}),
        (("--aimaster.env.node-0.RETRIES", "3"), "aimaster.env", {"node-0": {"RETRIES": "3"}}),
        (("--custom.anything.at_all", "7"), "custom", {"anything": {"at_all": 7}}),
        (("--policy.model_name_or_path", "none"), "policy.model_name_or_path", "none"),
        (("--train.resume", "true"), "train.resume", True),
        (
            ("--aimaster.drill", "kill:policy-1@20,kill:rollout-0@30"),
            "aimaster.drill",
            "kill:policy-1@20,kill:rollout-0@30",
        ),
    ],
)
def test_flags_are_read_as_the_key_asks(tmp_path: Path, flags: tuple[str, ...], key: str, value: object) -> None:
    """The text of a flag becomes a number, boolean, list, map or string as the key's type says, with no warning."""
    if key == "train.optm_betas" and value is None:
        assert problems_of(tmp_path, flags=flags)
        return
    resolved = load_from(tmp_path, flags=flags)
    found: object = resolved.job
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)
    assert resolved.warnings == ()


@pytest.mark.parametrize("source", ["environment", "flag"])
def test_bytes_that_are_no_text_are_named_with_their_source(tmp_path: Path, source: str) -> None:
    """The command line and the environment may hold any bytes."""
    text = os.fsdecode(b"\xff")
    environ = {"AIMASTER_TRAIN__OPTM_LR": text} if source == "environment" else {}
    flags = ("--train.optm_lr", text) if source == "flag" else ()
    with pytest.raises(SettingsError, match=f"{source}.*train.optm_lr.*not UTF-8"):
        load_from(tmp_path, flags=flags, environ=environ)


def test_a_mark_of_byte_order_is_no_part_of_the_file(tmp_path: Path) -> None:
    """As editors on other systems write it before UTF-8."""
    path = tmp_path / "job.toml"
    path.write_bytes(codecs.BOM_UTF8 + b"[train]\nepoch = 2\n")
    assert load(path, [], {}, gpus=0).job.train.epoch == 2


def test_a_data_set_of_a_later_source_takes_the_place_of_a_task(tmp_path: Path) -> None:
    """A flag is meant; in one source, both together are a contradiction."""
    dataset, task = "train.train_policy.dataset.name", "aimaster.task"
    resolved = load_from(tmp_path, '[aimaster]\ntask = "add2"\n', flags=(f"--{dataset}", "rows"))
    assert resolved.job.aimaster.task == ""
    assert any("takes the place of" in note.text for note in resolved.notes)
    resolved = load_from(tmp_path, '[train.train_policy.dataset]\nname = "rows"\n', flags=(f"--{task}", "add2"))
    assert (resolved.job.aimaster.task, resolved.job.train.train_policy.dataset.name) == ("add2", "")  # type: ignore[union-attr]
    with pytest.raises(SettingsError, match="exclude each other"):
        load_from(tmp_path, flags=(f"--{dataset}", "rows", f"--{task}", "add2"))


def test_environment_reaches_every_table(tmp_path: Path) -> None:
    """AIMASTER_SECTION__KEY sets the key in any depth; other AIMASTER_ variables are not settings."""
    environ = {
        "AIMASTER_TRAIN__TRAIN_POLICY__EPSILON_HIGH": "0.28",
        "AIMASTER_AIMASTER__LEASES__GROUP_TIMEOUT_SECONDS": "5",
        "AIMASTER_AGENT__REPORT_SECONDS": "1",
        "AIMASTER_URL": "http://127.0.0.1:1",
        "AIMASTER_PORT_8080_TCP": "tcp://127.0.0.1:8080",
        "PATH": "/bin",
    }
    job = load_from(tmp_path, environ=environ).job
    assert job.train.train_policy.epsilon_high == 0.28  # type: ignore[union-attr]
    assert job.aimaster.leases.group_timeout_seconds == 5.0


def test_a_secret_comes_from_a_file(tmp_path: Path) -> None:
    """`_FILE` behind a variable reads the value from that file; a file that is not there is a problem."""
    (tmp_path / "token").write_text("hush\n", encoding="utf-8")
    environ = {"AIMASTER_CUSTOM__WANDB_TOKEN_FILE": str(tmp_path / "token")}
    assert load_from(tmp_path, environ=environ).job.custom == {"wandb_token": "hush"}
    (found,) = problems_of(tmp_path, environ={"AIMASTER_CUSTOM__WANDB_TOKEN_FILE": str(tmp_path / "absent")})
    assert "custom.wandb_token" in found
    assert "absent" in found


def test_a_secret_is_refused_as_a_flag(tmp_path: Path) -> None:
    """A secret on the command line, where every process of the host sees it, is refused with the variable to use."""
    (found,) = problems_of(tmp_path, flags=("--custom.wandb_token", "hush"))
    assert "AIMASTER_CUSTOM__WANDB_TOKEN_FILE" in found
    assert "hush" not in found


def test_all_errors_of_all_sources_come_in_one_go(tmp_path: Path) -> None:
    """Mistakes in file, environment and flags are told together, each with its source and key."""
    found = problems_of(
        tmp_path,
        '[rollout]\nn_generatoin = 8\nbatch_size = "many"',
        ("--train.epoc", "2", "stray", "--train.epoch", "x"),
        {"AIMASTER_TRAIN__SEEED": "1"},
    )
    text = "\n".join(found)
    assert len(found) == 6
    for part in (
        "job.toml: rollout.n_generatoin: unknown key; did you mean rollout.n_generation?",
        "job.toml: rollout.batch_size",
        "flag --train.epoc: unknown key; did you mean train.epoch?",
        "flag --train.epoch: is",
        "'stray'",
        "environment AIMASTER_TRAIN__SEEED: train.seeed: unknown key; did you mean train.seed?",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[train\nepoch = 1", "is not valid TOML"),
        (b"train.epoch = 1\ntrain.epoch = 2", "is not valid TOML"),
        (b"# \xff\xfe", "is not UTF-8"),
    ],
)
def test_a_file_that_is_not_toml_is_one_problem(tmp_path: Path, content: bytes, said: str) -> None:
    """A file that cannot be parsed is refused by name, with the place of the mistake, and nothing else is judged."""
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=said) as caught:
        load(path, ["--nonsense", "1"], {})
    assert len(caught.value.problems) == 1
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that is not there, or is a folder, is refused by name."""
    with pytest.raises(SettingsError, match=r"absent\.toml: no such file"):
        load(tmp_path / "absent.toml", [], {})
    with pytest.raises(SettingsError, match="cannot be read"):
        load(tmp_path, [], {})


def test_a_flag_for_a_table_is_refused(tmp_path: Path) -> None:
    """A flag that names a table instead of one of its keys is refused; an inline table is taken."""
    assert "is a table" in problems_of(tmp_path, "train.epoch = 2", ("--train", "5"))[0]
    assert load_from(tmp_path, flags=("--train.ckpt", "{save_freq = 7}")).job.train.ckpt.save_freq == 7


def test_without_a_file_the_defaults_stand() -> None:
    """No file is needed: defaults, environment and flags alone make a configuration."""
    resolved = load(None, [], {}, gpus=0)
    assert resolved.source == ""
    assert resolved.job.rollout.n_generation == 16
