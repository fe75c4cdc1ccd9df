"""What the network ports' readings mean. Pure: rates are made of two readings, flaps of the times at which a port was seen down.

A port that was never up is not this job's. A port that went down is told as long as it is; three times in twelve hours is a bad cable
even while it is up. Thresholds are those of the field: one `link_downed` is one too many, symbol errors count by the hour.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from agents.rules.base import WARNS, conclude, number
from aimaster.wire.health import Finding, Reading

LEAST_SECONDS: Final = 1.0
PER_SECOND: Final = {
    "symbol_error": 10.0,
    "port_rcv_errors": 10.0,
    "local_ack_timeout_err": 1.0,
    "port_xmit_discards": 100.0,
    "roce_slow_restart": 10.0,
    "link_error_recovery": 5.0 / 60,
}
"""Above this rate the link is bad enough to be told as a warning."""
FATAL: Final = ("link_downed", "excessive_buffer_overrun_errors", "local_link_integrity_errors", "rnr_nak_retry_err")
"""Any increase is told."""
SYMBOLS_PER_HOUR: Final = 120.0
FLAPS: Final = 3
FLAP_SECONDS: Final = 12 * 3600.0
MOST_CARRIER_CHANGES: Final = 2


class FabricRules:
    """Judges one node's ports."""

    def __init__(self) -> None:
        self._before: dict[str, Reading] = {}
        self._first: dict[str, Reading] = {}
        self._was_up: set[str] = set()
        self._downs: dict[str, deque[float]] = {}

    def judge(self, readings: Sequence[Reading]) -> list[Finding]:
        """The conditions that hold now."""
        found: list[Finding] = []
        for reading in readings:
            if reading.state != "ok":
                continue
            if reading.kind == "fabric.port":
                name = f"{reading.values['device']}:{reading.values['port']}"
                found += self._link(reading, name, up=reading.values["link"] == "ACTIVE")
                found += self._counters(reading, name)
            elif reading.kind == "fabric.nic":
                name = str(reading.values["device"])
                found += self._link(reading, name, up=reading.values["link"] in ("up", "unknown"))
                found += self._carrier(reading, name)
        return found

    def _link(self, reading: Reading, name: str, *, up: bool) -> list[Finding]:
        at = reading.time_seconds
        downs = self._downs.setdefault(name, deque(maxlen=16))
        before = self._before.get(name)
        self._first.setdefault(name, reading)
        if up:
            self._was_up.add(name)
        elif name in self._was_up and (before is None or before.values["link"] != reading.values["link"]):
            downs.append(at)
        if reading.kind == "fabric.nic":
            self._before[name] = reading
        if name not in self._was_up:
            return []
        if not up:
            text = f"port {name} went down: {reading.values['link']}"
            return [
                conclude(
                    reading,
                    "fabric.down",
                    "net.port_down",
                    text,
                    about=name,
                    weight=70,
                    severity="critical",
                    device=name,
                )
            ]
        recent = sum(at - down <= FLAP_SECONDS for down in downs)
        if recent < FLAPS:
            return []
        text = f"port {name} went down {recent} times in {FLAP_SECONDS / 3600:.0f} hours"
        return [
            conclude(reading, "fabric.flaps", "net.port_down", text, about=name, weight=60, device=name, count=recent)
        ]

    def _counters(self, reading: Reading, name: str) -> list[Finding]:
        before, first = self._before.get(name), self._first[name]
        seconds = 0.0 if before is None else reading.time_seconds - before.time_seconds
        if before is not None and seconds < LEAST_SECONDS:
            return []
        self._before[name] = reading
        if before is None:
            return []
        found = []
        for counter in FATAL:
            more = number(reading, counter) - number(first, counter)
            if more > 0:
                text = f"port {name} {counter} increased by {more:.0f}"
                found.append(
                    conclude(
                        reading,
                        f"fabric.{counter}",
                        "net.port_down",
                        text,
                        about=name,
                        weight=50,
                        device=name,
                        count=int(more),
                    )
                )
        for counter, most in PER_SECOND.items():
            rate = (number(reading, counter) - number(before, counter)) / seconds
            if rate > most:
                text = f"port {name} {counter} grows by {rate:.1f} a second"
                found.append(
                    conclude(
                        reading,
                        f"fabric.{counter}",
                        "net.port_down",
                        text,
                        about=name,
                        weight=WARNS,
                        severity="warning",
                        device=name,
                        per_second=f"{rate:.2f}",
                    )
                )
        lasted = reading.time_seconds - first.time_seconds
        symbols = number(reading, "symbol_error") - number(first, "symbol_error")
        if symbols > SYMBOLS_PER_HOUR * max(1.0, lasted / 3600):
            text = f"port {name} has had {symbols:.0f} symbol errors in {lasted / 3600:.1f} hours"
            found.append(
                conclude(
                    reading,
                    "fabric.symbols",
                    "net.port_down",
                    text,
                    about=name,
                    weight=50,
                    device=name,
                    count=int(symbols),
                )
            )
        return found

    def _carrier(self, reading: Reading, name: str) -> list[Finding]:
        more = number(reading, "carrier_changes") - number(self._first[name], "carrier_changes")
        if more <= MOST_CARRIER_CHANGES:
            return []
        text = f"card {name} has lost or found its carrier {more:.0f} times"
        return [
            conclude(
                reading,
                "fabric.carrier",
                "net.port_down",
                text,
                about=name,
                weight=WARNS,
                severity="warning",
                device=name,
                count=int(more),
            )
        ]
