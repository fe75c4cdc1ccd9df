"""A real job for flow tests: the command line started as a user would, watched through its status, hurt by SIGKILL and SIGSTOP."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aimaster.wire.ids import NodeId
from aimaster.wire.messages import ControllerPulse
from aimaster.wire.places import MEMORY_ROOT, RunPlaces
from aimaster.wire.status import IncidentStatus, JobStatus, MemberStatus

T = TypeVar("T")

AIMASTER = (sys.executable, "-m", "aimaster.cli.app")

SMALL = (
    "examples/tiny.toml",
    *(
        "--train.train_batch_per_replica",
        "32",
        "--train.train_policy.mini_batch",
        "32",
        "--aimaster.warm_start.steps",
        "10",
        "--aimaster.heldout_prompts",
        "16",
    ),
    *("--train.ckpt.save_freq", "5", "--aimaster.budgets.member_restarts", "100"),
)
"""The embedded default with small steps: eight prompts of eight samples."""


def until(
    question: Callable[[], T | None],
    what: str,
    seconds: float,
    *,
    every: float = 0.2,
    tell: Callable[[], str] = str,
) -> T:
    """Return the first truthy answer; fail the test, naming `what` and what `tell` then tells, after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        answer = question()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}\n{tell()}")
        time.sleep(every)


def alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def processes_of(run: Path) -> dict[int, str]:
    """Processes that name the run folder in their command line or environment: pid to command line. Ours alone, never others'."""
    found: dict[int, str] = {}
    needle = os.fsencode(str(run))
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if (needle in command or needle in environment) and alive(int(entry.name)):
            found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def pids_in(file: Path) -> list[int]:
    """Pids of a member and its shim."""
    record = msgspec.json.decode(file.read_bytes())
    return [record[who]["pid"] for who in ("shim", "member") if record.get(who)]


