"""The resolved configuration for people (TOML, each value with its origin) and for members (JSON)."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson

from aimaster.settings.check import fields_of, tables_of
from aimaster.settings.job import JobSettings
from aimaster.settings.resolve import Resolved
from aimaster.settings.sources import SECRET
from aimaster.settings.table import Table
from aimaster.settings.toml_text import toml_value

MASK = "********"
FREE_TABLES = ("custom", "aimaster.env")
"""Tables whose keys the user names, so that a secret may be among them."""
ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
FORMAT = 1


def render_resolved(resolved: Resolved) -> str:
    """TOML that reads back as the same configuration; the comment behind each value is its origin."""
    return "\n".join(_table(resolved.job, "", resolved.origins)).strip() + "\n"


def to_json(resolved: Resolved, *, mask: bool = False) -> bytes:
    """What is kept with the run. `mask` hides secrets; members need them, so the file is for its owner only."""
    job = msgspec.to_builtins(resolved.job)
    document = {
        "format": FORMAT,
        "source": resolved.source,
        "job": _masked_tables(job) if mask else job,
        "origins": resolved.origins,
        "legacy": resolved.legacy,
        "warnings": [str(notice) for notice in resolved.warnings],
        "notes": [str(notice) for notice in resolved.notes],
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2)


def from_json(content: bytes) -> JobSettings:
    """The configuration of a run, as its members read it."""
    document = msgspec.json.decode(content, type=_Kept)
    if document.format != FORMAT:
        message = f"resolved configuration of format {document.format}; this version reads format {FORMAT}"
        raise msgspec.ValidationError(message)
    return document.job


class _Kept(msgspec.Struct, frozen=True):
    format: int
    job: JobSettings


def _table(table: Table, prefix: str, origins: dict[str, str]) -> Iterator[str]:
    below: list[tuple[str, Table]] = []
    tag = table.__struct_config__.tag
    if tag is not None:
        yield _line("type", tag, origins.get(f"{prefix}type", "default"))
    for name, field in fields_of(type(table)).items():
        key, value = prefix + name, getattr(table, name)
        if isinstance(value, Table):
            below.append((key, value))
        elif value is None:
            yield f"# {name}{'.…' if tables_of(field.type) else ''} is unset  # {origins.get(key, 'default')}"
        else:
            yield _line(name, mask_secrets(value, free=key in FREE_TABLES), _origin(key, origins))
    for key, value in below:
        yield ""
        yield f"[{key}]"
        yield from _table(value, f"{key}.", origins)


def _origin(key: str, origins: dict[str, str]) -> str:
    return origins.get(key, "default")


def _line(name: str, value: Any, origin: str) -> str:
    return f"{name} = {toml_value(value)}  # {origin}"


def mask_secrets(value: Any, *, free: bool) -> Any:
    """A value as it may be shown: passwords in addresses, and what a free table's keys call a secret, are hidden."""
    match value:
        case str():
            return ADDRESS.sub(f"{MASK}@", value)
        case dict():
            return {k: MASK if free and SECRET.search(str(k)) else mask_secrets(v, free=free) for k, v in value.items()}
        case list() | tuple():
            return type(value)(mask_secrets(item, free=free) for item in value)
        case _:
            return value


def _masked_tables(job: dict[str, Any]) -> dict[str, Any]:
    masked: dict[str, Any] = mask_secrets(job, free=False)
    masked["custom"] = mask_secrets(job["custom"], free=True)
    masked["aimaster"]["env"] = mask_secrets(job["aimaster"]["env"], free=True)
    return masked
