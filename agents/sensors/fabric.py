"""Network ports: InfiniBand and RoCE under /sys/class/infiniband, and the machine's own network cards under /sys/class/net.

fabric.port   one port: state, rate, and the error counters that tell of a bad link      fabric.nic   one card: carrier and how often it changed

Counters are read as they stand; rates are the rules' business. A card without a device of its own (lo, bridges, veth) is none.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from aimaster.wire.health import Reading, ReadingState, Scalar, Subject

SYS: Final = Path("/sys")
COUNTERS: Final = (
    "link_downed", "link_error_recovery", "symbol_error", "local_link_integrity_errors", "excessive_buffer_overrun_errors",
    "port_rcv_errors", "port_xmit_discards", "port_rcv_data", "port_xmit_data",
)  # fmt: skip
HARDWARE_COUNTERS: Final = ("rnr_nak_retry_err", "local_ack_timeout_err", "roce_slow_restart", "out_of_sequence", "packet_seq_err")  # fmt: skip
MOST_PORTS: Final = 64
_RATE: Final = re.compile(r"([\d.]+) Gb/sec")


class FabricSensor:
    """All ports and cards under a root like /sys."""

    name = "fabric"

    def __init__(self, node: str, *, root: Path = SYS, interval_seconds: float = 5.0) -> None:
        self.interval_seconds = interval_seconds
        self._node = node
        self._root = root

    def supported(self) -> str:
        return "" if (self._root / "class").is_dir() else f"no {self._root}/class here"

    def read(self, now: float) -> list[Reading]:
        ports = sorted((self._root / "class" / "infiniband").glob("*/ports/*"))
        readings = [self._port(now, port) for port in ports[:MOST_PORTS]]
        cards = sorted((self._root / "class" / "net").glob("*/device"))
        readings += [self._card(now, card.parent) for card in cards[:MOST_PORTS]]
        return readings

    def _port(self, now: float, port: Path) -> Reading:
        state = _text(port / "state")
        values: dict[str, Scalar] = {
            "device": port.parent.parent.name,
            "port": port.name,
            "link": _word(state),
            "physical": _word(_text(port / "phys_state")),
            "layer": _text(port / "link_layer") or "",
        }
        found = _RATE.match(_text(port / "rate") or "")
        if found:
            values["rate_bits_per_second"] = float(found[1]) * 1e9
        for folder, names in (("counters", COUNTERS), ("hw_counters", HARDWARE_COUNTERS)):
            for name in names:
                number = _number(port / folder / name)
                if number is not None:
                    values[name] = number
        return self._reading(now, "fabric.port", values, "ok" if state is not None else "unreadable")

    def _card(self, now: float, card: Path) -> Reading:
        values: dict[str, Scalar] = {"device": card.name, "link": _text(card / "operstate") or "unknown"}
        for name in ("carrier", "carrier_changes", "speed"):
            number = _number(card / name)
            if number is not None:
                values[name] = number
        return self._reading(now, "fabric.nic", values)

    def _reading(self, now: float, kind: str, values: dict[str, Scalar], state: ReadingState = "ok") -> Reading:
        return Reading(
            sensor=self.name, kind=kind, node=self._node, time_seconds=now,
            state=state, subject=Subject(node=self._node), values=values,
        )  # fmt: skip


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:  # not there, or a card that is down refuses (EINVAL)
        return None


def _word(text: str | None) -> str:
    """`ACTIVE` out of `4: ACTIVE`."""
    return "unknown" if text is None else text.rpartition(": ")[2]


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text and text.lstrip("-").isdigit() else None
