"""The master program: `python -m aimaster.master.serve --run-dir RUN [--port P] [--front-pid PID]`.

Takes the journal (its lock is the lease on mastership), replays it, announces itself in RUN/master.json, serves until the job has
ended and there was time to look, or SIGTERM: that ends the master alone, the job goes on and the next master adopts it.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import aiohttp
import click
import msgspec
import structlog
from aiohttp import web

from aimaster.brain.events import FrontGone, MasterStarted, Tick
from aimaster.brain.state import State
from aimaster.journal import Journal, JournalError, JournalHeldError
from aimaster.master.clock import Clock
from aimaster.master.endpoints import Endpoints, make_app
from aimaster.master.errors import ListenError, MasterError, PlanError
from aimaster.master.executor import Executor
from aimaster.master.front import wait_for_end
from aimaster.master.intake import Intake
from aimaster.master.metrics import make_registry
from aimaster.master.mind import Mind, replay
from aimaster.telemetry.logs import set_up_logs
from aimaster.telemetry.tokens import TokenFileError, Tokens, read_tokens
from aimaster.telemetry.web import Turning
from aimaster.wire.ids import Term
from aimaster.wire.places import RunPlaces
from aimaster.wire.topology import JobPlan

TICK_SECONDS: Final = 0.2
ALIVE_SECONDS: Final = 0.5
"""The sign of life on disk (the time of the journal's lock file) is renewed this often."""
LINGER_SECONDS: Final = 10.0
"""After the end of the job, for the last looks at it; a front ends the master sooner."""
SHUTDOWN_SECONDS: Final = 2.0
log = structlog.get_logger()


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """Content of RUN/master.json."""

    url: str
    pid: int
    start_ticks: int
    term: int


class Master:
    """One master of one run, from lock to end."""

    def __init__(self, places: RunPlaces, journal: Journal, state: State | None, plan: JobPlan, tokens: Tokens) -> None:
        self.places = places
        self.journal = journal
        self.plan = plan
        self.tokens = tokens
        self.mind = Mind(journal, state, Clock())
        self.turning = Turning()
        self.term = Term((state.term if state is not None else 0) + 1)
        self.attempt = _attempt(places, state)
        self._announcement = b""
        self._over = asyncio.Event()

    async def run(self, host: str, port: int, front_pid: int | None, alive_at: float | None) -> None:
        """Serve until the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._over.set)
        timeout = aiohttp.ClientTimeout(total=10.0)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            executor = Executor(self.mind, self.places, self.tokens, session)
            self.mind.perform_by(executor.perform)
            intake = Intake(self.mind, executor)
            endpoints = Endpoints(self.mind, self.places)
            registry = make_registry(self.mind, intake, executor, self.journal)
            app = make_app(self.mind, intake, endpoints, self.tokens, self.turning, registry)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)
            await runner.setup()
            tasks = [
                group.create_task(self.mind.run(), name="mind"),
                group.create_task(executor.run(), name="proposals"),
                group.create_task(self._tick(intake), name="ticks"),
            ]
            try:
                url = await _listen(runner, host, port)
                started = MasterStarted(
                    term=self.term, plan=self.plan, attempt=self.attempt, previous_alive_at=alive_at
                )
                await self.mind.believe(started)
                if front_pid is not None:  # that it is gone is believed after the start alone
                    tasks.append(group.create_task(self._watch_front(front_pid), name="front"))
                self._announce(url)
                await self._until_over()
            finally:
                await intake.close()
                await runner.cleanup()
                for task in tasks:
                    task.cancel()

    async def _until_over(self) -> None:
        """Until SIGTERM, or until the job has ended and there was time to look at its end."""
        over = asyncio.ensure_future(self._over.wait())
        ended = asyncio.ensure_future(self.mind.ended.wait())
        try:
            await asyncio.wait({over, ended}, return_when=asyncio.FIRST_COMPLETED)
            if over.done():
                log.info("master_told_to_end")
                return
            state = self.mind.state
            log.info("job_ended", phase=state.phase, reason=state.ending.reason if state.ending else "")
            front_gone = state.ending is not None and state.ending.front_gone
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0 if front_gone else LINGER_SECONDS):
                    await over
        finally:
            over.cancel()
            ended.cancel()

    async def _tick(self, intake: Intake) -> None:
        """Time passes: for the brain, for the health of the loop, and for the sign of life on disk."""
        lock = self.places.journal / "lock"
        loop = asyncio.get_running_loop()
        alive_due = loop.time()
        while True:
            self.turning.turn()
            if self.mind.ready:
                self.mind.observe(Tick())
                intake.miss()
                if loop.time() >= alive_due:
                    alive_due = loop.time() + ALIVE_SECONDS
                    with contextlib.suppress(OSError):  # only the length of a later gap is told less well
                        os.utime(lock)
                    self._announce_again()
            await asyncio.sleep(TICK_SECONDS)

    async def _watch_front(self, pid: int) -> None:
        await wait_for_end(pid)
        log.warning("front_gone", pid=pid)
        await self.mind.believe(FrontGone(pid=pid))

    def _announce(self, url: str) -> None:
        announcement = Announcement(url=url, pid=os.getpid(), start_ticks=_start_ticks(), term=self.term)
        self._announcement = msgspec.json.encode(announcement)
        self._write_announcement()
        log.info("master_serves", url=url, term=self.term, attempt=self.attempt)

    def _announce_again(self) -> None:
        """Whoever deletes the file does not hide the master from its agents and from the verbs."""
        if self._announcement and not self.places.master.exists():
            log.warning("announcement_written_again", file=str(self.places.master))
            with contextlib.suppress(OSError):  # the folder itself may be gone; half a second later it is tried again
                self._write_announcement()

    def _write_announcement(self) -> None:
        aside = self.places.master.with_suffix(".aside")
        aside.write_bytes(self._announcement)
        aside.chmod(0o600)
        aside.rename(self.places.master)


def main(run_dir: Path, port: int = 0, front_pid: int | None = None, host: str = "127.0.0.1") -> int:
    """Run the master of a run folder to its end; the exit code."""
    places = RunPlaces(run_dir)
    try:
        plan = _read_plan(places)
        tokens = read_tokens(places.token)
        set_up_logs(job=plan.name, role="master")
        alive_at = _modified_at(places.journal / "lock")
        with Journal.open(places.journal) as journal:
            if journal.torn_bytes:
                log.warning("journal_tail_cut", bytes=journal.torn_bytes)
            state = replay(journal.replay())
            _run(Master(places, journal, state, plan, tokens).run(host, port, front_pid or plan.front_pid, alive_at))
    except (MasterError, JournalError, TokenFileError) as error:
        sys.stderr.write(f"aimaster serve: {error}\n")
        return error.exit_code if isinstance(error, MasterError) else 2 if isinstance(error, JournalHeldError) else 1
    return 0


def _run(serving: Coroutine[Any, Any, None]) -> None:
    """Run to the end; an error of ours comes out of the task group as itself."""
    named: MasterError | None = None
    try:
        asyncio.run(serving)
    except* MasterError as group:
        named = next(error for error in group.exceptions if isinstance(error, MasterError))
    if named is not None:
        raise named


async def _listen(runner: web.AppRunner, host: str, port: int) -> str:
    site = web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise ListenError(
            f"cannot listen on {host}:{port}: {why}; choose another --port, or 0 for a free one"
        ) from error
    address = runner.addresses[0]
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    return f"http://{shown}:{address[1]}"


def _read_plan(places: RunPlaces) -> JobPlan:
    try:
        return msgspec.json.decode(places.plan.read_bytes(), type=JobPlan)
    except FileNotFoundError as error:
        raise PlanError(f"{places.plan} is not there: `aimaster run` writes it before it starts a master") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise PlanError(f"{places.plan} cannot be read: {error}") from error


def _attempt(places: RunPlaces, state: State | None) -> int:
    """Which start of the run by a front this is, as the front counts in RUN/run.json; without it, a new one after each end."""
    try:
        return int(msgspec.json.decode(places.info.read_bytes())["starts"])
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
        before = state.attempt if state is not None else 1
        return before + (state is not None and state.ended_at is not None)


def _modified_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _start_ticks() -> int:
    """Field 22 of /proc/self/stat."""
    return int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])


@click.command()
@click.option(
    "--run-dir", required=True, type=click.Path(path_type=Path, file_okay=False), help="Run folder with its plan.json."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port to listen on; 0: a free one.")
@click.option("--front-pid", type=int, default=None, help="End the job when this process ends.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; beyond loopback tokens are needed."
)
def command(run_dir: Path, port: int, front_pid: int | None, host: str) -> None:
    """Run the master of a run folder."""
    sys.exit(main(run_dir, port, front_pid, host))


if __name__ == "__main__":
    command()
