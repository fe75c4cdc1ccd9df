"""What is wrong with the rows of a data set, as far as the first of them tell; the runtime reads them all.

Of JSON lines the first ROWS_LOOKED_AT are read; of a Parquet file the footer, whose schema keeps each name behind its length.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson

from aimaster.settings.datafiles import LINES, PARQUET

ROWS_LOOKED_AT = 1000
LONGEST_LINE_BYTES = 16 << 20
FOOTER_BYTES = 64 << 20

Trouble = tuple[str, str]
"""A key, and what is wrong with its value."""


def rows_trouble(files: Sequence[Path], key: str, columns: Mapping[str, str]) -> list[Trouble]:
    """Say what is wrong with the files that `key` names; `columns` are wanted, each with the key that names it."""
    left, unread = ROWS_LOOKED_AT, False
    for file in files:
        try:
            if file.suffix in LINES:
                read, found = _lines(file, key, columns, left)
                left -= read
            elif file.suffix == PARQUET:
                unread, found = True, _parquet(file, columns)
            else:
                found = [(key, f"{file} is neither JSONL nor Parquet ({', '.join((*LINES, PARQUET))})")]
        except (OSError, ValueError) as error:
            found = [(key, f"{file} cannot be read: {error}")]
        if found or left <= 0:
            return found
    if left < ROWS_LOOKED_AT or unread or not files:
        return []
    return [(key, f"there are no rows in {', '.join(map(str, files[:3]))}{', …' if len(files) > 3 else ''}")]


def _lines(file: Path, key: str, columns: Mapping[str, str], most: int) -> tuple[int, list[Trouble]]:
    read, number = 0, 0
    with file.open("rb") as lines:
        while read < most and (line := lines.readline(LONGEST_LINE_BYTES)):
            number += 1
            if not line.strip():
                continue
            if len(line) == LONGEST_LINE_BYTES:
                return read, []  # longer than is looked at here
            read += 1
            found = _line(line, f"{file}, line {number}", key, columns)
            if found:
                return read, found
    return read, []


def _line(line: bytes, where: str, key: str, columns: Mapping[str, str]) -> list[Trouble]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return [(key, f"{where} is no JSON ({error}); each line must hold one object")]
    if not isinstance(row, dict):
        return [(key, f"{where} holds no object; each line must hold one object with the columns")]
    has = f"which has {', '.join(sorted(row)) or 'no columns'}"
    return [
        (column_key, f"{_no_column(column)} {where}, {has}")
        for column_key, column in columns.items()
        if column not in row
    ]


def _no_column(column: str) -> str:
    return f'"{column}" is no column of' if column else "is empty: name a column of"


def _parquet(file: Path, columns: Mapping[str, str]) -> list[Trouble]:
    footer = read_footer(file)
    return [
        (key, f"{_no_column(column)} {file}")
        for key, column in columns.items()
        if not (column and may_have_column(footer, column))
    ]


def read_footer(file: Path) -> bytes:
    """The metadata at the end of a Parquet file; ValueError where it is none."""
    with file.open("rb") as data:
        size = data.seek(0, os.SEEK_END)
        if size < 12:
            raise ValueError("it is too short for a Parquet file")
        data.seek(-8, os.SEEK_END)
        tail = data.read(8)
        if tail[4:] != b"PAR1":
            raise ValueError("it does not end as a Parquet file does")
        length = int.from_bytes(tail[:4], "little")
        if length > size - 12:
            raise ValueError("it is cut off: its metadata is longer than the file")
        data.seek(-8 - min(length, FOOTER_BYTES), os.SEEK_END)
        return data.read(min(length, FOOTER_BYTES))


def may_have_column(footer: bytes, column: str) -> bool:
    """False only when the name, which a schema keeps behind its length, stands nowhere: then there is no such column."""
    name = column.encode()
    return (bytes([len(name)]) + name if len(name) < 128 else name) in footer
