"""`aimaster`: one command, its verbs loaded when they are called, so that `--help` answers in about a tenth of a second.

A verb is a row of VERBS: the module and name of its click command, and the line that `--help` shows. Nothing is imported to
list them. Exit codes are the same for every verb and printed by `--help`.
"""

import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

import click

from aimaster.cli.exits import EXIT_CODES, FINE, INTERRUPTED, CommandError

VERBS: Final[dict[str, tuple[str, str, str]]] = {
    "run": ("aimaster.cli.run", "run", "Run a job here: a TOML file, or any command after `--`."),
    "serve": ("aimaster.cli.serve", "serve", "Run a job's master alone."),
    "status": ("aimaster.cli.status", "status", "Show a run: members, step, reward, snapshots, incidents."),
    "incidents": ("aimaster.cli.incidents", "incidents", "List what failed and why; with an ID, one incident in full."),
    "checkpoints": ("aimaster.cli.checkpoints", "checkpoints", "List the snapshots of a run, tier by tier."),
    "logs": ("aimaster.cli.logs", "logs", "Show a member's output."),
    "audit": ("aimaster.cli.audit", "audit", "Check a run's ledger: every prompt trained once, none lost."),
    "stop": ("aimaster.cli.stop", "stop", "Flush, then stop a run; the same command resumes it."),
    "diagnose": ("aimaster.cli.diagnose", "diagnose", "Find the root of a failure in log files."),
    "config": ("aimaster.cli.config", "config", "Show the resolved configuration of a file or a run."),
}


class LazyGroup(click.Group):
    """A group whose verbs are imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in VERBS:
            return None
        module, name, _ = VERBS[cmd_name]
        command = getattr(importlib.import_module(module), name)
        return command if isinstance(command, click.Command) else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            ctx.fail(f"no verb {args[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            return FINE  # `| head` has what it wants; click itself would end with the code of a failure

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, _, line) in VERBS.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="aimaster-selfheal", prog_name="aimaster")
def cli() -> None:
    """Keep a training job going when its parts fail.

    A verb that asks about a run finds its master by --master, else AIMASTER_URL, else --run-dir, else the newest live run
    under ./runs.
    """


def main(argv: Sequence[str] | None = None) -> Any:
    """Run one command line and exit with its code."""
    _print_anywhere()
    try:
        code = cli.main(args=None if argv is None else list(argv), prog_name="aimaster", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except CommandError as error:
        click.echo(f"aimaster: {error}", err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    _let_go_of_closed_pipes()
    sys.exit(code if isinstance(code, int) else 0)


def _print_anywhere() -> None:
    """A terminal or pipe of another encoding gets a mark for what it cannot show, and the rest."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _let_go_of_closed_pipes() -> None:
    """When the reader (`head`, `less`) has gone, what is still buffered goes nowhere, without a complaint at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
