"""The run folder: which one a command gets, that no two fronts share it, and what is written there before anything starts.

An unfinished run of the same job is resumed; a finished one is kept and a numbered folder begun (`runs/tiny`, `runs/tiny-2`).
The lock is held for the life of the front; the kernel drops it with the process, so no stale lock is ever in the way.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from aimaster.cli.exits import UsageError
from aimaster.journal import JournalDamagedError, read_frames
from aimaster.telemetry.tokens import ROLES, TokenFileError, read_tokens
from aimaster.wire.ids import RunId
from aimaster.wire.places import RunPlaces
from aimaster.wire.topology import JobKind

State = Literal["running", "finished", "failed", "stopped"]
NUMBERED_FOLDERS = 10_000
FIRST_FILES = ("run.json.tmp", "token", "token.tmp")
FIRST_FOLDERS = ("logs", "storage")
"""All that a front writes, with run.json, before there is anything to lose: one that was killed there has begun nothing."""


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Content of RUN/run.json. Example: run 3f2a9c01, `tiny`, begun twice, finished."""

    run_id: RunId
    name: str
    kind: JobKind
    source: tuple[str, ...]
    """The TOML file, or the command line."""
    created_at: float
    starts: int = 1
    """Times a front process began or resumed this run."""
    state: State = "running"
    """`running` also after the front was killed: then the lock is free."""
    front_pid: int = 0
    reward_before: float | None = None
    """On held-out prompts, before the first step; kept for the summary of a later start."""


class RunFolder:
    """A run folder that this process owns."""

    def __init__(self, places: RunPlaces, info: RunInfo, lock: int, *, resumed: bool) -> None:
        self.places = places
        self.info = info
        self.resumed = resumed
        self._lock = lock

    def mark(self, state: State) -> None:
        """Keep how the run stands."""
        self.info = msgspec.structs.replace(self.info, state=state)
        write_atomically(self.places.info, msgspec.json.encode(self.info))

    def keep_reward_before(self, reward: float) -> None:
        """For the summary of a later start, which lacks it where the disk is full now."""
        self.info = msgspec.structs.replace(self.info, reward_before=reward)
        with contextlib.suppress(OSError):
            write_atomically(self.places.info, msgspec.json.encode(self.info))

    def close(self) -> None:
        os.close(self._lock)


def open_folder(
    wanted: Path,
    *,
    name: str,
    kind: JobKind,
    source: tuple[str, ...],
    now: float,
    named: bool = False,
    accept: Callable[[RunPlaces], None] = lambda _: None,
) -> RunFolder:
    """Lock and prepare `wanted`, or the first numbered folder beside it that is free; UsageError when a live run is in it.

    `named`: the user asked for this very folder. `accept` may refuse to resume what is there, before anything is changed.
    """
    for number in range(1, NUMBERED_FOLDERS):
        run = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        places = RunPlaces(run)
        lock = _lock(places)
        try:
            before = read_info(places)
            _refuse_foreign(places, before, kind, named=named and number == 1)
            if before is None or resumable(before, kind, source):
                if before is not None:
                    _check_journal(places)
                    accept(places)
                return _begin(places, before, lock, name=name, kind=kind, source=source, now=now)
        except OSError as error:
            os.close(lock)
            raise unusable(run, error) from error
        except UsageError:
            os.close(lock)
            raise
        os.close(lock)
    raise UsageError(f"no free run folder beside {wanted}: remove old ones, or name another with --run-dir")


def _check_journal(places: RunPlaces) -> None:
    """UsageError on a damaged journal, before a master is started that could only refuse it."""
    try:
        for _ in read_frames(places.journal):
            pass
    except JournalDamagedError as error:
        raise UsageError(str(error)) from error


def _refuse_foreign(places: RunPlaces, before: RunInfo | None, kind: JobKind, *, named: bool) -> None:
    """UsageError on a folder of something else, and on one that was asked for but holds an unfinished run of another kind."""
    run = places.run
    if before is None and not all(_is_first(entry) for entry in run.iterdir()):
        raise UsageError(f"{run} holds files but no run.json: it is not a run folder. Name another with --run-dir.")
    if named and before is not None and before.kind != kind and before.state != "finished":
        raise UsageError(
            f"{run} holds an unfinished run of another kind ({_said(before)}). Finish it, or name another folder with --run-dir."
        )


