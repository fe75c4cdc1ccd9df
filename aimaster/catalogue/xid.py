"""What the NVIDIA driver's Xid and SXid codes mean, from the table that lies beside this file.

Codes 144 to 150 are decided by their unit and error status, not by the code or by the word Fatal alone; 94 and 95 by the reset words in the line.
"""

from __future__ import annotations

import csv
import re
from importlib.resources import files
from typing import Final

import msgspec

from aimaster.wire.health import Action, FaultOf, Severity

FOLLOWERS: Final = frozenset({43, 45, 63, 92, 137, 154})
"""They follow or point to another event and are never the root by themselves."""

APPLICATION_FIRST: Final = frozenset({11, 13, 25, 31, 32, 39, 40, 41, 43, 69, 70, 71, 72, 75, 76, 77, 80, 85, 109})
"""Usually the program's doing; hardware only by repetition in one place."""

UNITS: Final = {
    "SAW_MVB": (144, {0x2, 0x10}, {0x1, 0x4, 0x8, 0x20}),
    "RLW_CTRL": (145, set(), {0x80000000}),
    "RLW_REMAP": (145, {0x40, 0x80}, {0x100, 0x200, 0x80000000}),
    "RLW_RSPCOL": (145, {0x2}, {0x1, 0x80000000}),
    "RLW_RXPIPE": (145, set(), {0x1, 0x2, 0x4, 0x8, 0x80000000}),
    "RLW_SRC_TRACK": (145, {0x1, 0x10, 0x20}, {0x2, 0x80000000}),
    "RLW_TAGSTATE": (145, {0x2, 0x20000, 0x100000}, {0x1, 0x10000, 0x80000000}),
    "TLW_CTRL": (146, {0x4}, {0x1, 0x2, 0x80000000}),
    "TLW_RX": (146, {0x4}, {0x1, 0x2, 0x80000000}),
    "TLW_TX": (146, {0x4}, {0x1, 0x2, 0x80000000}),
    "NETIR_MFDE_EVENT": (149, {0x1, 0x4, 0x5, 0x7}, {0x3}),
}
"""Unit: (Xid, error status that needs a GPU reset, error status to ignore)."""

ALWAYS_IGNORED: Final = ("TREX", "NVLPW", "NETIR_BER_EVENT")

SXID_FATAL: Final = frozenset({12020, 22003, 22011, *range(23001, 23018)})
SXID_POTENTIALLY_FATAL: Final = frozenset(
    {11001, 11009, 11013, 11018, 11019, 11020, 12001, 12002, 12022, *range(12024, 12028), 12030, 12031, 12032}
    | {14017, 15001, 15006, 15009, 15010, 15012, 15013, 20034, *range(24004, 24008)}
)

NVLINK5 = re.compile(
    r"(?P<unit>[A-Z][A-Z_0-9]+)(?: \w+)? (?P<word>Fatal|Nonfatal|Non-fatal)\b"
    r"(?:.*?\((?P<intrinfo>0x[0-9a-fA-F]+) (?P<status>0x[0-9a-fA-F]+))?"
)


class Xid(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    code: int
    name: str
    category: str
    severity: Severity
    fault_of: FaultOf
    action: Action
    notes: str


class Meaning(msgspec.Struct, frozen=True, kw_only=True):
    """What one Xid line says after its own words were weighed."""

    category: str
    severity: Severity
    fault_of: FaultOf
    action: Action
    follower: bool = False
    why: str = ""


class XidTable:
    """Look-up by code."""

    def __init__(self, rows: dict[int, Xid]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, code: int) -> Xid | None:
        return self._rows.get(code)

    def codes(self) -> tuple[int, ...]:
        return tuple(self._rows)

    def read(self, code: int, text: str) -> Meaning:
        """The meaning of one line: code and the words after it."""
        row = self._rows.get(code)
        if row is None:
            return Meaning(category="unknown", severity="warning", fault_of="platform", action="ignore", follower=True)
        if 144 <= code <= 150:
            return _read_nvlink(row, text)
        if code in (94, 95):
            return _read_contained(row, text)
        return Meaning(
            category=row.category if row.category != "benign" else "benign",
            severity=row.severity,
            fault_of=row.fault_of,
            action=row.action,
            follower=code in FOLLOWERS or row.action == "ignore",
            why=row.name,
        )


def load_xids() -> XidTable:
    """The packaged table."""
    rows: dict[int, Xid] = {}
    with files(__package__).joinpath("xid.csv").open(encoding="utf-8") as table:
        for row in csv.DictReader(table):
            code = int(row.pop("xid"))
            rows[code] = msgspec.convert({"code": code, **row}, Xid)
    return XidTable(rows)


def sxid_is_fatal(code: int, word: str) -> bool:
    """The word in the line decides; the code only where the line has none."""
    if word:
        return word.lower() == "fatal"
    return code in SXID_FATAL


def _read_contained(row: Xid, text: str) -> Meaning:
    needs_reset = "RST: Yes" in text
    if row.code == 94 and needs_reset:
        return Meaning(
            category="gpu.ecc",
            severity="critical",
            fault_of="hardware",
            action="replace_node",
            why="contained, but the GPU needs a reset",
        )
    return Meaning(category=row.category, severity=row.severity, fault_of=row.fault_of, action=row.action, why=row.name)


def _read_nvlink(row: Xid, text: str) -> Meaning:
    """Unit and error status decide (NVLink 5)."""
    ignored = Meaning(category=row.category, severity="warning", fault_of=row.fault_of, action="ignore", follower=True)
    fatal = Meaning(
        category="gpu.nvlink", severity="critical", fault_of="hardware", action="replace_node", why=row.name
    )
    found = NVLINK5.search(text)
    if found is None:
        return ignored if row.action == "ignore" else fatal
    unit, word = found["unit"], found["word"]
    status = int(found["status"], 16) if found["status"] else None
    if unit.startswith(ALWAYS_IGNORED):
        return ignored
    if unit.startswith("MSE"):
        return fatal
    if unit.startswith("NETIR") and unit not in UNITS:
        return fatal if word == "Fatal" else ignored
    known = next((rule for name, rule in UNITS.items() if unit.startswith(name)), None)
    if known is None or status is None:
        return fatal if word == "Fatal" else ignored
    _, resets, ignores = known
    if status in resets:
        return fatal
    if status in ignores or word != "Fatal":
        return ignored
    return fatal
