"""`aimaster run FILE --dry-run`: the resolved configuration with each value's origin, and what is to be said of it.

The configuration goes to `stream`, as TOML that reads back as the same, or as JSON; warnings and notes go to `talk`. Nothing is started.
"""

import sys
from typing import TextIO

from aimaster.settings import Resolved, render_resolved, to_json


def print_dry_run(resolved: Resolved, stream: TextIO, talk: TextIO | None = None, *, as_json: bool = False) -> None:
    """Print both; absent paths and devices are warnings here."""
    talk = talk or sys.stderr
    stream.write(to_json(resolved, mask=True).decode() + "\n" if as_json else render_resolved(resolved))
    stream.flush()
    print_notices(resolved, talk)
    for obstacle in resolved.obstacles:
        print(f"warning: {obstacle}", file=talk)


def print_notices(resolved: Resolved, talk: TextIO) -> None:
    """Warnings and notes, one line each."""
    for warning in resolved.warnings:
        print(f"warning: {warning}", file=talk)
    for note in resolved.notes:
        print(f"note: {note}", file=talk)
