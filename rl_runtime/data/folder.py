"""Rows from a local folder or file, as GSM8K has them: JSONL or Parquet with a prompt and an answer column.

A folder may hold a file for each split (`train.jsonl`, `test-00000-of-00001.parquet`, `main/train.parquet`); the file names tell
which. Everything that can be wrong is one DataError that says what was found.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from aimaster.settings.datafiles import LINES, PARQUET, data_files, inner_folder, split_of
from rl_runtime.data.errors import DataError


def find_files(name: str, splits: Sequence[str], subset: str) -> list[Path]:
    """Return the data files of these splits (all files when no splits are named), in order of name."""
    root = Path(name).expanduser()
    if root.is_file():
        if root.suffix not in (*LINES, PARQUET):
            raise DataError(
                f"train.train_policy.dataset.name: {root} is neither JSONL nor Parquet ({', '.join((*LINES, PARQUET))})"
            )
        return [root]
    if not root.is_dir():
        raise DataError(
            f"train.train_policy.dataset.name: there is no folder or file {root}; give a local folder, nothing is fetched from a hub"
        )
    inner, found = inner_folder(root, subset), data_files(root, subset)
    if not found:
        raise DataError(f"train.train_policy.dataset.name: {inner} holds no JSONL or Parquet file")
    chosen = [path for path in found if split_of(path, inner) in splits] if splits else found
    if not chosen:
        have = ", ".join(sorted({split_of(path, inner) for path in found}))
        raise DataError(f"train.train_policy.dataset.split: {inner} holds no {' or '.join(splits)}; it holds {have}")
    return chosen


def read_rows(files: Iterable[Path], *, prompt_column: str, answer_column: str) -> list[dict[str, str]]:
    """Return the rows of all files as {prompt, answer}."""
    rows = [row for path in files for row in _read_file(path, prompt_column, answer_column)]
    if not rows:
        raise DataError("train.train_policy.dataset.name: the files hold no rows")
    return rows


def _read_file(path: Path, prompt_column: str, answer_column: str) -> Iterator[dict[str, str]]:
    if path.suffix == PARQUET:
        yield from _read_parquet(path, prompt_column, answer_column)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DataError(f"{path}, line {number} is no JSON: {error}; each line must hold one object") from error
            if not isinstance(record, dict):
                raise DataError(
                    f"{path}, line {number} holds no object; each line must hold one object with the columns"
                )
            _check_columns(path, record, prompt_column, answer_column, where=f", line {number}")
            yield {"prompt": str(record[prompt_column]), "answer": str(record[answer_column])}


def _read_parquet(path: Path, prompt_column: str, answer_column: str) -> Iterator[dict[str, str]]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path} is Parquet, which needs pyarrow: install the extra `runtime`, or convert the file to JSONL"
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        _check_columns(path, file.schema_arrow.names, prompt_column, answer_column)
        table: Any = file.read(columns=[prompt_column, answer_column])
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    for prompt, answer in zip(table[prompt_column].to_pylist(), table[answer_column].to_pylist(), strict=True):
        yield {"prompt": str(prompt), "answer": str(answer)}


def _check_columns(path: Path, have: Iterable[str], prompt_column: str, answer_column: str, *, where: str = "") -> None:
    names = list(have)
    for key, column in (("prompt_column_name", prompt_column), ("response_column_name", answer_column)):
        if column not in names:
            what = f"train.train_policy.{key} = {column!r}" if column else f"train.train_policy.{key} is empty"
            has = f"the columns {', '.join(names)}" if names else "no columns"
            raise DataError(f"{what}: {path}{where} has {has}; name one that all rows have")
