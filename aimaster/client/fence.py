"""The self-fence: a member whose training thread stands still ends itself, with the GIL held and with the agent dead.

It is the last resort, after the agent's kill and the group timeout: ten leases, at least three group timeouts, and
`startup_hang_seconds` while no lease is learnt. faulthandler's own C thread keeps the time, writes `Timeout (` and all stacks into
the member's stacks.txt, and exits with code 1.
"""

import faulthandler
from typing import Final, TextIO

LEASES: Final = 10.0
GROUP_TIMEOUTS: Final = 3.0
REARM_SECONDS: Final = 1.0
"""Arming starts a thread, so the fence is moved at most this often; but at once where it must move further away."""


def fence_seconds(
    lease_seconds: float | None, *, startup_hang_seconds: float, group_timeout_seconds: float, leases: float = LEASES
) -> float:
    """How long the training thread may be silent before the member ends itself."""
    if lease_seconds is None:
        return max(startup_hang_seconds, GROUP_TIMEOUTS * group_timeout_seconds)
    return max(leases * lease_seconds, GROUP_TIMEOUTS * group_timeout_seconds)


class Fence:
    """One per process: faulthandler keeps a single timer."""

    def __init__(
        self, stacks: TextIO, *, startup_hang_seconds: float, group_timeout_seconds: float, leases: float = LEASES
    ) -> None:
        self._stacks = stacks
        self._leases = leases
        self._startup_hang_seconds = startup_hang_seconds
        self._group_timeout_seconds = group_timeout_seconds
        self._armed_at = float("-inf")
        self._deadline = float("-inf")

    def rearm(self, now: float, lease_seconds: float | None) -> None:
        """Move the end to `now` plus what the lease allows."""
        seconds = fence_seconds(
            lease_seconds,
            startup_hang_seconds=self._startup_hang_seconds,
            group_timeout_seconds=self._group_timeout_seconds,
            leases=self._leases,
        )
        if now - self._armed_at < REARM_SECONDS and now + seconds <= self._deadline + REARM_SECONDS:
            return
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._stacks)
        self._armed_at = now
        self._deadline = now + seconds

    def disarm(self) -> None:
        """Nothing ends the process any more."""
        faulthandler.cancel_dump_traceback_later()
        self._armed_at = self._deadline = float("-inf")
