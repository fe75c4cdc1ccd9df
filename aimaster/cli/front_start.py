"""From a command line to a running front: folder, checks, plan, files; then `Front.drive`, then the summary.

Nothing is written before the checks are through, and nothing is started before all files are written.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from aimaster.cli.dry_run import print_notices
from aimaster.cli.exits import UsageError
from aimaster.cli.front import Front
from aimaster.cli.front_display import choose_display
from aimaster.cli.front_drills import Drill, DrillError, check_drills, parse_drills
from aimaster.cli.front_folder import RunFolder, as_document, open_folder, unusable, write_atomically
from aimaster.cli.front_output import OutputFollower
from aimaster.cli.front_plan import PlanError, command_name, plan_command, plan_training
from aimaster.cli.front_preflight import check_command, check_training
from aimaster.cli.front_report import print_summary
from aimaster.cli.front_resume import check_resume
from aimaster.cli.reach import RUNS
from aimaster.clusters.local import Local
from aimaster.settings import JobSettings, Resolved, to_json
from aimaster.wire.ids import RunId
from aimaster.wire.topology import JobPlan


def run_training(resolved: Resolved, file: Path, *, run_dir: Path | None, port: int, as_json: bool) -> int:
    """`aimaster run FILE`."""
    job = resolved.job
    refuse_troubles([*map(str, resolved.obstacles), *check_training(job, port)])
    drills = read_drills(job.aimaster.drill)
    print_notices(resolved, sys.stderr)
    name = file.stem

    plan_for = training_plan(job, name)
    check_plan(plan_for, drills)
    changes: list[str] = []
    folder = open_folder(
        run_dir or RUNS / name,
        name=name,
        kind="rl",
        source=(str(file.resolve()),),
        now=time.time(),
        named=run_dir is not None,
        accept=lambda places: changes.extend(check_resume(places, job)),
    )
    try:
        for change in changes:
            print(f"note: the run goes on with another value: {change}", file=sys.stderr)
        _put(folder, folder.places.resolved, to_json(resolved))
        return conduct(folder, plan_for(folder.info.run_id), drills, port=port, as_json=as_json)
    finally:
        folder.close()


def training_plan(job: JobSettings, name: str) -> Callable[[RunId], JobPlan]:
    """What makes the plan of a job of ours, once the run has its identity."""

    def plan_for(run_id: RunId) -> JobPlan:
        return plan_training(
            job,
            run_id=run_id,
            name=name,
            python=sys.executable,
            cwd=os.getcwd(),
            front_pid=os.getpid(),
            steps=job.train.max_num_steps,
        )

    return plan_for


def check_drill(job: JobSettings, file: Path) -> None:
    """UsageError when the job cannot be planned, or its drill is none or does not fit; starts nothing."""
    check_plan(training_plan(job, file.stem), read_drills(job.aimaster.drill))


def run_command(
    command: Sequence[str],
    *,
    run_dir: Path | None,
    ranks: int | None,
    max_restarts: int,
    drill: str,
    port: int,
    as_json: bool,
) -> int:
    """`aimaster run -- COMMAND`."""
    refuse_troubles(check_command(command, Path.cwd(), port))
    drills = read_drills(drill)
    name = command_name(command)

    def plan_for(run_id: RunId) -> JobPlan:
        return plan_command(
            command,
            run_id=run_id,
            name=name,
            cwd=os.getcwd(),
            front_pid=os.getpid(),
            ranks=ranks,
            port=free_port(),
            max_restarts=max_restarts,
            environ=os.environ,
        )

    check_plan(plan_for, drills)
    folder = open_folder(
        run_dir or RUNS / name,
        name=name,
        kind="command",
        source=tuple(command),
        now=time.time(),
        named=run_dir is not None,
    )
    try:
        return conduct(folder, plan_for(folder.info.run_id), drills, port=port, as_json=as_json)
    finally:
        folder.close()


def check_plan(plan_for: Callable[[RunId], JobPlan], drills: Sequence[Drill]) -> None:
    """Whether there is a plan and the drills fit it, before any folder is made."""
    try:
        check_drills(drills, plan_for(RunId("unmade")))
    except (PlanError, DrillError) as error:
        raise UsageError(str(error)) from error


def conduct(folder: RunFolder, plan: JobPlan, drills: Sequence[Drill], *, port: int, as_json: bool) -> int:
    """Run the plan to its end and print what came of it."""
    places = folder.places
    _put(folder, places.plan, as_document(plan))
    display = choose_display(plan)
    display.note(f"{'resuming' if folder.resumed else 'run'} {plan.name} in {places.run}")
    follower = None
    if plan.kind == "command":
        # With --json, stdout belongs to the one document.
        follower = OutputFollower(plan, places, (sys.stderr if as_json else sys.stdout).fileno())
    front = Front(folder, plan, Local(), display, drills=drills, port=port, follower=follower)
    try:
        summary = front.drive()
    finally:
        display.close()
    try:
        write_atomically(places.summary, as_document(summary))
        folder.mark(summary.outcome)
    except OSError as error:
        print(f"aimaster: the summary is not kept ({error.strerror}: {error.filename}); it is this:", file=sys.stderr)
    with contextlib.suppress(BrokenPipeError):  # it is kept in the run folder, and the exit code still counts
        # A stdout whose reader stands still would hold the summary up.
        stuck = not as_json and follower is not None and bool(follower.unshown())
        print_summary(
            summary,
            as_json=as_json,
            stream=sys.stderr if stuck else sys.stdout,
            with_traceback=follower is None or stuck,
        )
    return summary.exit_code


def _put(folder: RunFolder, file: Path, data: bytes) -> None:
    """Write a file that the run cannot begin without."""
    try:
        write_atomically(file, data)
    except OSError as error:
        raise unusable(folder.places.run, error) from error


def read_drills(text: str) -> tuple[Drill, ...]:
    try:
        return parse_drills(text)
    except DrillError as error:
        raise UsageError(str(error)) from error


def refuse_troubles(troubles: Sequence[str]) -> None:
    """End with all that is known to fail, in one go."""
    if troubles:
        raise UsageError(troubles[0] if len(troubles) == 1 else "\n  ".join([f"{len(troubles)} problems:", *troubles]))


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
