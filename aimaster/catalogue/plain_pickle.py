"""Reads a pickle that holds plain values only, without the pickle module: nothing in it can be called, imported or built.

Process groups write their flight recorder as a pickle of dictionaries, lists, tuples, strings, numbers, booleans and None. Those opcodes are
interpreted; any other one ends the reading with an error. Bytes, values and depth are bounded by the caller's limit on the input.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, Final

PlainValue = dict[Any, Any] | list[Any] | tuple[Any, ...] | str | bytes | int | float | bool | None

_VALUES: Final = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "INT",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "BINBYTES",
        "SHORT_BINBYTES",
    ]
)
_CONSTANTS: Final[dict[str, PlainValue]] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: Final[dict[str, Callable[[], Any]]] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED: Final = frozenset({"PROTO", "FRAME"})
_PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_GETS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})


class NotPlainError(ValueError):
    """The bytes are no pickle, or one that holds more than plain values."""


class _Mark:
    pass


_MARK: Final = _Mark()


def read_plain_pickle(data: bytes) -> PlainValue:
    """The value, or `NotPlainError`."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.result()
            machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, UnicodeError, OverflowError) as error:
        raise NotPlainError(str(error)) from error
    raise NotPlainError("it has no end")


class _Machine:
    """The stack and the memo of the pickle language."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> PlainValue:
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise NotPlainError("more than one value, or none, is left at its end")
        value: PlainValue = self._stack[0]
        return value

    def step(self, name: str, argument: Any) -> None:
        """One opcode."""
        if name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self._stack.append(_EMPTY[name]())
        elif name in _PUTS:
            self._memo[int(argument)] = self._stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in _GETS:
            self._stack.append(self._memo[int(argument)])
        elif name not in _IGNORED:
            self._collect(name)

    def _collect(self, name: str) -> None:
        """Opcodes that put values into a container."""
        if name == "MARK":
            self._stack.append(_MARK)
        elif name in _TUPLES:
            count = _TUPLES[name]
            self._stack[-count:] = [tuple(self._stack[-count:])]
        elif name == "TUPLE":
            self._stack.append(tuple(self._since_mark()))
        elif name == "LIST":
            self._stack.append(self._since_mark())
        elif name == "DICT":
            self._stack.append(_pairs(self._since_mark()))
        elif name == "APPEND":
            value = self._stack.pop()
            self._top(list).append(value)
        elif name == "APPENDS":
            values = self._since_mark()
            self._top(list).extend(values)
        elif name == "SETITEM":
            value, key = self._stack.pop(), self._stack.pop()
            self._top(dict)[key] = value
        elif name == "SETITEMS":
            values = self._since_mark()
            self._top(dict).update(_pairs(values))
        else:
            raise NotPlainError(f"it holds more than plain values ({name})")

    def _since_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _top(self, kind: type[Any]) -> Any:
        if not isinstance(self._stack[-1], kind):
            raise NotPlainError(f"its top is no {kind.__name__}")
        return self._stack[-1]


def _pairs(values: list[Any]) -> dict[Any, Any]:
    return dict(zip(values[::2], values[1::2], strict=True))