def unusable(run: Path, error: OSError) -> UsageError:
    """Which file or folder could not be made or written, and why."""
    where = error.filename if error.filename is not None and str(error.filename) != str(run) else ""
    return UsageError(
        f"the run folder {run} cannot be used: {f'{where}: ' if where else ''}{error.strerror}. Name another with --run-dir."
    )


def _lock(places: RunPlaces) -> int:
    """Make the folder and hold its lock; UsageError when that cannot be, or another does."""
    try:
        places.run.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(places.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unusable(places.run, error) from error
    try:
        free = _try_lock(lock)
    except OSError as error:
        os.close(lock)
        raise unusable(places.run, error) from error
    if not free:
        os.close(lock)
        raise UsageError(
            f"the run folder {places.run} is in use by a live run{_holder(places)}. "
            f"Look at it with `aimaster status --run-dir {places.run}`, end it with `aimaster stop --run-dir {places.run}`, "
            "or name another folder with --run-dir."
        )
    return lock


def _is_first(entry: Path) -> bool:
    """Whether a front makes it before run.json stands, and nothing is in it yet."""
    if entry.name in FIRST_FOLDERS:
        return entry.is_dir() and not any(entry.iterdir())
    return entry.name == "lock" or (entry.name in FIRST_FILES and entry.is_file())


def _said(info: RunInfo) -> str:
    return f"a command, {' '.join(info.source)}" if info.kind == "command" else f"the job {info.name}"


def resumable(before: RunInfo, kind: JobKind, source: tuple[str, ...]) -> bool:
    """Whether the same command goes on in this folder.

    A job of ours resumes whatever it stopped of, a failure too, since its state is kept. A wrapped command keeps its own
    state: only an interrupted one of the same command line goes on, a failed one is a finished story.
    """
    if before.kind != kind or before.state == "finished":
        return False
    return kind == "rl" or (before.source == source and before.state in ("running", "stopped"))


def _begin(
    places: RunPlaces,
    before: RunInfo | None,
    lock: int,
    *,
    name: str,
    kind: JobKind,
    source: tuple[str, ...],
    now: float,
) -> RunFolder:
    if before is None:
        info = RunInfo(
            run_id=RunId(secrets.token_hex(4)),
            name=name,
            kind=kind,
            source=source,
            created_at=now,
            front_pid=os.getpid(),
        )
    else:
        info = msgspec.structs.replace(
            before, starts=before.starts + 1, state="running", source=source, front_pid=os.getpid()
        )
    for folder in (places.logs, places.storage):
        folder.mkdir(mode=0o700, exist_ok=True)
    _keep_token(places.token)
    places.summary.unlink(missing_ok=True)
    write_atomically(places.info, msgspec.json.encode(info))
    return RunFolder(places, info, lock, resumed=before is not None)


def _keep_token(file: Path) -> None:
    """Make secrets where there are none; UsageError on a file that the programs would refuse, before they are started to do so."""
    if not file.exists() or (file.is_file() and not file.read_bytes().strip()):
        write_atomically(file, "".join(f"{role}={secrets.token_hex(32)}\n" for role in ROLES).encode())
        return
    try:
        missing = [role for role in ROLES if role not in read_tokens(file).secrets]
    except TokenFileError as error:
        raise UsageError(str(error)) from error
    if missing:
        raise UsageError(
            f"the token file {file} has no line for {', '.join(missing)}; delete it, and a new one is made"
        )


def read_info(places: RunPlaces) -> RunInfo | None:
    """What stands in run.json, or None where there is none."""
    try:
        return msgspec.json.decode(places.info.read_bytes(), type=RunInfo)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{places.info} cannot be read: {error}. Name another folder with --run-dir.") from error


def write_atomically(path: Path, data: bytes) -> None:
    """The whole new content or the whole old one, also after a power cut; readable by the owner alone."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def as_document(record: Any) -> bytes:
    """A record as JSON for people."""
    return msgspec.json.format(msgspec.json.encode(record), indent=2)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(places: RunPlaces) -> str:
    try:
        info = read_info(places)
    except UsageError:
        info = None
    return f" (process {info.front_pid})" if info is not None and info.front_pid else ""
