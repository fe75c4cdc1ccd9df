"""Logs of a program: one JSON object a line where nobody looks, colours on a terminal; to stderr.

Fields: `ts` (RFC 3339, UTC), `level`, `event` (a stable word), and what was bound: `job`, `node`, `role`, `rank`, `epoch`, `step`, `incident`.
"""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import orjson
import structlog

from aimaster.telemetry.scrub import scrub

FIRST = ("ts", "level", "event", "job", "node", "role")
"""Fields that come first in a line, for the eye."""


def set_up_logs(*, stream: TextIO | None = None, level: str = "info", **bound: str) -> None:
    """Configure structlog and the standard library's logging for this process; `bound` fields are on every line."""
    out = _Patient(stream or sys.stderr)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.format_exc_info,
        _without_secrets,
    ]
    last: structlog.typing.Processor
    if out.isatty():
        last = structlog.dev.ConsoleRenderer(timestamp_key="ts")
    else:
        last = structlog.processors.JSONRenderer(serializer=_to_json)
    numbers = logging.getLevelNamesMapping()
    structlog.configure(
        processors=[*shared, last],
        wrapper_class=structlog.make_filtering_bound_logger(numbers[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", out)),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(cast("TextIO", out))
    formatter = structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[_drop_meta, last])
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(numbers[level.upper()], logging.WARNING))
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(**bound)


class _Patient:
    """A stream whose disk may be full: what cannot be written is lost and counted, and the program goes on."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lost = 0
        self.isatty = out.isatty

    def write(self, text: str) -> int:
        try:
            if self._lost and text.strip():
                self._out.write(f"({self._lost} log lines could not be written)\n")
            self._out.write(text)
            self._out.flush()
        except OSError:
            self._lost += 1
        else:
            self._lost = 0
        return len(text)

    def flush(self) -> None:
        """Every write is."""


def _to_json(record: dict[str, Any], **_: Any) -> str:
    first = {name: record[name] for name in FIRST if name in record}
    return orjson.dumps(first | record, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _without_secrets(_: Any, __: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in record.items():
        if isinstance(value, str):
            record[key] = scrub(value)
    return record


def _drop_meta(_: Any, __: str, record: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    record.pop("_record", None)
    record.pop("_from_structlog", None)
    return record
