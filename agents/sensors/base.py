"""The one shape of all sensors, so that the daemon, `--once` and the tests drive the same code.

One that learns of events by itself (a kernel device, a helper's pipe) also has `fileno()`: it is read when that is readable, -1 means
not now. What a reading carries as text is handed on once; everything else is the newest picture until the next reading.
"""

from typing import Protocol

from aimaster.wire.health import Reading


class Sensor(Protocol):
    """Reads one kind of fact of this node."""

    name: str
    """A word from a closed set, used as a label."""
    interval_seconds: float
    """How often it is worth reading."""

    def supported(self) -> str:
        """Empty where it can be read here, else the reason why not. Asked once."""
        ...

    def read(self, now: float) -> list[Reading]:
        """The facts now (`now` in Unix seconds). Never raises for what may be missing on a machine: that is a reading's state."""
        ...
