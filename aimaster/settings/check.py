"""From a tree of given values to a typed record: every wrong key and every wrong type is found in one go.

Unknown keys are refused with the nearest name; legacy keys and near-miss booleans are accepted with one notice each. A number that is
none (NaN, infinite), or that no file of the run can hold, is refused wherever it stands, in free tables as well.
"""

import difflib
import math
from collections.abc import Iterator, Sequence
from functools import cache
from types import UnionType
from typing import Any, get_args

import msgspec

from aimaster.settings.errors import Notice, Problem
from aimaster.settings.job import JobSettings
from aimaster.settings.legacy import legacy_text
from aimaster.settings.sources import Given, Tree
from aimaster.settings.spelling import as_path, near_boolean, read_text, shape_of, widen
from aimaster.settings.table import Table
from aimaster.settings.train_policy import GrpoSettings, SftSettings

Tables = tuple[type[Table], ...]


class Checked(msgspec.Struct, kw_only=True):
    """What a walk over the tree gathers."""

    problems: list[Problem] = []
    warnings: list[Notice] = []
    notes: list[Notice] = []
    origins: dict[str, str] = {}
    """Dotted path of each key that somebody gave, with who gave it."""
    legacy: dict[str, Any] = {}
    """Legacy keys and their values, as given."""


