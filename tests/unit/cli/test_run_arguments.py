"""The command line of `aimaster run`: what belongs to the user's command, what overrides a key, what is an option."""

import json
import os
from pathlib import Path

import pytest

from aimaster.cli.app import main
from aimaster.cli.exits import UsageError
from aimaster.cli.run import count_ranks, split_overrides

TINY = Path(__file__).parents[3] / "examples" / "tiny.toml"


@pytest.mark.parametrize(
    ("words", "rest", "overrides"),
    [
        (["job.toml"], ["job.toml"], []),
        (["job.toml", "--train.epoch", "2"], ["job.toml"], ["--train.epoch", "2"]),
        (["job.toml", "--train.epoch=2", "--json"], ["job.toml", "--json"], ["--train.epoch=2"]),
        (["--run-dir", "a.b", "job.toml"], ["--run-dir", "a.b", "job.toml"], []),
        (["job.toml", "--a.b", "-1.5", "--port", "1"], ["job.toml", "--port", "1"], ["--a.b", "-1.5"]),
        (["job.toml", "--train.compile", "--json"], ["job.toml", "--json"], ["--train.compile"]),
        (["job.toml", "--train.compile"], ["job.toml"], ["--train.compile"]),
        (["--aimaster.env.node-0.A", "b c"], [], ["--aimaster.env.node-0.A", "b c"]),
        (["--aimaster.task", ""], [], ["--aimaster.task", ""]),
        (["--a.b=--c.d"], [], ["--a.b=--c.d"]),
    ],
)
def test_dotted_flags_are_overrides_and_all_else_is_left_to_the_options(words, rest, overrides):
    """A flag with a dot in its name overrides a key and takes its value along; a bare one means true."""
    assert split_overrides(words) == (rest, overrides)


def test_nproc_per_node_speaks_the_words_of_torchrun(monkeypatch):
    """A number, `cpu`, `gpu` and `auto` mean what they mean there; unsaid, the command is one process without ranks."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_ranks(None) is None
    assert count_ranks("3") == 3
    assert count_ranks("cpu") == count_ranks("auto") == os.cpu_count()
    with pytest.raises(UsageError, match="no GPU"):
        count_ranks("gpu")
    for slip in ("100000", "9" * 5000):
        with pytest.raises(UsageError, match="at most 1024 ranks"):
            count_ranks(slip)


def test_a_dry_run_as_json_is_one_document(capsys):
    """The configuration alone on stdout; and a drill that is none is refused, exit 2, as a real start would."""
    with pytest.raises(SystemExit) as ended:
        main(["run", str(TINY), "--dry-run", "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["job"]["aimaster"]["task"] == "sort6"
    for drill in ("nonsense", "kill:policy-9@3"):
        with pytest.raises(SystemExit) as ended:
            main(["run", str(TINY), "--dry-run", "--drill", drill])
        assert ended.value.code == 2
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [("run", str(TINY)), ("status",), ("stop",), ("serve",)])
def test_an_empty_run_folder_is_no_folder(words, capsys):
    """`--run-dir ""` comes of an unset variable; it never means the working folder."""
    with pytest.raises(SystemExit) as ended:
        main([*words, "--run-dir", ""])
    assert ended.value.code == 2
    assert "the path is empty" in capsys.readouterr().err
