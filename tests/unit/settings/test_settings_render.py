"""The resolved configuration reads back as the same, shows each value's origin, and shows no secret."""

import io
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimaster.cli.dry_run import print_dry_run
from aimaster.settings import Resolved, from_json, load, render_resolved, to_json
from aimaster.settings.toml_text import toml_value

FILES = ("examples/tiny.toml", "examples/smollm2.toml", "tests/data/pai-sample.toml")


@pytest.mark.parametrize("name", FILES)
def test_the_printed_configuration_reads_back_as_the_same(root: Path, tmp_path: Path, name: str) -> None:
    """What a dry run prints is a configuration file of the same job, without anything left to say."""
    resolved = load(root / name, [], {}, gpus=0)
    again = tmp_path / "again.toml"
    again.write_text(render_resolved(resolved), encoding="utf-8")
    reread = load(again, [], {}, gpus=0)
    assert reread.job == resolved.job
    assert reread.warnings == ()


@pytest.mark.parametrize("name", FILES)
def test_members_read_the_same_job(root: Path, name: str) -> None:
    """The JSON that is kept with the run reads back as the same record."""
    resolved = load(root / name, [], {}, gpus=0)
    content = to_json(resolved)
    assert from_json(content) == resolved.job
    kept = orjson.loads(content)
    assert kept["origins"] == resolved.origins
    assert kept["legacy"] == resolved.legacy


def test_a_newer_format_is_refused(root: Path) -> None:
    """A kept configuration of another format is refused, not half understood."""
    kept = orjson.loads(to_json(load(root / FILES[0], [], {}, gpus=0)))
    with pytest.raises(msgspec.ValidationError, match="format 2"):
        from_json(orjson.dumps({**kept, "format": 2}))
    kept["job"]["train"]["epocs"] = 1
    with pytest.raises(msgspec.ValidationError, match="epocs"):
        from_json(orjson.dumps(kept))


def test_every_value_shows_its_origin(tmp_path: Path) -> None:
    """Behind each value stands who gave it: default, file, environment, flag, or what it follows from."""
    path = tmp_path / "job.toml"
    path.write_text("[train]\nepoch = 2\nsync_weight_interval = 8\n", encoding="utf-8")
    environ = {"AIMASTER_ROLLOUT__N_GENERATION": "4"}
    lines = render_resolved(load(path, ["--train.max_num_steps", "3"], environ, gpus=0)).splitlines()
    assert f"epoch = 2  # {path}" in lines
    assert "n_generation = 4  # environment AIMASTER_ROLLOUT__N_GENERATION" in lines
    assert "max_num_steps = 3  # flag --train.max_num_steps" in lines
    assert "allowed_outdated_steps = 7  # follows train.sync_weight_interval, which is one more" in lines
    assert "optm_warmup_steps = 20  # default" in lines
    assert "# batch_size_per_optimize is unset  # default" in lines


def secretive(folder: Path) -> Resolved:
    path = folder / "job.toml"
    path.write_text(
        '[custom]\nwandb_api_key = "hush"\nendpoint = "https://me:hush@host/x"\nnested = {token = "hush", plain = "seen"}\n'
        '[aimaster.env.all]\nHF_TOKEN = "hush"\nTZ = "UTC"\n',
        encoding="utf-8",
    )
    return load(path, [], {}, gpus=0)


def test_secrets_are_masked_where_shown(tmp_path: Path) -> None:
    """Secrets are hidden in what is printed; members, who need them, read them."""
    resolved = secretive(tmp_path)
    assert "hush" not in render_resolved(resolved)
    assert b"hush" not in to_json(resolved, mask=True)
    for shown in ("seen", "UTC", "https://********@host/x"):
        assert shown in render_resolved(resolved)
        assert shown in to_json(resolved, mask=True).decode()
    job = from_json(to_json(resolved))
    assert job.custom["wandb_api_key"] == "hush"
    assert job.aimaster.env["all"] == {"HF_TOKEN": "hush", "TZ": "UTC"}


def test_a_dry_run_prints_data_on_stdout_and_talk_on_stderr(data: Path) -> None:
    """The configuration goes to one stream, one line for each warning, note and obstacle to the other."""
    resolved = load(data / "pai-sample.toml", [], {}, gpus=0)
    stream, talk = io.StringIO(), io.StringIO()
    print_dry_run(resolved, stream, talk)
    assert stream.getvalue() == render_resolved(resolved)
    said = talk.getvalue().splitlines()
    assert len(said) == len(resolved.warnings) + len(resolved.notes) + len(resolved.obstacles)
    assert all(line.startswith(("warning: ", "note: ")) for line in said)
    for key in ("train.resume", "policy.parallelism.cp_rotate_method", "rollout.parallelism.cp_rotate_method"):
        assert sum(line.startswith("warning: ") and f"{key}:" in line for line in said) == 1


values = st.recursive(
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=values)
def test_any_value_survives_toml(value: Any) -> None:
    """A value of any kind, written as TOML, is read back as itself."""
    assert tomllib.loads(f"value = {toml_value(value)}")["value"] == value


def test_settings_import_nothing_heavy() -> None:
    """Reading a configuration imports no torch, no numpy, no HTTP stack."""
    code = "import sys, aimaster.settings, aimaster.cli.dry_run; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    heavy = {"torch", "numpy", "aiohttp", "transformers", "asyncio", "rich", "click", "pydantic"}
    assert not heavy & set(out.stdout.split())
