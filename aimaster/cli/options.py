"""Options that several verbs share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


class RunDir(click.Path):
    """A run folder by its path; an empty one is a mistake (an unset variable), never the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not value.strip():
            self.fail("the path is empty; leave the option out for the default", param, ctx)
        return super().convert(value, param, ctx)


def asks_master(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --master and --run-dir, the two ways to name a run."""
    master = click.option(
        "--master", metavar="URL", help="Address of the master. Default: AIMASTER_URL, else --run-dir."
    )
    run_dir = click.option(
        "--run-dir",
        type=RunDir(path_type=Path, file_okay=False),
        help="Run folder. Default: the newest live run under ./runs.",
    )
    return master(run_dir(command))
