"""What is said before anything starts."""

import socket

import pytest

from aimaster.cli.app import main
from aimaster.cli.front_preflight import check_command, check_parquet, check_port, may_have_column, read_footer
from aimaster.settings import load


def test_a_port_in_use_is_named_and_a_free_one_passes():
    """The wished port is tried; 0 always fits."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1" in check_port("127.0.0.1", port)[0]
    assert check_port("127.0.0.1", port) == []
    assert check_port("127.0.0.1", 0) == []


@pytest.fixture
def rows(tmp_path):
    """A folder with a small Parquet file as data sets come in."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    (tmp_path / "main").mkdir()
    table = pa.table({"question": ["1 + 1?"] * 100, "answer": ["2"] * 100, "é" * 100: list(range(100))})
    pyarrow.parquet.write_table(table, tmp_path / "main" / "train-00000.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("column", "present"),
    [("question", True), ("answer", True), ("é" * 100, True), ("quest", False), ("prompt", False)],
)
def test_the_footer_of_a_parquet_file_tells_what_is_no_column(rows, column, present):
    """A name that stands nowhere in the schema is surely no column."""
    assert may_have_column(read_footer(rows / "main" / "train-00000.parquet"), column) == present


def test_a_missing_column_of_a_data_set_is_named_with_its_file(rows, root):
    """The key, the wished column and the file are all in the message."""
    flags = [
        "--aimaster.task",
        "",
        "--train.train_policy.dataset.name",
        str(rows),
        "--train.train_policy.prompt_column_name",
        "question",
    ]
    job = load(root / "examples" / "tiny.toml", [*flags, "--train.train_policy.response_column_name", "answer"], {}).job
    assert check_parquet(job, rows) == []
    job = load(
        root / "examples" / "tiny.toml", [*flags, "--train.train_policy.response_column_name", "solution"], {}
    ).job
    (said,) = check_parquet(job, rows)
    assert 'response_column_name: "solution" is no column of' in said
    (rows / "main" / "train-00000.parquet").write_bytes(b"PAR1 and then nothing")
    (said,) = check_parquet(job, rows)
    assert "does not end as a Parquet file does" in said


def test_a_command_needs_its_program_and_its_script(tmp_path):
    """A program that is not there and a script that is not there are said at once; what is passed to them is not looked at."""
    assert check_command(["true", "--whatever", "nowhere.py"], tmp_path, 0) == []
    assert check_command(["python3", "-c", "pass"], tmp_path, 0) == []
    assert check_command(["python3", "a.py"], tmp_path, 0) == [f"no such script: a.py (looked in {tmp_path})"]
    assert "no such program" in check_command(["no-such-program-here"], tmp_path, 0)[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[rollout]\nn_generatoin = 4\n", "n_generation"),
        ("[policy]\nmodel_name_or_path = 'empty'\n", "holds no config.json"),
        (
            "[rollout]\nn_generation = 4\n[aimaster]\ntask = 'sort6'\ndrill = 'kill:nobody@1'\n[aimaster.model]\n",
            "there is no 'nobody'",
        ),
        ("train = 3\n", "train"),
        ("[train\n", "not valid TOML"),
    ],
)
def test_a_bad_file_is_refused_before_anything_is_made(tmp_path, monkeypatch, capsys, text, said):
    """Each of these ends with 2, one clear error, and no run folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["run", "job.toml"])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
