"""Everything on this machine: each program a child process in a session of its own, so that a terminal's Ctrl-C reaches only the front.

`adopt_orphans` makes the calling process the one that inherits whatever its descendants leave behind (Linux child subreaper):
shims and members of a killed agent stay below the front, so none can be lost from sight and none becomes a zombie.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time

import psutil

from aimaster.clusters.base import Program

PR_SET_CHILD_SUBREAPER = 36


class LocalProgram:
    """A child process and its pidfd."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._pidfd

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None and self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return code

    def ask_to_end(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            # A stopped process would not act on SIGTERM; continuing it costs nothing.
            signal.pidfd_send_signal(self._pidfd, number)
            signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)


class Local:
    """This machine."""

    def start(self, program: Program) -> LocalProgram:
        program.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with program.log.open("ab") as log:
            process = subprocess.Popen(
                program.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | program.env,
                start_new_session=True,
            )
        return LocalProgram(process)


def adopt_orphans() -> None:
    """Let orphaned descendants become children of this process rather than of init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def reap_orphans(ours: set[int]) -> None:
    """Collect ended adopted children. One of `ours` is left to its owner, and those behind it to the next call."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in ours:
            return
        os.waitpid(ended.si_pid, os.WNOHANG)


def kill_descendants(seconds: float = 5.0) -> list[int]:
    """SIGKILL every process below this one until none is left (or the time is over); the pids that were found alive."""
    killed: list[int] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        below = [
            process for process in psutil.Process().children(recursive=True) if process.status() != psutil.STATUS_ZOMBIE
        ]
        if not below:
            break
        for process in below:
            # What has ended meanwhile is what was wanted.
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
                killed.append(process.pid)
        reap_orphans(set())
        time.sleep(0.02)
    return killed
