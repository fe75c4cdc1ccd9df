"""What the agent is told: by its command line, the run's plan and resolved configuration, and AIMASTER_AGENT__* for its own pace."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from aimaster import settings
from aimaster.telemetry.tokens import secret_of
from aimaster.wire.places import RunPlaces
from aimaster.wire.topology import JobPlan
from easyckpt.progress import STALLED_SECONDS
from easyckpt.scrub import AFTER_SECONDS

ENV_PREFIX = "AIMASTER_AGENT__"
T = TypeVar("T", bound=msgspec.Struct)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How often the agent looks, and how long it waits. Each is set by AIMASTER_AGENT__NAME in capitals."""

    progress_seconds: float = 0.25
    """Between two readings of the members' progress and logs."""
    look_seconds: float = 1.0
    """Between the first two looks at a silent member."""
    pulse_seconds: float = 1.0
    """Between two pictures sent to the master."""
    sensor_seconds: float = 5.0
    """Between two readings of the machine."""
    reconnect_seconds: float = 2.0
    """Longest pause before the master is tried again; the real one is random up to this."""
    exit_seconds: float = 2.0
    """How long to wait for a shim to say how its member ended."""
    dump_seconds: float = 2.0
    """How long to wait for a stack dump."""
    end_seconds: float = 8.0
    """How long members may take to stop when the front process is gone."""
    flush_retry_seconds: float = 5.0
    """Between two tries to bring a snapshot to storage."""
    flush_stalled_seconds: float = STALLED_SECONDS
    """A flush that has not got on for so long is told: the storage hangs."""
    scrub_seconds: float = AFTER_SECONDS
    """A snapshot in memory that nobody has proven for so long is read again."""


class Sight(msgspec.Struct, frozen=True, kw_only=True):
    """Where the agent's eyes look. Each is set by AIMASTER_AGENT__NAME in capitals."""

    kernel_log: str = ""
    """A path, `journal` or `none`; empty: /dev/kmsg, else a log file, else the journal."""
    sys_root: str = "/sys"
    """The kernel's tree of devices, where the host's is mounted elsewhere."""
    cgroup_root: str = "/sys/fs/cgroup"
    """The control groups."""
    log_paths: str = ""
    """Patterns of further logs to follow, parted by colons; `**` means any depth."""
    call_seconds: float = 10.0
    """A call of NVML, or of a network file system, that takes longer hangs."""
    clock_seconds: float = 30.0
    """Between two comparisons of the clock with the master's."""


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """Where this node stands. Set by AIMASTER_AGENT__LABELS."""

    labels: str = ""
    """Failure domains, widest first: `zone=a,rack=r7,switch=s3`. Copies of this node's snapshots go to other ones."""

    def domains(self) -> dict[str, str]:
        """Raises msgspec.ValidationError on anything but NAME=VALUE parted by commas."""
        found: dict[str, str] = {}
        for word in filter(None, (word.strip() for word in self.labels.split(","))):
            name, equals, value = (part.strip() for part in word.partition("="))
            if not name or not equals or not value or name in found:
                raise msgspec.ValidationError(
                    f"{ENV_PREFIX}LABELS has {word!r}: it takes NAME=VALUE,NAME=VALUE, each name once, widest domain first"
                )
            found[name] = value
        return found


class Keeping(msgspec.Struct, frozen=True, kw_only=True):
    """How snapshots are kept on storage and at peers."""

    storage: str
    """Folder or mount."""
    keep: int = 3
    """Checkpoints on storage; -1 keeps all."""
    keep_every: int = 0
    """A checkpoint of each so-many-th step stays; 0: none."""
    replicate_every: int = 1
    """Each so-many-th step is copied to peers; 0: never."""
    copies: int = 1
    """Peers that hold a copy."""
    copy_bytes_per_second: float = 0.0
    """All copies of this node together send no faster; 0: as fast as the wire."""
    labels: dict[str, str] = {}
    """Failure domains of this node, widest first."""


def read_pace(environment: Mapping[str, str]) -> Pace:
    """Defaults, overridden by the environment; raises msgspec.ValidationError with the name that is wrong."""
    return _read(environment, Pace)


def read_sight(environment: Mapping[str, str]) -> Sight:
    """The same for where to look."""
    return _read(environment, Sight)


def _read(environment: Mapping[str, str], kind: type[T]) -> T:
    given = {name[len(ENV_PREFIX) :].lower(): text for name, text in environment.items() if name.startswith(ENV_PREFIX)}
    known = {field.name for one in (Pace, Sight, Whereabouts) for field in msgspec.structs.fields(one)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise msgspec.ValidationError(f"no setting {ENV_PREFIX}{unknown[0].upper()}; see `aimaster-agent --help`")
    own = {field.name for field in msgspec.structs.fields(kind)}
    return msgspec.convert({name: text for name, text in given.items() if name in own}, kind, strict=False)


def read_plan(places: RunPlaces) -> JobPlan:
    """The plan of the run; raises FileNotFoundError or msgspec.ValidationError."""
    return msgspec.json.decode(places.plan.read_bytes(), type=JobPlan)


def read_keeping(places: RunPlaces, environment: Mapping[str, str]) -> Keeping:
    """From the resolved configuration where there is one (a wrapped command has none), and the labels from the environment."""
    labels = _read(environment, Whereabouts).domains()
    try:
        snapshots = settings.from_json(places.resolved.read_bytes()).aimaster.snapshots
    except FileNotFoundError:
        return Keeping(storage=os.fspath(places.storage), labels=labels)
    return Keeping(
        storage=snapshots.storage or os.fspath(places.storage),
        keep=snapshots.keep or 3,
        keep_every=snapshots.keep_every,
        replicate_every=snapshots.replicate_every,
        copies=snapshots.copies,
        copy_bytes_per_second=snapshots.copy_mib_per_second * 2**20,
        labels=labels,
    )


def bearer(path: Path) -> dict[str, str]:
    """The header with which an agent shows itself to master, controller and peers; raises TokenFileError."""
    secret = secret_of(path, "member")
    return {"Authorization": f"Bearer {secret}"} if secret else {}
