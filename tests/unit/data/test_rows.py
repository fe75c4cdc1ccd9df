"""Rows: built-in tasks, and folders as users have them."""

import subprocess
import sys

import pytest

from aimaster.settings import load
from rl_runtime.data import DataError, load_heldout, load_rows
from rl_runtime.data.tasks import is_held_out, task_row


def job(*flags):
    """The embedded default, or the real model's example, with flags."""
    return load("examples/tiny.toml", list(flags), {}).job


def folder_job(folder, *flags, prompt="question", answer="answer"):
    return load(
        "examples/smollm2.toml",
        [
            "--aimaster.task", "",
            "--train.train_policy.dataset.name", str(folder),
            "--train.train_policy.prompt_column_name", prompt,
            "--train.train_policy.response_column_name", answer,
            *flags,
        ],
        {},
    ).job  # fmt: skip


def write_lines(path, rows, columns=("question", "answer")):
    import json

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))


# -- tasks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["sort6", "add2", "copy6", "one_step"])
def test_a_task_is_a_function_of_the_position_and_never_shows_what_is_held_out(task):
    """One prompt in ten, by a hash of its text, is on the other side; each side gives the same rows every time."""
    rows, heldout = load_rows(job("--aimaster.task", task)), load_heldout(job("--aimaster.task", task))
    assert not any(is_held_out(row["prompt"]) for row in rows[:200])
    assert all(is_held_out(row["prompt"]) for row in heldout[:100])
    assert rows[:50] == load_rows(job("--aimaster.task", task))[:50]
    assert len({row["prompt"] for row in rows[:50]}) > 40
    assert len(heldout) == job().aimaster.heldout_prompts


@pytest.mark.parametrize(
    ("task", "check"),
    [
        ("sort6", lambda row: row["answer"] == "".join(sorted(row["prompt"][:-1])) and len(row["prompt"]) == 7),
        ("copy6", lambda row: row["answer"] == row["prompt"][:-1]),
        ("add2", lambda row: int(row["answer"]) == sum(map(int, row["prompt"][:-1].split("+")))),
    ],
)
def test_the_answers_of_tasks_are_right(task, check):
    """Sorted digits, copied digits, the sum."""
    assert all(check(task_row(task, position, held_out=False)) for position in range(100))


def test_a_one_step_problem_has_three_worked_examples_and_a_marked_answer():
    """Numbers from 2 to 20, an answer that is never negative and ends in `#### N`, as the examples' do."""
    for position in range(100):
        row = task_row("one_step", position, held_out=False)
        assert row["prompt"].count("#### ") == 3
        assert row["prompt"].endswith("\nAnswer:")
        first, sign, second, _, result = row["answer"].splitlines()[0].split()
        value = int(first) + int(second) if sign == "+" else int(first) - int(second)
        assert value == int(result) >= 0
        assert row["answer"].splitlines()[-1] == f"#### {result}"
        assert 2 <= int(first) <= 20
        assert 2 <= int(second) <= 20


def test_an_unknown_task_is_refused_with_the_ones_there_are():
    """The message names them."""
    with pytest.raises(DataError, match="sort6, add2, copy6 and one_step"):
        load_rows(job("--aimaster.task", "chess"))


# -- folders ------------------------------------------------------------------------------------------------------------


def test_a_folder_of_json_lines_gives_its_split(tmp_path):
    """The split is told by the file's name; the test split is what is held out."""
    write_lines(tmp_path / "train.jsonl", [("1+1", "#### 2"), ("2+2", "#### 4")])
    write_lines(tmp_path / "test.jsonl", [("3+3", "#### 6")])
    assert load_rows(folder_job(tmp_path))[:] == [
        {"prompt": "1+1", "answer": "#### 2"},
        {"prompt": "2+2", "answer": "#### 4"},
    ]
    assert [row["prompt"] for row in load_heldout(folder_job(tmp_path))] == ["3+3"]


