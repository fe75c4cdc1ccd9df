"""Keeps one member process: starts it, writes down who it is and how it ended, and leaves no orphan. Standard library only.

Run as `python -I -S shim.py MEMBER_DIR AGENT_FILE FRONT COOKIE INCARNATION CWD COMMAND...`, in a session of its own, one per member, so
that members outlive their agent. The member gets its own session too, its output goes to output.log, never through a pipe.
A member that is not written down in pid.json never runs: it waits for that before exec. exit.json appears atomically after its end.
When front and agent have both been gone for AIMASTER_ORPHAN_SECONDS, the member's process tree is killed. Signals are forwarded to nobody.
"""

from __future__ import annotations

import os
import select
import sys
import time

# Of the interpreter itself: the module `signal` brings `enum` and a megabyte, and there is a shim for each member.
from _signal import (  # type: ignore[import-not-found]
    SIG_DFL,
    SIG_IGN,
    SIGHUP,
    SIGINT,
    SIGKILL,
    SIGQUIT,
    SIGTERM,
    SIGUSR1,
    SIGUSR2,
    signal,
)

COOKIE_VARIABLE = "AIMASTER_PROCESS_TREE"
"""Set in the member alone and inherited by all it starts, so that a descendant that left the session is still known as its own."""
ORPHAN_VARIABLE = "AIMASTER_ORPHAN_SECONDS"
"""In the environment of the shim; ten seconds where it is not set."""
LOOK_SECONDS = 1.0
NOT_STARTED = 127
_EXIT_BYTES = 256
_HELD_BACK = (SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2)


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, which with the pid names one process for ever; None when it is gone or a zombie."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def stat_fields(pid: int) -> list[str] | None:
    """/proc/PID/stat from field 3 (state) on; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def open_process(pid: int, ticks: int) -> int | None:
    """A pidfd of exactly this process; None when it is gone. Looked at again after opening: the pid may have been reused before."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if start_ticks(pid) == ticks:
        return descriptor
    os.close(descriptor)
    return None


def tree(leader: int, cookie: str) -> set[int]:
    """All living processes of a member: its session, their descendants, and whoever carries its cookie."""
    mark = f"{COOKIE_VARIABLE}={cookie}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        fields = stat_fields(pid)
        if fields is None or fields[0] in ("Z", "X"):
            continue
        parents[pid] = int(fields[1])
        if pid == leader or int(fields[3]) == leader or _carries(pid, mark):
            found.add(pid)
    growing = True
    while growing:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        growing = bool(more)
    return found


def kill_tree(leader: int, cookie: str, rounds: int = 20) -> bool:
    """SIGKILL the whole tree, again until nothing new appears; False if something was still there after all rounds."""
    for _ in range(rounds):
        alive = tree(leader, cookie)
        if not alive:
            return True
        for pid in alive:
            try:
                os.kill(pid, SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.005)
    return not tree(leader, cookie)


