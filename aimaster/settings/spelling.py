"""How a value may be spelled: kindly read, never guessed in silence.

Text from the environment or a flag is read as the key's type asks; a near-miss of true or false is that boolean,
with a notice; one name stands for a list or a map of one.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

TRUE = frozenset({"true", "yes", "on", "1"})
FALSE = frozenset({"false", "no", "off", "0"})


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """What a key's type accepts."""

    boolean: bool = False
    number: bool = False
    string: bool = False
    array: bool = False
    map: bool = False
    map_of_strings: bool = False
    nothing: bool = False
    words: frozenset[str] = frozenset()
    """The strings of a closed choice."""


@cache
def shape_of(hint: Any) -> Shape:
    """The shape of a type hint."""
    info = msgspec.inspect.type_info(hint)
    members = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    flags: dict[str, bool] = {}
    words: set[str] = set()
    for member in members:
        match member:
            case msgspec.inspect.BoolType():
                flags["boolean"] = True
            case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
                flags["number"] = True
            case msgspec.inspect.StrType():
                flags["string"] = True
            case msgspec.inspect.NoneType():
                flags["nothing"] = True
            case msgspec.inspect.DictType(value_type=inner):
                while isinstance(inner, msgspec.inspect.DictType):
                    inner = inner.value_type
                flags |= {"map": True, "map_of_strings": isinstance(inner, msgspec.inspect.StrType)}
            case msgspec.inspect.VarTupleType() | msgspec.inspect.TupleType():
                flags["array"] = True
            case msgspec.inspect.LiteralType(values=values):
                words.update(str(value) for value in values if isinstance(value, str))
                flags["number"] = flags.get("number", False) or any(isinstance(value, int) for value in values)
            case _:
                pass
    return Shape(words=frozenset(words), **flags)


def read_text(text: str, shape: Shape) -> Any:
    """Text of a variable or a flag as the value that the key asks for."""
    if text in shape.words:
        return text
    if shape.boolean and text.lower() in {"true", "false"}:
        return text.lower() == "true"
    if shape.nothing and text.lower() in {"", "none", "null"}:
        return None
    value: Any = text
    if not (shape.string and not (shape.number or shape.array or shape.map)):
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except (
            ValueError,
            RecursionError,
        ):  # no TOML, or a number or a nesting beyond all measure: as text it fits no number's key
            value = text
    if shape.array and isinstance(value, str):
        return (
            [part.strip() for part in value.split(",")] if "," in value or not (shape.words or shape.number) else value
        )
    if not isinstance(value, str) and (shape.string or shape.words) and not fits(value, shape):
        return text
    return value


def fits(value: Any, shape: Shape) -> bool:
    """Whether a parsed value is of a kind that the shape accepts."""
    match value:
        case bool():
            return shape.boolean
        case int() | float():
            return shape.number
        case list():
            return shape.array
        case dict():
            return shape.map
        case None:
            return shape.nothing
        case _:
            return shape.string or value in shape.words


def near_boolean(value: str) -> bool | None:
    """The boolean that a string most likely means: a word for it, or one slip away from true or false."""
    word = value.strip().lower()
    if word in TRUE or one_slip(word, "true"):
        return True
    if word in FALSE or one_slip(word, "false"):
        return False
    return None


def one_slip(word: str, meant: str) -> bool:
    """Whether one letter was added, left out, changed, or two neighbours were swapped.

    >>> one_slip("flase", "false"), one_slip("tru", "true"), one_slip("outputs", "true")
    (True, True, False)
    """
    if abs(len(word) - len(meant)) > 1:
        return False
    start = 0
    while start < min(len(word), len(meant)) and word[start] == meant[start]:
        start += 1
    rest, rest_meant = word[start:], meant[start:]
    swapped = rest[:2] == rest_meant[:2][::-1] and rest[2:] == rest_meant[2:]
    return swapped or rest[1:] == rest_meant[1:] or rest[1:] == rest_meant or rest == rest_meant[1:]


def as_path(value: str) -> Path | None:
    """The existing path that a string names, if any."""
    path = Path(value).expanduser()
    return path if value and path.exists() else None


def widen(value: Any, shape: Shape) -> Any:
    """One name, or a list of names, as the list or the map that the key holds."""
    if shape.map and not shape.number:
        if isinstance(value, str):
            return {value: 1.0}
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return dict.fromkeys(value, 1.0)
    if shape.array and isinstance(value, str) and not (shape.string or shape.number or value in shape.words):
        return [value]
    return value