@cache
def tables_of(hint: Any) -> Tables:
    """The table types a hint allows: one, several that `type` chooses from, or none for a plain key."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(option for option in options if isinstance(option, type) and issubclass(option, Table))


@cache
def fields_of(table: type[Table]) -> dict[str, msgspec.structs.FieldInfo]:
    """The keys of a table."""
    return {field.name: field for field in msgspec.structs.fields(table)}


def known_keys(table: type[Table] = JobSettings, prefix: str = "") -> Iterator[str]:
    """Every dotted path of the configuration that holds a value."""
    for name, field in fields_of(table).items():
        below = tables_of(field.type)
        if not below:
            yield prefix + name
        for option in below:
            if len(below) > 1:
                yield f"{prefix}{name}.type"
            yield from known_keys(option, f"{prefix}{name}.")


def check(tree: Tree) -> tuple[JobSettings, Checked]:
    """The typed record and all that is to be said about it. With problems, the record is not to be used."""
    checked = Checked()
    job = _table(JobSettings, tree, (), checked)
    assert isinstance(job, JobSettings)  # noqa: S101 - tells mypy what _table was asked for
    return job, checked


def _table(table: type[Table], node: Tree, path: Sequence[str], checked: Checked) -> Table:
    values: dict[str, Any] = {}
    fields = fields_of(table)
    for name, below in node.items():
        here = (*path, name)
        if name not in fields:
            _unknown(table, below, here, checked)
            continue
        hint = fields[name].type
        options = tables_of(hint)
        if not options:
            _leaf(below, hint, here, checked, values)
            continue
        inner = _as_node(below, here, checked)
        if inner is not None:
            values[name] = _table(_choose(options, inner, here, checked), inner, here, checked)
    return table(**values)


def _as_node(below: Any, path: Sequence[str], checked: Checked) -> Tree | None:
    if not isinstance(below, Given):
        return dict(below)
    value = read_text(below.value, shape_of(dict[str, Any])) if below.is_text else below.value
    if isinstance(value, dict):
        return {name: Given(item, below.origin) for name, item in value.items()}
    problem = Problem(key=".".join(path), where=below.origin, text=f"is a table of keys, not a value ({_shown(value)})")
    checked.problems.append(problem)
    return None


def _choose(options: Tables, node: Tree, path: Sequence[str], checked: Checked) -> type[Table]:
    """GRPO or SFT: as `type` says, else as the keys tell, as Cosmos-RL does."""
    if len(options) == 1:
        return options[0]
    given = node.pop("type", None)
    if given is None:
        only_sft = set(fields_of(SftSettings)) - set(fields_of(GrpoSettings))
        only_grpo = set(fields_of(GrpoSettings)) - set(fields_of(SftSettings))
        chosen = SftSettings if only_sft & set(node) and not only_grpo & set(node) else GrpoSettings
        text = f'is missing; taken as "{chosen.__struct_config__.tag}" from the keys beside it'
        checked.notes.append(Notice(key=".".join([*path, "type"]), where="", text=text))
        return chosen
    by_tag = {str(option.__struct_config__.tag): option for option in options}
    value = given.value if isinstance(given, Given) else "a table"
    key = ".".join([*path, "type"])
    if value in by_tag:
        checked.origins[key] = given.origin
        return by_tag[value]
    where = given.origin if isinstance(given, Given) else ""
    checked.problems.append(Problem(key=key, where=where, text=f"is {_shown(value)}; write one of {', '.join(by_tag)}"))
    return GrpoSettings


def _unknown(table: type[Table], below: Any, path: Sequence[str], checked: Checked) -> None:
    key, where = ".".join(path), origin_of(below)
    text = legacy_text(path)
    if text is not None:
        checked.legacy[key] = plain(below)
        checked.warnings.append(Notice(key=key, where=where, text=f"legacy key, accepted: {text}"))
        return
    near = difflib.get_close_matches(path[-1], fields_of(table), n=1, cutoff=0.6)
    by_name = {known.rsplit(".", 1)[-1]: known for known in reversed(list(known_keys()))}
    if near:
        remedy = f"; did you mean {'.'.join([*path[:-1], near[0]])}?"
    else:
        elsewhere = difflib.get_close_matches(path[-1], by_name, n=1, cutoff=0.6)
        remedy = f"; did you mean {by_name[elsewhere[0]]}?" if elsewhere else ""
    checked.problems.append(Problem(key=key, where=where, text=f"unknown key{remedy}"))


def _leaf(below: Any, hint: Any, path: Sequence[str], checked: Checked, values: dict[str, Any]) -> None:
    key, where, shape = ".".join(path), origin_of(below), shape_of(hint)
    if isinstance(below, Given):
        value = read_text(below.value, shape) if below.is_text else below.value
    else:
        value = plain(below, strings=shape.map_of_strings)
    if shape.boolean and isinstance(value, str) and value not in shape.words:
        value = _boolean(value, key, where, checked, keep_path=key == "train.resume", keep_string=shape.string)
    if path[-1] == "dp_shard_size" and value == -1:
        checked.warnings.append(Notice(key=key, where=where, text="-1 is the default of mid-2025; read as 1, today's"))
        value = 1
    value = widen(value, shape)
    if (trouble := number_trouble(value)) is not None:
        checked.problems.append(Problem(key=key, where=where, text=trouble))
        return
    try:
        values[path[-1]] = msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        checked.problems.append(
            Problem(key=key, where=where, text=f"is {_shown(value)}: {_reason(error, shape.words)}")
        )
    else:
        checked.origins[key] = where


def number_trouble(value: Any) -> str | None:
    """Why a number in a value, at any depth, can stand nowhere."""
    match value:
        case dict() | list() | tuple():
            inner = value.values() if isinstance(value, dict) else value
            return next((trouble for item in inner if (trouble := number_trouble(item)) is not None), None)
        case float() if not math.isfinite(value):
            return f"is {value}; write a finite number"
        case int() if not -(2**63) <= value < 2**63:
            return f"is {_shown(value)}; whole numbers have at most 64 bits here"
        case _:
            return None


def _boolean(value: str, key: str, where: str, checked: Checked, *, keep_path: bool, keep_string: bool) -> bool | str:
    """A string where a boolean may stand. Only train.resume may be a path as well: an existing one is that path."""
    if keep_string and (not keep_path or as_path(value) is not None):
        return value
    meant = near_boolean(value)
    if meant is None:
        return value
    word = str(meant).lower()
    checked.warnings.append(
        Notice(key=key, where=where, text=f"{_shown(value)} is read as {word}; write {word} without quotes")
    )
    return meant


def origin_of(below: Any) -> str:
    """Who gave a value; for a table, who gave its last key."""
    if isinstance(below, Given):
        return below.origin
    origins = [origin_of(item) for item in below.values()]
    return origins[-1] if origins else ""


def plain(below: Any, *, strings: bool = False) -> Any:
    """A leaf or a free table without the marks of who gave what; text stays text where the table holds strings."""
    if not isinstance(below, Given):
        return {name: plain(item, strings=strings) for name, item in below.items()}
    return read_text(below.value, shape_of(Any)) if below.is_text and not strings else below.value


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of many digits"  # Python does not even print the longest
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 80 else text[:77] + "…"


def _reason(error: msgspec.ValidationError, words: frozenset[str]) -> str:
    text = str(error).replace("`", "").lower()
    if words:
        text += f"; write one of {', '.join(sorted(words))}"
    return text
