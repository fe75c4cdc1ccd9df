"""Finding a run's master and asking it: --master > AIMASTER_URL > --run-dir > the newest live run under ./runs.

Every answer and every error names which of the four was used. Plain `http.client`: one question, one deadline, no session.
"""

import http.client
import json
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from aimaster.cli.exits import MasterUnreachableError, UsageError
from aimaster.telemetry.tokens import Role, TokenFileError, parse_tokens
from aimaster.wire.places import ENV_MASTER_URL, RunPlaces
from aimaster.wire.status import JobStatus

RUNS = Path("runs")
ASK_SECONDS = 5.0
GONE = ("dead", "stopped", "finished")
"""States of a member that does not run."""


class MasterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Content of RUN/master.json."""

    url: str
    pid: int
    start_ticks: int = 0
    term: int = 0


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where to ask, and how that place was found."""

    url: str
    """Empty when the run has no live master."""
    run: Path | None
    """The run folder, where it is known."""
    token: str
    trouble: str = ""
    """What is wrong with the token file; said when the token is needed."""
    source: str
    """`--master`, `AIMASTER_URL`, `--run-dir runs/x`, `the newest run runs/x`."""


def start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, or None when there is no such process or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def read_master(run: Path) -> MasterPlace | None:
    """The master of a run folder as it announced itself, or None."""
    try:
        return msgspec.json.decode(RunPlaces(run).master.read_bytes(), type=MasterPlace)
    except (OSError, msgspec.DecodeError):
        return None


def alive(place: MasterPlace | None) -> bool:
    """Whether the process that announced itself still runs on this host."""
    if place is None:
        return False
    ticks = start_ticks(place.pid)
    return ticks is not None and place.start_ticks in (0, ticks)


def read_token(run: Path | None, environ: Mapping[str, str], role: Role = "operate") -> str:
    """The secret of a role from AIMASTER_TOKEN_FILE, else from RUN/token; empty when there is none. TokenFileError on a damaged file."""
    file = environ.get("AIMASTER_TOKEN_FILE")
    path = Path(file) if file else (RunPlaces(run).token if run is not None else None)
    if path is None:
        return ""
    try:
        return parse_tokens(path, path.read_bytes()).secrets.get(role, "")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise TokenFileError(f"the token file {path} cannot be read: {error.strerror}") from error


def newest_run(runs: Path, *, live: bool) -> Path | None:
    """The run folder under `runs` whose master announced itself last (and still lives, if `live`)."""
    found = []
    for info in runs.glob("*/run.json"):
        run = info.parent
        if live and not alive(read_master(run)):
            continue
        announced = RunPlaces(run).master
        found.append(((announced if announced.exists() else info).stat().st_mtime, run))
    return max(found)[1] if found else None


def find(master: str | None, run_dir: Path | None, environ: Mapping[str, str] = os.environ) -> Target:
    """Choose the master to ask; touches files only."""
    if master or environ.get(ENV_MASTER_URL):
        url, source = (master, "--master") if master else (environ[ENV_MASTER_URL], ENV_MASTER_URL)
        run = run_dir or _run_of_url(str(url))
        return _with_token(str(url).rstrip("/"), run, f"{source} {url}", environ)
    if run_dir is not None:
        if not RunPlaces(run_dir).info.exists():
            raise UsageError(
                f"{run_dir} is not a run folder: it has no run.json. Name the folder that `aimaster run` printed."
            )
        return _target(run_dir, f"--run-dir {run_dir}", environ)
    newest = newest_run(RUNS, live=True)
    if newest is not None:
        return _target(newest, f"the newest live run, {newest}", environ)
    ended = newest_run(RUNS, live=False)
    if ended is None:
        raise MasterUnreachableError(
            "no run to ask: there is no --master, no AIMASTER_URL, no --run-dir, and no run under ./runs. "
            "Start one with `aimaster run`, or name one of them."
        )
    return _target(ended, f"the newest run, {ended} (none is live)", environ)


