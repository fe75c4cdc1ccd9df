"""`aimaster run FILE` and `aimaster run -- COMMAND`: reads the command line, and hands over to the front process.

Everything after `--` is the user's own command line, passed untouched; before it, `--section.key value` overrides a key of the
file, and what is left are the options below.
"""

import os
import re
import sys
from pathlib import Path

import click

from aimaster.cli.exits import UsageError
from aimaster.cli.options import RunDir

MOST_RANKS = 1024
"""On one machine; above it a number is a slip of the finger, and would be as many processes."""
NUMBER = re.compile(r"-[\d.]")
DOTTED = re.compile(r"--[\w-]+\.[\w.\-]+(=.*)?", re.DOTALL)


class RunCommand(click.Command):
    """Takes the user's command line and the dotted overrides out before click reads the rest."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        command: list[str] | None = None
        if "--" in args:
            cut = args.index("--")
            args, command = args[:cut], args[cut + 1 :]
        args, overrides = split_overrides(args)
        ctx.meta["command"], ctx.meta["overrides"] = command, overrides
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[--section.key VALUE]...", "|", "-- COMMAND..."]


def split_overrides(args: list[str]) -> tuple[list[str], list[str]]:
    """The words that are no override, and the overrides with their values. A bare `--section.key` means true."""
    rest: list[str] = []
    overrides: list[str] = []
    position = 0
    while position < len(args):
        word = args[position]
        position += 1
        if not DOTTED.fullmatch(word):
            rest.append(word)
            continue
        overrides.append(word)
        following = args[position] if position < len(args) else "--"
        if "=" not in word and (not following.startswith("-") or NUMBER.match(following)):
            overrides.append(following)
            position += 1
    return rest, overrides


@click.command(cls=RunCommand)
@click.argument("words", nargs=-1, metavar="[FILE]")
@click.option(
    "--run-dir",
    type=RunDir(path_type=Path, file_okay=False),
    help="Run folder. Default: runs/NAME, of the file or command.",
)
@click.option(
    "--nproc-per-node", "--nproc_per_node", metavar="N", help="Ranks of the command: a number, cpu, gpu or auto."
)
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=click.IntRange(min=0),
    default=None,
    help="Restarts of the command after transient or unknown deaths. Default: 3. A user's exception is never retried.",
)
@click.option("--drill", metavar="FAULT:SUBJECT@STEP,...", help="Break parts on purpose: kill:, stop:, hang:, node:.")
@click.option("--dry-run", is_flag=True, help="Print the resolved configuration and warnings; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary (with --dry-run: the configuration) as JSON.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the master. Default: a free one.")
@click.pass_context
def run(
    ctx: click.Context,
    *,
    words: tuple[str, ...],
    run_dir: Path | None,
    nproc_per_node: str | None,
    max_restarts: int | None,
    drill: str | None,
    dry_run: bool,
    as_json: bool,
    port: int,
) -> int:
    """Run a job on this machine and keep it going: a TOML FILE, or any command after `--`.

    \b
    aimaster run examples/tiny.toml --train.max_num_steps 30
    aimaster run --nproc-per-node 2 -- python train.py --my-option 3

    An unfinished run in the run folder is resumed; a finished one is kept, and a numbered folder begun. Ctrl-C flushes and
    stops, a second one kills. A command reads nothing: its stdin is /dev/null. Exits 0 when the job finished, 1 when it failed, 130 when it was stopped.
    """  # noqa: D301 - \b is click's mark for lines to be kept as they are
    command: list[str] | None = ctx.meta["command"]
    overrides: list[str] = ctx.meta["overrides"]
    file = words[0] if words else None
    if file is not None and command is not None:
        raise UsageError(f"both a file ({file}) and a command after `--`: give one of them")
    if command is not None:
        if not command:
            raise UsageError(
                "nothing stands after `--`: name the command, for example `aimaster run -- python train.py`"
            )
        refuse(
            {"--dry-run": dry_run, "a --section.key": bool(overrides)},
            "means nothing for a command; it is for a TOML file",
        )
        from aimaster.cli.front_start import run_command

        ranks = count_ranks(nproc_per_node)
        restarts = 3 if max_restarts is None else max_restarts
        return run_command(
            command, run_dir=run_dir, ranks=ranks, max_restarts=restarts, drill=drill or "", port=port, as_json=as_json
        )
    refuse(
        {"--nproc-per-node": nproc_per_node is not None, "--max-restarts": max_restarts is not None},
        "is for a command after `--`; a TOML file says it with its replicas and aimaster.budgets",
    )
    if file is None:
        raise UsageError("nothing to run: name a TOML file, or a command after `--` (see `aimaster run --help`)")
    if not file.endswith(".toml") and not Path(file).is_file():
        raise UsageError(
            f"{file} is no TOML file. To run a command, put `--` before it: aimaster run -- {' '.join(words)}"
        )
    if len(words) > 1:
        raise UsageError(
            f"one file at a time: {' '.join(words[1:])} is too much. Keys of the file are --section.key VALUE."
        )
    if drill is not None:
        overrides = [*overrides, f"--aimaster.drill={drill}"]
    return run_file(Path(file), overrides, run_dir=run_dir, dry_run=dry_run, port=port, as_json=as_json)


def run_file(file: Path, overrides: list[str], *, run_dir: Path | None, dry_run: bool, port: int, as_json: bool) -> int:
    from aimaster.settings import SettingsError, load

    try:
        resolved = load(file, overrides, os.environ)
    except SettingsError as error:
        raise UsageError(str(error)) from error
    if dry_run:
        from aimaster.cli.dry_run import print_dry_run
        from aimaster.cli.front_start import check_drill

        check_drill(resolved.job, file)
        print_dry_run(resolved, sys.stdout, as_json=as_json)
        return 0
    from aimaster.cli.front_start import run_training

    return run_training(resolved, file, run_dir=run_dir, port=port, as_json=as_json)


def refuse(given: dict[str, bool], why: str) -> None:
    """End with the first option that was given and has no meaning here."""
    for option, is_given in given.items():
        if is_given:
            raise UsageError(f"{option} {why}")


def count_ranks(text: str | None) -> int | None:
    """The words of torchrun for the number of processes; None when nothing was said."""
    if text is None:
        return None
    if text in ("gpu", "auto"):
        from aimaster.settings.resolve import count_gpus

        gpus = count_gpus(os.environ)
        if gpus or text == "gpu":
            return gpus or _no_gpu()
        text = "cpu"
    if text == "cpu":
        return os.cpu_count() or 1
    if not text.isdecimal() or not text.strip("0"):
        raise UsageError(f"--nproc-per-node {text}: expected a number from 1, or cpu, gpu or auto")
    if len(text) > len(str(MOST_RANKS)) or int(text) > MOST_RANKS:
        raise UsageError(f"--nproc-per-node {text[:20]}: at most {MOST_RANKS} ranks are started on one machine")
    return int(text)


def _no_gpu() -> int:
    raise UsageError("--nproc-per-node gpu: no GPU is here")
