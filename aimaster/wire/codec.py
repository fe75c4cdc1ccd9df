"""Encoding of records: msgpack between programs, JSON where people look. Unknown tags and wrong types are refused with their path."""

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

CONTENT_TYPE = "application/msgpack"


def encode(record: Any) -> bytes:
    """Return the msgpack bytes of a record."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Return the record of `kind` in `data`; raises msgspec.ValidationError or msgspec.DecodeError with the path of the fault."""
    return msgspec.msgpack.decode(data, type=kind)


def encode_json(record: Any) -> bytes:
    """Return the record as JSON."""
    return msgspec.json.encode(record)


def decode_json(data: bytes | str, kind: type[T]) -> T:
    """Return the record of `kind` in a JSON text; raises as `decode` does."""
    return msgspec.json.decode(data, type=kind)
