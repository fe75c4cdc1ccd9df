"""What a member does first: open its progress file, register stack dumps, arm the self-fence. All told by AIMASTER_* variables."""

import faulthandler
import os
import signal
from pathlib import Path
from typing import TextIO

from aimaster.client.fence import LEASES, Fence
from aimaster.client.leases import FACTOR, Leases
from aimaster.client.progress import Progress
from aimaster.wire.ids import MemberId, NodeId
from aimaster.wire.places import (
    ENV_LEASE_FLOOR_SECONDS,
    ENV_MEMBER,
    ENV_NODE,
    ENV_NODE_DIR,
    ENV_NODE_MEMORY,
    ENV_RUN_DIR,
    ENV_STARTUP_HANG_SECONDS,
    RunPlaces,
    progress_file,
)

_reporter: Progress | None = None
_stacks: TextIO | None = None


def start_member(
    *,
    group_timeout_seconds: float = 10.0,
    lease_factor: float = FACTOR,
    fence_leases: float = LEASES,
    fence: bool = True,
) -> Progress:
    """Announce this process as the member named in the environment; outside a run the Progress returned tells nobody.

    SIGUSR2 then writes the stacks of all threads into the member's stacks.txt, whatever holds the GIL.
    """
    memory, member = os.environ.get(ENV_NODE_MEMORY), os.environ.get(ENV_MEMBER)
    if not memory or not member:
        return Progress(None)
    floor_seconds = float(os.environ.get(ENV_LEASE_FLOOR_SECONDS, "5"))
    startup_hang_seconds = float(os.environ.get(ENV_STARTUP_HANG_SECONDS, "600"))
    stacks = _register_dumps(MemberId(member))
    guard = None
    if fence and stacks is not None:
        guard = Fence(
            stacks,
            startup_hang_seconds=startup_hang_seconds,
            group_timeout_seconds=group_timeout_seconds,
            leases=fence_leases,
        )
    leases = Leases(floor_seconds, lease_factor)
    return Progress(progress_file(Path(memory), MemberId(member)), leases=leases, fence=guard)


def report_progress(step: int, phase: str = "compute") -> None:
    """Report a step from a user's own script: `report_progress(step)` in the training loop, nothing else; a no-op outside a run.

    No self-fence here: a script that reports now and then may be silent for good reasons.
    """
    global _reporter  # noqa: PLW0603 - one training thread, one progress file a process
    if _reporter is None:
        _reporter = start_member(fence=False)
    _reporter.beat(phase, step=step)


def _register_dumps(member: MemberId) -> TextIO | None:
    global _stacks  # noqa: PLW0603 - faulthandler keeps the descriptor for the life of the process
    folder = os.environ.get(ENV_NODE_DIR)
    if folder is None:
        run, node = os.environ.get(ENV_RUN_DIR), os.environ.get(ENV_NODE)
        if not run or not node:
            return None
        folder = str(RunPlaces(run).node(NodeId(node)))
    place = Path(folder) / "members" / member
    place.mkdir(parents=True, exist_ok=True)
    if _stacks is None:
        _stacks = (place / "stacks.txt").open("a")
        if not faulthandler.is_enabled():
            faulthandler.enable()
        if signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL:  # a program that uses the signal itself keeps it
            faulthandler.register(signal.SIGUSR2, file=_stacks, all_threads=True)
    return _stacks