def test_parquet_as_hubs_lay_it_out(tmp_path):
    """A subset's folder, several files of one split, further columns, and no import of pyarrow for others."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "main").mkdir()
    for number in range(2):
        table = pyarrow.table({"question": [f"q{number}"], "answer": [f"a{number}"], "level": [number]})
        parquet.write_table(table, tmp_path / "main" / f"train-0000{number}-of-00002.parquet")
    rows = load_rows(folder_job(tmp_path, "--train.train_policy.dataset.subset", "main"))
    assert rows[:] == [{"prompt": "q0", "answer": "a0"}, {"prompt": "q1", "answer": "a1"}]


def test_a_template_stands_round_each_prompt(tmp_path):
    """Braces in a prompt, or in the template, mean nothing else."""
    write_lines(tmp_path / "train.jsonl", [("{a} + {b}?", "#### 2"), ("{prompt}", "#### 4")])
    rows = load_rows(folder_job(tmp_path, "--aimaster.prompt_template", "{1} Question: {prompt}\nAnswer:"))
    assert [row["prompt"] for row in rows] == ["{1} Question: {a} + {b}?\nAnswer:", "{1} Question: {prompt}\nAnswer:"]
    assert [row["answer"] for row in rows] == ["#### 2", "#### 4"]


def test_a_share_can_be_kept_back(tmp_path):
    """dataset.test_size: a number of rows, or a share chosen by hash; no row is on both sides."""
    write_lines(tmp_path / "train.jsonl", [(f"q{number}", "a") for number in range(200)])
    for size in ("20", "0.2"):
        chosen = folder_job(tmp_path, "--train.train_policy.dataset.test_size", size)
        rows, heldout = load_rows(chosen)[:], load_heldout(chosen)[:]
        assert len(rows) + len(heldout) == 200
        assert 10 < len(heldout) < 70
        assert not {row["prompt"] for row in rows} & {row["prompt"] for row in heldout}


@pytest.mark.parametrize(
    ("make", "flags", "message"),
    [
        (lambda _: None, {}, "there is no folder or file"),
        (lambda folder: folder.mkdir(), {}, "holds no JSONL or Parquet file"),
        (lambda folder: write_lines(folder / "dev.jsonl", [("q", "a")]), {}, "holds no train; it holds dev"),
        (
            lambda folder: write_lines(folder / "train.jsonl", [("q", "a")]),
            {"prompt": "prompt"},
            r"prompt_column_name = 'prompt'.*has the columns question, answer",
        ),
        (
            lambda folder: write_lines(folder / "train.jsonl", [("q", "a")]),
            {"answer": "solution"},
            "response_column_name = 'solution'.*question, answer",
        ),
        (lambda folder: write_lines(folder / "train.jsonl", []), {}, "hold no rows"),
        (
            lambda folder: (folder.mkdir(), (folder / "train.jsonl").write_text('{"question": 1')),
            {},
            "line 1 is no JSON",
        ),
        (lambda folder: (folder.mkdir(), (folder / "train.jsonl").write_text("[1]")), {}, "line 1 holds no object"),
        (
            lambda folder: (folder.mkdir(), (folder / "train.parquet").write_bytes(b"PAR1 no")),
            {},
            "cannot be read as Parquet",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_said_in_one_sentence(tmp_path, make, flags, message):
    """Missing path, split, column or rows, and broken lines: what was found, and what to name instead."""
    make(tmp_path / "rows")
    with pytest.raises(DataError, match=message):
        load_rows(folder_job(tmp_path / "rows", **flags))


def test_a_column_that_later_lines_lack_is_named_with_its_line(tmp_path):
    """Not only the first line is looked at."""
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n\n{"question": "q"}\n')
    with pytest.raises(DataError, match="line 3 has the columns question"):
        load_rows(folder_job(tmp_path))


def test_the_real_rows_are_read(gsm8k_folder):
    """GSM8K as it is published."""
    rows = load_rows(folder_job(gsm8k_folder))
    assert len(rows) == 7473
    assert "#### " in rows[0]["answer"]
    assert len(load_heldout(folder_job(gsm8k_folder))) == 1319


def test_rows_are_a_sequence():
    """Length, positions from either end, slices; outside is an IndexError."""
    rows = load_rows(job())
    assert rows[-1] == rows.row(len(rows) - 1)
    assert rows[2:4] == [rows[2], rows[3]]
    with pytest.raises(IndexError):
        rows.row(len(rows))


def test_reading_rows_imports_nothing_heavy():
    """No torch, no numpy, and pyarrow only when a Parquet file is met."""
    code = (
        "import sys; from aimaster.settings import load; from rl_runtime.data import load_rows;"
        "load_rows(load('examples/tiny.toml', [], {}).job)[0];"
        "print([m for m in ('torch', 'numpy', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
