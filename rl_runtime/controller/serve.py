"""The controller as a process: replay the ledger, listen, say where, and serve until told to stop.

Exit code 0 after SIGTERM. `REFUSED` with a last line that says why and what to do, when the configuration, the data or the ledger
cannot be used or nothing can be restored: another start would end the same way. 1 for a defect.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import structlog
from aiohttp import web

from aimaster.client import Progress, start_member
from aimaster.journal import JournalDamagedError, JournalHeldError
from aimaster.settings import from_json
from aimaster.telemetry.logs import set_up_logs
from aimaster.telemetry.tokens import TokenFileError, Tokens, read_tokens
from aimaster.telemetry.web import Turning
from aimaster.wire.codec import encode_json
from aimaster.wire.health import REFUSED, refusal
from aimaster.wire.ids import Incarnation
from aimaster.wire.places import ENV_INCARNATION, ENV_NODE, ENV_RUN_DIR, RunPlaces
from easyckpt.manifest import parse_folder
from rl_runtime.controller.desk import TICK_SECONDS, Desk
from rl_runtime.controller.endpoints import make_app
from rl_runtime.controller.errors import (
    ControllerError,
    LedgerBrokenError,
    LedgerLostError,
    LedgerUnreadableError,
    RefusalError,
)
from rl_runtime.controller.flushes import ROLE, watch_flushes
from rl_runtime.controller.ledger import Ledger
from rl_runtime.controller.prompts import rows_digest
from rl_runtime.controller.pulse import report_for_ever
from rl_runtime.controller.settings import ControllerSettings, controller_settings
from rl_runtime.data import DataError, Rows, load_rows
from rl_runtime.records import Began

HOLDER_SECONDS = 20.0
"""A killed controller's lock is free at once; one that is being stopped gets so long."""

log = structlog.get_logger("controller")


def main(run_dir: Path) -> int:
    """Serve the run in this folder until SIGTERM; returns the exit code."""
    set_up_logs(role="controller", node=os.environ.get(ENV_NODE, ""))
    places = RunPlaces(run_dir)
    progress = start_member()
    try:
        job = from_json(places.resolved.read_bytes())
        rows = load_rows(job)
        settings = controller_settings(job, len(rows))
        host = job.aimaster.host
        storage = Path(job.aimaster.snapshots.storage) if job.aimaster.snapshots.storage else places.storage
        return asyncio.run(serve(places, settings, rows, host=host, storage=storage, progress=progress))
    except RefusalError as error:
        return _refuse(error.category, error)
    except (DataError, JournalHeldError, TokenFileError) as error:
        return _refuse("app.config", error)
    except JournalDamagedError as error:
        return _refuse("data.corrupt", error)
    except ControllerError as error:
        print(f"controller: {error}", file=sys.stderr)  # noqa: T201 - the last line of its log says why
        return 1


def _refuse(category: str, error: Exception) -> int:
    print(refusal(category, str(error)), file=sys.stderr)  # noqa: T201 - the master reads the last line of the log
    return REFUSED


async def serve(
    places: RunPlaces,
    settings: ControllerSettings,
    rows: Rows,
    *,
    host: str,
    storage: Path,
    progress: Progress,
    port: int = 0,
) -> int:
    """Open the ledger and serve."""
    incarnation = Incarnation(int(os.environ.get(ENV_INCARNATION, "0")))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ledger = await _open_ledger(places.ledger)
    try:
        if ledger.account.began is None:
            _refuse_to_begin_again(places.storage)
        ledger.begin(began(settings, rows))
        desk = Desk(settings, ledger, rows, boot=f"{incarnation}-{os.getpid()}")
        tokens = read_tokens(places.token)
        turning = Turning()
        url = ""
        app = make_app(desk, tokens, url=lambda: url, incarnation=incarnation, turning=turning)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            await site.start()
            url = f"http://{host}:{runner.addresses[0][1]}"
            publish(places.controller, {"url": url, "pid": os.getpid(), "incarnation": incarnation})
            log.info("controller serves", url=url, step=ledger.account.head.step, epoch=ledger.account.epoch.number)
            await _run(
                desk, places, tokens, storage, progress, url=url, incarnation=incarnation, turning=turning, stop=stop
            )
        finally:
            await runner.cleanup()
    finally:
        ledger.close()
    return 0


async def _run(
    desk: Desk,
    places: RunPlaces,
    tokens: Tokens,
    storage: Path,
    progress: Progress,
    *,
    url: str,
    incarnation: Incarnation,
    turning: Turning,
    stop: asyncio.Event,
) -> None:
    """Run until SIGTERM or SIGINT; a broken ledger ends it with its reason."""
    try:
        async with asyncio.TaskGroup() as tasks:
            works = [
                tasks.create_task(desk.ledger.run(), name="ledger"),
                tasks.create_task(
                    report_for_ever(desk, places, tokens, url=url, incarnation=incarnation), name="pulse"
                ),
                tasks.create_task(watch_flushes(desk, storage), name="flushes"),
                tasks.create_task(_tick_for_ever(desk, progress, turning), name="tick"),
            ]
            await stop.wait()
            await desk.ledger.durable(1.0)
            for work in works:
                work.cancel()
    except* ControllerError as broken:
        raise broken.exceptions[0] from None


async def _tick_for_ever(desk: Desk, progress: Progress, turning: Turning) -> None:
    while True:
        desk.tick()
        if desk.broken is not None:
            raise desk.broken
        if desk.group.refusal is not None:
            raise desk.group.refusal
        turning.turn()
        head = desk.ledger.account.head
        progress.beat("idle", step=head.step, lineage=head.lineage)
        await asyncio.sleep(TICK_SECONDS)


def _refuse_to_begin_again(storage: Path) -> None:
    """Where the run's own storage has steps, an empty ledger is a lost one. A storage named by the user may hold another run's."""
    versions = [parse_folder(path.name) for path in (storage / ROLE).glob("*")]
    newest = max((version[1] for version in versions if version is not None), default=0)
    if newest > 0:  # readable or not: only committed steps are flushed
        raise LedgerLostError(newest, str(storage))


async def _open_ledger(folder: Path) -> Ledger:
    """Open the ledger; an earlier controller that is on its way out is waited for."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + HOLDER_SECONDS
    while True:
        try:
            return Ledger.open(folder)
        except JournalHeldError:
            if loop.time() >= deadline:
                raise
            await asyncio.sleep(0.1)
        except LedgerBrokenError as error:
            raise LedgerUnreadableError(str(error)) from error


def began(settings: ControllerSettings, rows: Rows) -> Began:
    """Return the first record for this configuration."""
    return Began(
        rows=len(rows),
        rows_digest=rows_digest(rows),
        rules=settings.rules(),
        seed=settings.seed,
        shuffle=settings.shuffle,
        n_generation=settings.n_generation,
        batch_samples=settings.batch_samples,
    )


def publish(path: Path, record: object) -> None:
    """Write a small JSON file so that a reader sees the old or the new one."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_bytes(encode_json(record))
    aside.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(os.environ[ENV_RUN_DIR])))