def _carries(pid: int, mark: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def number_of(text: str, key: str) -> int | None:
    """The integer after "key": in a flat JSON text; a parser would cost a megabyte in each shim."""
    digits = text.partition(f'"{key}":')[2].lstrip()
    end = 0
    while end < len(digits) and digits[end].isdigit():
        end += 1
    return int(digits[:end]) if end else None


def write_whole(path: str, text: str) -> None:
    """The file appears with all of its text or not at all."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.new", path)


class Watched:
    """A process whose end matters: the front, or whoever is the agent now."""

    def __init__(self, pid: int | None, ticks: int | None) -> None:
        self.descriptor = None if pid is None or ticks is None else open_process(pid, ticks)

    def gone(self) -> bool:
        if self.descriptor is None:
            return True
        if not select.select([self.descriptor], [], [], 0)[0]:
            return False
        os.close(self.descriptor)
        self.descriptor = None
        return True


def read_agent(path: str) -> Watched:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return Watched(None, None)
    return Watched(number_of(text, "pid"), number_of(text, "start_ticks"))


def start(folder: str, cookie: str, incarnation: str, cwd: str, command: list[str]) -> int:
    """Fork the member, write pid.json, then let it exec. Returns its pid."""
    log = os.open(f"{folder}/output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    go_read, go_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go_write)
        _become(go_read, log, cookie, cwd, command)
    os.close(go_read)
    mine, boot = start_ticks(os.getpid()), boot_id()
    # The room for exit.json is taken now: a full disk must not hide how the member ended.
    with open(f"{folder}/exit.json.new", "w", encoding="utf-8") as file:
        file.write(" " * _EXIT_BYTES)
    write_whole(
        f"{folder}/pid.json",
        f'{{"incarnation":{incarnation},"member":{{"boot_id":"{boot}","pid":{pid},"start_ticks":{start_ticks(pid)}}},'
        f'"shim":{{"boot_id":"{boot}","pid":{os.getpid()},"start_ticks":{mine}}}}}\n',
    )
    os.write(go_write, b"g")
    os.close(go_write)
    os.close(log)
    return pid


def _become(go: int, log: int, cookie: str, cwd: str, command: list[str]) -> None:
    """In the child: its own session, files for output, default signals, then exec. Never returns."""
    try:
        os.setsid()
        if os.read(go, 1) != b"g":
            os._exit(NOT_STARTED)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for number in _HELD_BACK:
            signal(number, SIG_DFL)
        if cwd != "-":
            os.chdir(cwd)
        os.environ[COOKIE_VARIABLE] = cookie
        os.execvp(command[0], command)  # noqa: S606 - the member's own command, no shell
    except OSError as error:
        os.write(log, f"shim: cannot start {command[0]!r} in {cwd}: {error}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def wait(pid: int, cookie: str, agent_file: str, front: Watched | None) -> int:
    """Until the member ends; returns its wait status. Ends its tree when nobody is left who would."""
    member = os.pidfd_open(pid)
    orphan_seconds = float(os.environ.get(ORPHAN_VARIABLE, "10"))
    agent = read_agent(agent_file)
    alone_since: float | None = None
    while True:
        all_there = not agent.gone() and (front is None or not front.gone())
        watching = [member] + [one.descriptor for one in (agent, front) if one and one.descriptor is not None]
        select.select(watching, [], [], None if all_there else LOOK_SECONDS)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if agent.gone():
            agent = read_agent(agent_file)
        if front is None or not front.gone() or not agent.gone():
            alone_since = None
            continue
        now = time.monotonic()
        alone_since = now if alone_since is None else alone_since
        if now - alone_since >= orphan_seconds:
            kill_tree(pid, cookie)


def write_exit(folder: str, incarnation: str, status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    exit_code, number = ("null", str(-code)) if code < 0 else (str(code), "null")
    text = f'{{"incarnation":{incarnation},"exit_code":{exit_code},"signal":{number},"at":{time.time():.6f}}}'
    descriptor = os.open(f"{folder}/exit.json.new", os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(descriptor, text.ljust(_EXIT_BYTES - 1).encode() + b"\n", 0)
    os.close(descriptor)
    os.replace(f"{folder}/exit.json.new", f"{folder}/exit.json")


def main() -> None:
    folder, agent_file, front_text, cookie, incarnation, cwd, *command = sys.argv[1:]
    for number in _HELD_BACK:
        signal(number, SIG_IGN)
    front = None
    if front_text != "-":
        front_pid, _, front_ticks = front_text.partition(":")
        front = Watched(int(front_pid), int(front_ticks))
    pid = start(folder, cookie, incarnation, cwd, command)
    status = wait(pid, cookie, agent_file, front)
    write_exit(folder, incarnation, status)
    if read_agent(agent_file).gone():  # a living agent clears up itself, and knows what grace was given
        kill_tree(pid, cookie)


if __name__ == "__main__":
    main()