def _target(run: Path, source: str, environ: Mapping[str, str]) -> Target:
    place = read_master(run)
    url = place.url if place is not None and alive(place) else ""
    return _with_token(url, run, source, environ)


def _with_token(url: str, run: Path | None, source: str, environ: Mapping[str, str]) -> Target:
    try:
        return Target(url=url, run=run, token=read_token(run, environ), source=source)
    except TokenFileError as error:
        return Target(url=url, run=run, token="", trouble=str(error), source=source)


def _run_of_url(url: str) -> Path | None:
    for info in RUNS.glob("*/run.json"):
        place = read_master(info.parent)
        if place is not None and place.url.rstrip("/") == url.rstrip("/"):
            return info.parent
    return None


# -- asking -------------------------------------------------------------------------------------------------------------


def ask(
    url: str, token: str, method: str, path: str, body: Mapping[str, Any] | None = None, *, seconds: float = ASK_SECONDS
) -> bytes:
    """One request; the answer's bytes. OSError or http.client.HTTPException when nobody answers, RefusedError on a 4xx or 5xx."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no address of a master: expected http://HOST:PORT")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=seconds)
    try:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection.request(
            method, parts.path.rstrip("/") + path, json.dumps(body) if body is not None else None, headers
        )
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    if response.status >= 400:
        raise RefusedError(response.status, data)
    return data


class RefusedError(Exception):
    """The master answered, and said no."""

    def __init__(self, status: int, data: bytes) -> None:
        self.status = status
        try:
            said = json.loads(data)
            text = ". ".join(str(said[key]) for key in ("error", "hint") if said.get(key))
        except (ValueError, AttributeError):
            text = data[:200].decode(errors="replace")
        super().__init__(f"HTTP {status}: {text}")


def ask_target(target: Target, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
    """As `ask`, for a verb: any failure ends the command with a sentence and exit code 3."""
    if not target.url:
        unreachable(target, "its master does not run")
    if target.trouble:
        raise UsageError(target.trouble)
    try:
        return ask(target.url, target.token, method, path, body)
    except RefusedError as error:
        unreachable(target, str(error))
    except (OSError, http.client.HTTPException) as error:
        unreachable(target, f"{type(error).__name__}: {error}")


def unreachable(target: Target, why: str) -> NoReturn:
    raise MasterUnreachableError(
        f"the master cannot be reached: {why} (asked {target.url or 'nobody'}, found by {target.source})"
    )


def picture(target: Target) -> JobStatus:
    """The run now; of a run that has ended, its last picture, kept in its summary."""
    if not target.url and target.run is not None:
        last = last_picture(target.run)
        if last is not None:
            return last
    return msgspec.json.decode(ask_target(target, "GET", "/v1/status"), type=JobStatus)


def last_picture(run: Path) -> JobStatus | None:
    """The status a run ended with, told as of one that has ended; None when it did not end (or another record stands there)."""
    try:
        summary = json.loads(RunPlaces(run).summary.read_bytes())
        status = msgspec.convert(summary["status"], type=JobStatus)
        outcome = str(summary["outcome"])
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError):
        return None
    # The front looked last while some were still on their way out; none of them is there any more.
    members = tuple(
        msgspec.structs.replace(
            member, state=member.state if member.state in GONE else "stopped", process=None, progress=None
        )
        for member in status.members
    )
    return msgspec.structs.replace(status, state=outcome, members=members)


def has_ended(run: Path) -> bool:
    """Whether nobody drives the run any more: its front has marked its end or is gone, and its master is gone."""
    if alive(read_master(run)):
        return False
    try:
        info = json.loads(RunPlaces(run).info.read_bytes())
        return info["state"] != "running" or start_ticks(int(info["front_pid"])) is None
    except (OSError, ValueError, KeyError, TypeError):
        return True
