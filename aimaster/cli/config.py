"""`aimaster config show`: the resolved configuration of a file, or of a run as it was kept."""

import os
import sys
from pathlib import Path

import click

from aimaster.cli.exits import UsageError
from aimaster.cli.run import split_overrides
from aimaster.wire.places import RunPlaces


class ShowCommand(click.Command):
    """Takes dotted overrides out before click reads the rest."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        args, ctx.meta["overrides"] = split_overrides(args)
        return super().parse_args(ctx, args)


@click.group()
def config() -> None:
    """Show the resolved configuration of a file or a run."""


@config.command(cls=ShowCommand)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--origin", is_flag=True, help="Say behind each value who gave it.")
@click.pass_context
def show(ctx: click.Context, file: Path, *, origin: bool) -> None:
    """Print a TOML FILE (with `--section.key value` overrides), or the configuration that a run folder keeps."""
    from aimaster.cli.dry_run import print_notices
    from aimaster.settings import SettingsError, load, render_resolved

    if file.is_dir():
        kept = RunPlaces(file).resolved
        if not kept.exists():
            raise UsageError(f"{file} keeps no resolved.json: it is no run folder of a TOML file")
        sys.stdout.write(kept.read_text(encoding="utf-8"))
        return
    try:
        resolved = load(file, ctx.meta["overrides"], os.environ)
    except SettingsError as error:
        raise UsageError(str(error)) from error
    text = render_resolved(resolved)
    sys.stdout.write(text if origin else without_origins(text))
    print_notices(resolved, sys.stderr)


def without_origins(text: str) -> str:
    """The values alone: what stands behind the last `  # ` of a line is its origin."""
    lines = (line if line.startswith("#") else (line.rpartition("  # ")[0] or line) for line in text.splitlines())
    return "\n".join(lines) + "\n"
