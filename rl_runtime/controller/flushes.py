"""Which snapshots lie whole on storage: read from its manifests now and then, and recorded, so that old batches can be let go."""

import asyncio
from pathlib import Path

import structlog

from aimaster.wire.checkpoint import Version
from easyckpt.errors import EasyckptError
from easyckpt.manifest import Manifest
from easyckpt.storage import list_manifests
from rl_runtime.controller.desk import Desk
from rl_runtime.records import Flushed

LOOK_SECONDS = 2.0
ROLE = "policy"

log = structlog.get_logger("flushes")


async def watch_flushes(desk: Desk, storage: Path) -> None:
    """Record new flushes until cancelled."""
    while True:
        try:
            manifests = await asyncio.to_thread(list_manifests, storage, ROLE)
        except (OSError, EasyckptError) as error:
            log.warning(
                "storage cannot be read; batches are kept until it can", storage=str(storage), reason=str(error)
            )
        else:
            record_flushes(desk, manifests)
        await asyncio.sleep(LOOK_SECONDS)


def record_flushes(desk: Desk, manifests: list[Manifest]) -> None:
    """Record the flushes that lie on the live path and are not known yet, oldest first."""
    account = desk.ledger.account
    for manifest in sorted(manifests, key=lambda one: one.step):
        version = Version(manifest.lineage, manifest.step)
        if version not in account.flushed and account.is_live(version, manifest.chain) and desk.ledger.trouble is None:
            desk.record(Flushed(version=version))
