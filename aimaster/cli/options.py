"""Options that several verbs share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def asks_master(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --master and --run-dir, the two ways to name a run."""
    master = click.option(
        "--master", metavar="URL", help="Address of the master. Default: AIMASTER_URL, else --run-dir."
    )
    run_dir = click.option(
        "--run-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Run folder. Default: the newest live run under ./runs.",
    )
    return master(run_dir(command))
