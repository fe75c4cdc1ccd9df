"""What is wrong with the first rows of a data set is told with file and line before anything starts."""

from pathlib import Path

import pytest

from aimaster.settings import load
from aimaster.settings.rows import ROWS_LOOKED_AT, may_have_column, read_footer, rows_trouble

GRPO = "train.train_policy"
NAME = f"{GRPO}.dataset.name"
COLUMNS = {f"{GRPO}.prompt_column_name": "question", f"{GRPO}.response_column_name": "answer"}
GOOD = b'{"question": "1 + 1?", "answer": "2"}\n'


def told(*files: Path) -> dict[str, str]:
    return dict(rows_trouble(files, NAME, COLUMNS))


@pytest.mark.parametrize(
    ("content", "key", "said"),
    [
        (GOOD + b"not json\n", NAME, "line 2 is no JSON"),
        (b"\n\n[1, 2]\n", NAME, "line 3 holds no object"),
        (b"\xff\xfe\x00garbage", NAME, "line 1 is no JSON"),
        (GOOD + b'{"question": "1", "ans": "2"}', f"{GRPO}.response_column_name", "line 2, which has ans, question"),
        (b"{}\n", f"{GRPO}.prompt_column_name", "line 1, which has no columns"),
        (b"", NAME, "there are no rows in"),
        (b"\n \n", NAME, "there are no rows in"),
    ],
)
def test_a_bad_row_is_told_with_file_and_line(tmp_path: Path, content: bytes, key: str, said: str) -> None:
    """Rows that are no JSON, no objects, or lack a column, and a file without rows, are told by file, line and what is wrong."""
    file = tmp_path / "train.jsonl"
    file.write_bytes(content)
    found = told(file)
    assert str(file) in found[key]
    assert said in found[key]


def test_an_empty_file_among_others_is_no_trouble(tmp_path: Path) -> None:
    """Shards may be empty as long as there are rows in one of them, and later shards are looked at too."""
    for name, content in (("a.jsonl", b""), ("b.jsonl", GOOD), ("c.jsonl", b"")):
        (tmp_path / name).write_bytes(content)
    files = sorted(tmp_path.iterdir())
    assert told(*files) == {}
    files[2].write_bytes(b"no row")
    assert "c.jsonl, line 1" in told(*files)[NAME]


def test_only_the_first_rows_are_looked_at(tmp_path: Path) -> None:
    """The look is short however long the file is; the runtime tells of the rest by the same file and line."""
    file = tmp_path / "train.jsonl"
    file.write_bytes(GOOD * ROWS_LOOKED_AT + b"no row")
    assert told(file) == {}
    data = pytest.importorskip("rl_runtime.data.folder")
    with pytest.raises(data.DataError, match=f"line {ROWS_LOOKED_AT + 1} is no JSON"):
        data.read_rows([file], prompt_column="question", answer_column="answer")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "too short"),
        (b"PAR1 and then nothing", "does not end as a Parquet file does"),
        (b"PAR1" + b"\xff\xff\xff\x7f" + b"PAR1", "its metadata is longer than the file"),
    ],
)
def test_what_is_no_parquet_file_is_told(tmp_path: Path, content: bytes, said: str) -> None:
    """A file that only has the name of a Parquet file is told by what it lacks."""
    file = tmp_path / "train.parquet"
    file.write_bytes(content)
    assert said in told(file)[NAME]


def test_a_folder_of_rows_is_no_file(tmp_path: Path) -> None:
    """What cannot be opened is told in a sentence."""
    (tmp_path / "train.jsonl").mkdir()
    assert "cannot be read" in told(tmp_path / "train.jsonl")[NAME]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    """A small Parquet file as data sets come in."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    (tmp_path / "main").mkdir()
    table = pa.table({"question": ["1 + 1?"] * 100, "answer": ["2"] * 100, "é" * 100: list(range(100))})
    pyarrow.parquet.write_table(table, tmp_path / "main" / "train-00000.parquet")
    return tmp_path / "main" / "train-00000.parquet"


@pytest.mark.parametrize(
    ("column", "present"),
    [("question", True), ("answer", True), ("é" * 100, True), ("quest", False), ("prompt", False)],
)
def test_the_footer_of_a_parquet_file_tells_what_is_no_column(parquet: Path, column: str, present: bool) -> None:
    """A name that stands nowhere in the schema is surely no column."""
    assert may_have_column(read_footer(parquet), column) == present


def test_a_missing_column_of_a_parquet_file_is_named_with_it(parquet: Path) -> None:
    """The key, the wished column and the file are all in the message."""
    flags = [f"--{NAME}", str(parquet.parent.parent), f"--{GRPO}.prompt_column_name", "question"]

    def keys(answer: str) -> dict[str, str]:
        obstacles = load(None, [*flags, f"--{GRPO}.response_column_name", answer], {}, gpus=0).obstacles
        return {obstacle.key: obstacle.text for obstacle in obstacles if obstacle.key.startswith(GRPO)}

    assert keys("answer") == {}
    assert keys("solution") == {f"{GRPO}.response_column_name": f'"solution" is no column of {parquet}'}