def audit(run: Path) -> dict[str, Any]:
    """What `aimaster audit RUN --json` says."""
    command = [*AIMASTER, "audit", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = msgspec.json.decode(done.stdout)
    return report


class ControllerTold(msgspec.Struct):
    """What the controller's status holds of interest here."""

    pulse: ControllerPulse


class Job:
    """One `aimaster run` and its run folder."""

    def __init__(self, run: Path, arguments: Sequence[str], environment: dict[str, str] | None = None) -> None:
        self.run = run
        self.places = RunPlaces(run)
        self.arguments = list(arguments)
        self.environment = {**os.environ, "NO_COLOR": "1", **(environment or {})}
        self.output = run.parent / f"{run.name}.front.out"
        self.front: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the front process (again: then it resumes)."""
        with self.output.open("ab") as output:
            self.front = subprocess.Popen(
                [*AIMASTER, "run", "--run-dir", str(self.run), *self.arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment,
                start_new_session=True,
            )

    def wait(self, seconds: float) -> int:
        """Wait for the front process to end; return its exit code."""
        assert self.front is not None
        try:
            return self.front.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end within {seconds:.0f} s\n{self.story()}") from None

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        assert self.front is not None
        self.front.send_signal(number)

    # -- what it says ----------------------------------------------------------------------------------------------------

    def token(self, role: str = "read") -> str:
        for line in self.places.token.read_text().splitlines():
            name, _, secret = line.partition("=")
            if name == role:
                return secret
        raise AssertionError(f"no {role} token in {self.places.token}")

    def status(self) -> JobStatus | None:
        """The job as its master sees it; None while no master answers."""
        return self._ask(self.places.master, JobStatus)

    def pulse(self) -> ControllerPulse | None:
        """The job as its controller sees it; None while no controller answers."""
        told = self._ask(self.places.controller, ControllerTold)
        return told.pulse if told is not None else None

    def _ask(self, address: Path, kind: type[T]) -> T | None:
        try:
            url = msgspec.json.decode(address.read_bytes())["url"]
            request = urllib.request.Request(f"{url}/v1/status", headers={"Authorization": f"Bearer {self.token()}"})
            with urllib.request.urlopen(request, timeout=5) as reply:
                return msgspec.json.decode(reply.read(), type=kind)
        except (OSError, urllib.error.URLError, KeyError, msgspec.DecodeError, ValueError):
            return None

    def running(self, member: str) -> MemberStatus | None:
        status = self.status()
        for one in status.members if status else ():
            if one.member == member and one.state == "running" and one.process is not None and alive(one.process.pid):
                return one
        return None

    def at_step(self, step: int, seconds: float = 90) -> JobStatus:
        """Wait until this step is committed."""

        def there() -> JobStatus | None:
            self.check_front()
            status = self.status()
            return status if status and status.step >= step else None

        return until(there, f"step {step} of {self.run.name}", seconds, tell=self.story)

    def next_steps(self, count: int = 2, seconds: float = 60) -> JobStatus:
        """Wait for further committed steps from now."""
        now = until(self.status, "a master that answers", 30)
        return self.at_step(now.step + count, seconds)

    def all_running(self, seconds: float = 60) -> JobStatus:
        """Wait until every member is running and every policy member is in the epoch."""

        def whole() -> JobStatus | None:
            self.check_front()
            status = self.status()
            if status is None or not status.members:
                return None
            ready = all(
                one.state == "running"
                and (one.role != "policy" or one.in_epoch)
                and one.process
                and alive(one.process.pid)
                for one in status.members
            )
            return status if ready else None

        return until(whole, "all members running and in", seconds, tell=self.story)

    def incidents_all(self) -> list[IncidentStatus]:
        status = self.status()
        return list(status.incidents) if status else []

    def incidents(self, subject: str) -> list[IncidentStatus]:
        return [one for one in self.incidents_all() if one.subject == subject]

    def healed(self, subject: str, count: int = 1, seconds: float = 90) -> IncidentStatus:
        """Wait until the subject's `count`-th incident is over; return it."""

        def over() -> IncidentStatus | None:
            self.check_front()
            found = [one for one in self.incidents(subject) if one.resumed_at is not None and one.healed_at is not None]
            return found[count - 1] if len(found) >= count else None

        return until(over, f"incident {count} of {subject} healed", seconds, tell=self.story)

    # -- what is done to it -----------------------------------------------------------------------------------------------

    def pid(self, member: str) -> int:
        one = until(lambda: self.running(member), f"{member} running", 60, tell=self.story)
        assert one.process is not None
        return one.process.pid

    def signal(self, member: str, number: signal.Signals) -> int:
        """Send a signal to a member's own process; return its pid."""
        pid = self.pid(member)
        os.kill(pid, number)
        return pid

    def agent_pid(self, node: str) -> int:
        status = until(self.status, "a master that answers", 30)
        return next(one.agent_pid for one in status.nodes if one.node == node)

    def master_pid(self) -> int:
        return int(msgspec.json.decode(self.places.master.read_bytes())["pid"])

    def lose_node(self, node: str) -> None:
        """The node is gone: its agent stopped, its shims, members and agent killed, both its folders deleted."""
        agent = self.agent_pid(node)
        os.kill(agent, signal.SIGSTOP)
        memory = next(folder for folder in self.memory() if folder.name.endswith(f"-{node}"))
        folder = self.places.node(NodeId(node))
        doomed = [pid for file in folder.glob("members/*/pid.json") for pid in pids_in(file)]
        for pid in [*doomed, agent]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        until(lambda: not any(alive(pid) for pid in [*doomed, agent]), f"all of {node} dead", 20)
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)

    # -- the end ----------------------------------------------------------------------------------------------------------

    def check_front(self) -> None:
        assert self.front is not None
        code = self.front.poll()
        if code is not None:
            raise AssertionError(f"the front process ended with {code}\n{self.story()}")

    def story(self) -> str:
        """The last words of everybody, for a failed test's message."""
        parts = []
        logs = [self.output, *sorted(self.places.logs.glob("*.log")), *sorted(self.run.glob("nodes/*/agent.log"))]
        for path in [*logs, *sorted(self.run.glob("nodes/*/members/*/output.log"))]:
            if path.exists():
                parts.append(f"--- {path.relative_to(self.run.parent)}\n" + path.read_text(errors="replace")[-1500:])
        return "\n".join(parts)

    def end(self) -> None:
        """Kill all that is left of the job, by pid, and remove its memory."""
        if self.front is not None and self.front.poll() is None:
            self.front.kill()
            self.front.wait()
        deadline = time.monotonic() + 20
        while (left := processes_of(self.run)) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)
        for folder in self.memory():
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            folder.rmdir()

    def memory(self) -> list[Path]:
        """Memory folders of the run's nodes."""
        try:
            run_id = msgspec.json.decode(self.places.plan.read_bytes())["run_id"]
        except (OSError, KeyError, msgspec.DecodeError):
            return []
        return sorted(MEMORY_ROOT.glob(f"aimaster-{run_id}-*"))


@contextmanager
def job(run: Path, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[Job]:
    """A started job that leaves nothing behind."""
    one = Job(run, arguments, environment)
    one.start()
    try:
        yield one
    finally:
        one.end()
