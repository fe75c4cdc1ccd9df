"""`aimaster-agent`: parse, then import the rest. Exit codes: 0 ended as told, 1 another agent serves the node, 2 usage."""

import asyncio
import errno
import sys
from pathlib import Path

import click


@click.command()
@click.option(
    "--run-dir", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of the run."
)
@click.option("--node", required=True, help="Name of this node in the run's plan.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=0, show_default=True, help="Port to listen on; 0 takes a free one.")
@click.option(
    "--front-pid", type=int, default=None, help="Process of `aimaster run`; when it is gone, members are stopped."
)
@click.option("--once", is_flag=True, help="Print what the agent sees now, and end.")
@click.option("--json", "as_json", is_flag=True, help="With --once: one JSON document.")
def main(run_dir: Path, node: str, host: str, port: int, front_pid: int | None, once: bool, as_json: bool) -> None:
    """The sidecar of one node: starts its members, watches them, keeps their snapshots.

    Its pace is set by AIMASTER_AGENT__* (progress_seconds, look_seconds, pulse_seconds, sensor_seconds, ...), and so is where it
    looks (kernel_log, log_paths, sys_root, cgroup_root, call_seconds). AIMASTER_AGENT__LABELS names its failure domains, widest first
    (rack=r7,switch=s3): copies of its snapshots go to nodes of others.
    """
    import os

    # structlog would load it for the sake of tracebacks on a terminal: three megabytes, for as long as the job runs.
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # so an import finds nothing

    import msgspec

    from agents.config import read_keeping, read_pace, read_plan, read_sight
    from aimaster.wire.ids import NodeId
    from aimaster.wire.places import RunPlaces

    run = RunPlaces(run_dir.resolve())
    try:
        plan, pace, keeping = read_plan(run), read_pace(os.environ), read_keeping(run, os.environ)
        sight = read_sight(os.environ)
    except (OSError, msgspec.MsgspecError) as error:
        raise click.UsageError(
            f"{error}; --run-dir must be the folder of a run that `aimaster run` has planned"
        ) from error
    if node not in plan.nodes:
        raise click.UsageError(f"no node {node!r} in {run.plan}; it has {', '.join(plan.nodes)}")
    name = NodeId(node)
    if once:
        from agents.once import look, render

        seen = look(run, name, plan, sight)
        click.echo(msgspec.json.format(msgspec.json.encode(seen)).decode() if as_json else render(seen))
        return
    from agents.node import Node, TakenError
    from agents.trainer import find_front
    from aimaster.telemetry.logs import set_up_logs
    from aimaster.telemetry.tokens import TokenFileError

    set_up_logs(node=node)
    agent = Node(run, name, plan, pace=pace, sight=sight, keeping=keeping, front=find_front(front_pid))
    try:
        asyncio.run(agent.serve(host, port))
    except TakenError as error:
        click.echo(f"aimaster-agent: {error}", err=True)
        sys.exit(1)
    except TokenFileError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise click.UsageError(
            f"port {port} of {host} is in use: name another with --port, or 0 for a free one"
        ) from error


if __name__ == "__main__":
    main()
