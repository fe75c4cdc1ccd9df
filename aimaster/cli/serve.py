"""`aimaster serve`: the master of one run folder, by itself."""

from pathlib import Path

import click

from aimaster.cli.exits import UsageError
from aimaster.cli.options import RunDir
from aimaster.wire.places import RunPlaces


@click.command()
@click.option(
    "--run-dir", required=True, type=RunDir(path_type=Path, file_okay=False), help="Run folder with its plan.json."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on. Default: a free one.")
@click.option("--front-pid", type=int, default=None, help="End the run when this process ends.")
def serve(run_dir: Path, port: int, front_pid: int | None) -> int:
    """Run a job's master alone; `aimaster run` starts one by itself."""
    if not RunPlaces(run_dir).plan.exists():
        raise UsageError(f"{run_dir} has no plan.json: `aimaster run` writes it")
    # asyncio and aiohttp take a quarter of a second to import; nobody else needs them.
    from aimaster.master.serve import main

    return main(run_dir, port=port, front_pid=front_pid)
