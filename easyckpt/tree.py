"""The state without its tensors, as JSON and back, pure: every value comes back as it was, or is refused by its path.

    dict with string keys   a JSON object          dict with other keys   {"$dict": [[key, value], ...]}
    tuple                   {"$tuple": [...]}      tensor                 {"$tensor": "path/of/it"}
    bytes                   {"$bytes": base64}     nan, inf, big integers {"$float": "nan"}, {"$int": "..."}

Nothing is pickled and nothing is looked up by name: what comes out is dicts, lists, tuples, strings, numbers, bytes and None.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from easyckpt.errors import Unsupported

Path = tuple[str, ...]
_JSON_INT_LIMIT = 1 << 63
_DEEPEST = 200
"""Levels of a state; what goes on below holds itself, or is none."""
_VERBATIM = frozenset({str, bool, type(None)})
_PLAIN = frozenset({list, int, float})


def part(key: object) -> str:
    """One part of a path: "/" and "~" inside a key are written as JSON pointers write them."""
    text = str.__str__(key) if isinstance(key, str) else str(key)
    return text.replace("~", "~0").replace("/", "~1") if "/" in text or "~" in text else text


def join(path: Path) -> str:
    return "/".join(path)


def encode(value: Any, leaf: Callable[[str, Any], Any], path: str | None = None) -> Any:
    """JSON for `value`. `leaf` is asked, with the path, about all that is no JSON by its exact type: it returns a replacement for what it takes
    (a tensor), a new value to go on with, or `value`.
    """
    kind = type(value)
    if kind in _VERBATIM:
        return _text(value, path) if kind is str else value
    if kind is not dict and kind not in _PLAIN:
        value = leaf(path or "", value)
        if type(value) is TensorAt:
            return value.document
    match value:
        case dict() | Mapping():
            return _encode_mapping(value, leaf, path)
        case None | bool():
            return value
        case str():
            return _text(str.__str__(value), path)  # an enum's own str() is its name
        case int():
            return int(value) if -_JSON_INT_LIMIT <= value < _JSON_INT_LIMIT else {"$int": str(value)}
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case list():
            return _encode_items(value, leaf, path)
        case tuple() if not hasattr(value, "_fields"):
            return {"$tuple": _encode_items(value, leaf, path)}
        case bytes():
            return {"$bytes": base64.b64encode(value).decode()}
    raise Unsupported(
        f"state[{path or ''!r}] is a {type(value).__module__}.{type(value).__qualname__}, which a snapshot cannot hold; nothing was saved."
        " Put a tensor, a number, text, bytes, a dict, list or tuple of these, or an object with state_dict() there"
    )


class TensorAt:
    """Stands where a tensor was."""

    __slots__ = ("document", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.document = {"$tensor": name}


def decode(document: Any, tensor: Callable[[str], Any]) -> Any:
    """The value again, with `tensor(name)` where a tensor was."""
    if isinstance(document, list):
        return [decode(item, tensor) for item in document]
    if not isinstance(document, dict):
        return document
    if len(document) == 1:
        ((key, value),) = document.items()
        match key:
            case "$tensor":
                return tensor(value)
            case "$dict":
                return {decode(item[0], tensor): decode(item[1], tensor) for item in value}
            case "$tuple":
                return tuple(decode(item, tensor) for item in value)
            case "$bytes":
                return base64.b64decode(value)
            case "$float":
                return float(value)
            case "$int":
                return int(value)
    return {key: decode(value, tensor) for key, value in document.items()}


def merge(documents: Sequence[Any]) -> Any:
    """The documents of several ranks as one: each key that any has, with the first one's value."""
    first, *others = documents
    if not others or not isinstance(first, dict):
        return first
    dicts = [one for one in others if isinstance(one, dict)]
    if len(first) == 1 and next(iter(first)).startswith("$"):
        if "$dict" not in first:
            return first
        pairs: dict[str, list[Any]] = {}
        for document in (first, *dicts):
            for key, value in document.get("$dict", ()):
                pairs.setdefault(repr(key), [key]).append(value)
        return {"$dict": [[key, merge(values)] for key, *values in pairs.values()]}
    names = dict.fromkeys(name for document in (first, *dicts) for name in document)
    return {name: merge([document[name] for document in (first, *dicts) if name in document]) for name in names}


def _encode_items(value: Sequence[Any], leaf: Callable[[str, Any], Any], path: str | None) -> list[Any]:
    _refuse_depth(path)
    return [encode(item, leaf, _below(path, str(index))) for index, item in enumerate(value)]


def _encode_mapping(value: Mapping[Any, Any], leaf: Callable[[str, Any], Any], path: str | None) -> Any:
    items: dict[str, Any] = {}
    """By the part that a key makes in a path: for plain keys, that is the object."""
    _refuse_depth(path)
    plain = True
    for key, item in value.items():
        if type(key) is str and key[:1] != "$":
            name = key if "/" not in key and "~" not in key else part(key)
            plain = plain and name is key
        else:
            name, plain = part(key), False
        if _text(name, path) in items:
            raise Unsupported(f"state[{path or ''!r}] has two keys that read {name!r}; nothing was saved. Rename one")
        items[name] = encode(item, leaf, name if path is None else f"{path}/{name}")
    if plain:
        return items
    if all(type(key) is str and key[:1] != "$" for key in value):
        return dict(zip(value, items.values(), strict=True))
    for key in value:
        if not isinstance(key, str | int | float | bool | None):
            raise Unsupported(
                f"state[{path or ''!r}] has a key of {type(key)}, which a snapshot cannot hold; use text or a number"
            )
    return {"$dict": [[encode(key, _as_is), item] for key, item in zip(value, items.values(), strict=True)]}


def _refuse_depth(path: str | None) -> None:
    if path is not None and path.count("/") >= _DEEPEST:
        start = "/".join(path.split("/", 8)[:8])
        raise Unsupported(
            f"state[{start!r}] goes on for more than {_DEEPEST} levels, or holds itself; nothing was saved"
        )


def _text(text: str, path: str | None) -> str:
    """The text, which may hold anything but halves of characters."""
    try:
        text.isascii() or text.encode()
    except UnicodeEncodeError:
        raise Unsupported(
            f"state[{path or ''!r}] has text that is no Unicode: {text[:40]!r}; nothing was saved"
        ) from None
    return text


def _below(path: str | None, name: str) -> str:
    return name if path is None else f"{path}/{name}"


def _as_is(_path: str, value: Any) -> Any:
    return value
