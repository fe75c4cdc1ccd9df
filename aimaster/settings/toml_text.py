"""A value as TOML text, such that a TOML reader gives the value back."""

import re
from typing import Any

import msgspec
import orjson

BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml_value(value: Any) -> str:
    """A value in TOML."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return orjson.dumps(value).decode().replace("\x7f", "\\u007F")
        case int() | float():
            return repr(value)
        case dict():
            inner = (
                f"{name if BARE.fullmatch(name) else toml_value(name)} = {toml_value(item)}"
                for name, item in value.items()
            )
            return "{" + ", ".join(inner) + "}"
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case msgspec.Struct():
            return toml_value(msgspec.to_builtins(value))
        case _:
            return toml_value(str(value))  # dates and times of a free table
