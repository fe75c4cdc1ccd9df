"""The seam between the front process and whatever places its programs: this machine, or an existing engine.

Only the engine's own programs pass here, the master and one agent per node. Members are started by agents, which outlive this
seam. Four verbs: start a program, learn that it ended, ask it to end, end it.
"""

from pathlib import Path
from typing import Protocol

import msgspec

from aimaster.wire.ids import NodeId


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """One program of the engine. Example: `agent-node-0`, the sidecar of node-0."""

    name: str
    """Unique within the run: `master`, `agent-NODE`."""
    argv: tuple[str, ...]
    log: Path
    """Its stdout and stderr are appended here."""
    node: NodeId | None = None
    """Where it has to run; None: anywhere."""
    env: dict[str, str] = {}
    """Added to the front's environment."""


class Placed(Protocol):
    """A started program. After `start` returned, it runs whatever becomes of the front."""

    @property
    def pid(self) -> int: ...

    def fileno(self) -> int:
        """A descriptor that becomes readable when the program ends."""
        ...

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it), or None while it runs. Never blocks."""
        ...

    def ask_to_end(self) -> None:
        """SIGTERM or the engine's like; nothing when it has ended."""
        ...

    def kill(self) -> None:
        """End it now; nothing when it has ended."""
        ...


class Cluster(Protocol):
    """Places programs on nodes."""

    def start(self, program: Program) -> Placed:
        """Start it once. OSError when it cannot be started."""
        ...
