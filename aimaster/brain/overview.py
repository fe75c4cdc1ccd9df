"""The verdict on everything that is known of all nodes now: what their logs say, by the same code that reads finished logs, and what their
machines were found to say. Pure.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec.structs import replace

from aimaster.brain.diagnose import diagnose
from aimaster.brain.state import State, View
from aimaster.catalogue.findings import collect
from aimaster.catalogue.kept import Kept, Steps
from aimaster.catalogue.xid import XidTable
from aimaster.wire import codec
from aimaster.wire.health import Finding, Verdict
from aimaster.wire.messages import LogPicture

SUPPORTS: Final = 20
"""Lighter findings of a machine are notes (see Finding.weight)."""


def with_pictures(known: Mapping[str, Kept], node: str, pictures: Iterable[LogPicture]) -> dict[str, Kept]:
    """What a node's logs say, with the pictures of a pulse."""
    logs = dict(known)
    for one in pictures:
        if one.whole:
            logs[one.file] = replace(codec.decode(one.whole, Kept), node=node, file=f"{node}/{one.file}")
        elif one.file in logs:
            logs[one.file] = replace(logs[one.file], steps=codec.decode(one.steps, Steps))
    return logs


def diagnose_all(state: State, view: View, xids: XidTable, now: float) -> Verdict:
    """Who failed first, and why."""
    pictures = {(node, file): kept for node, seen in view.nodes.items() for file, kept in seen.logs.items()}
    logs = [pictures[name] for name in sorted(pictures)]
    told = [one for one in state.findings if one.weight >= SUPPORTS and not pictures.keys() & _places(one)]
    found = collect(logs, xids, now=now)
    return diagnose((*found, *told), now)


def read(view: View) -> dict[str, object]:
    """What a diagnosis now rests on, in the words of `aimaster diagnose`."""
    logs = [kept for seen in view.nodes.values() for kept in seen.logs.values()]
    nodes = sorted({kept.node for kept in logs if kept.node})
    return {"files": len(logs), "bytes": sum(kept.steps.bytes_read for kept in logs), "nodes": nodes}


def _places(finding: Finding) -> set[tuple[str, str]]:
    """The logs that a finding was read from: what is said in a log whose picture is here counts once."""
    return {(line.node or "", line.file) for line in finding.evidence}
