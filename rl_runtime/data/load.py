"""Which rows a job trains on, and which it never does."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import overload

from aimaster.settings import GrpoSettings, JobSettings
from rl_runtime.data.errors import DataError
from rl_runtime.data.folder import find_files, read_rows
from rl_runtime.data.tasks import TASK_ROWS, task_maker, task_row

Row = dict[str, str]

PROMPT_PLACE = "{prompt}"
"""In aimaster.prompt_template."""


class Rows(Sequence[Row]):
    """So many rows, each found by its position; made or read when asked for."""

    def __init__(self, count: int, make: Callable[[int], Row]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    def row(self, position: int) -> Row:
        """Return the row at a position."""
        if not 0 <= position < self._count:
            raise IndexError(f"row {position} of {self._count}")
        return self._make(position)

    @overload
    def __getitem__(self, place: int) -> Row: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row]:
        if isinstance(place, slice):
            return [self._make(position) for position in range(*place.indices(self._count))]
        return self.row(place + self._count if place < 0 else place)


def load_rows(job: JobSettings) -> Rows:
    """Return the rows to train on; raises DataError."""
    if job.aimaster.task:
        return _task_rows(job.aimaster.task, TASK_ROWS, held_out=False)
    files, kept_back = _files(job), _kept_back(job)
    rows = _read(job, files)
    trained = [row for number, row in enumerate(rows) if not kept_back(number, row)] if kept_back else rows
    return _listed(trained)


def load_heldout(job: JobSettings) -> Rows:
    """Return rows that are never trained on: of the task's held-out tenth, the test split, or the share that is kept back.

    Without any of these the rows trained on are all there is, and they are returned: better measured on those than not at all.
    """
    if job.aimaster.task:
        return _task_rows(job.aimaster.task, job.aimaster.heldout_prompts, held_out=True)
    kept_back = _kept_back(job)
    if kept_back is not None:
        rows = [row for number, row in enumerate(_read(job, _files(job))) if kept_back(number, row)]
        return _listed(rows)
    dataset = _grpo(job).dataset
    try:
        files = find_files(dataset.name, ("test", "validation", "dev"), dataset.subset or "")
    except DataError:
        files = _files(job)
    return _listed(_read(job, files))


def _task_rows(name: str, count: int, *, held_out: bool) -> Rows:
    if task_maker(name) is None:
        raise DataError(f"aimaster.task = {name!r} is no built-in task; there are sort6, add2, copy6 and one_step")
    return Rows(count, lambda position: task_row(name, position, held_out=held_out))


def _listed(rows: Sequence[Row]) -> Rows:
    return Rows(len(rows), lambda position: dict(rows[position]))


def _grpo(job: JobSettings) -> GrpoSettings:
    policy = job.train.train_policy
    if not isinstance(policy, GrpoSettings):
        raise DataError('train.train_policy.type: rows are read for type = "grpo" only')
    return policy


def _files(job: JobSettings) -> list[Path]:
    dataset = _grpo(job).dataset
    return find_files(dataset.local_dir or dataset.name, dataset.split, dataset.subset or "")


def _read(job: JobSettings, files: list[Path]) -> list[Row]:
    policy, template = _grpo(job), job.aimaster.prompt_template
    rows = read_rows(files, prompt_column=policy.prompt_column_name, answer_column=policy.response_column_name)
    if not template:
        return rows
    return [row | {"prompt": template.replace(PROMPT_PLACE, row["prompt"])} for row in rows]


def _kept_back(job: JobSettings) -> Callable[[int, Row], bool] | None:
    """Return which rows `dataset.test_size` keeps back: a share by hash, or so many by position."""
    size = _grpo(job).dataset.test_size
    if not size:
        return None
    if isinstance(size, float) and size < 1.0:
        return lambda _, row: zlib.crc32(row["prompt"].encode()) % 1000 < size * 1000
    return lambda number, _: number < size
