"""Which nodes hold a node's peer copies, pure: never the node itself, and as far from it as the labels tell.

Labels are failure domains, widest first (for example {"zone": "a", "rack": "r7", "switch": "s3"}). Copies are spread evenly: every node gives
and takes about the same, and one node's loss moves only the copies that it held (rendezvous hashing).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from xxhash import xxh3_64_intdigest


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A node that can hold copies."""

    name: str
    """Its name."""
    labels: Mapping[str, str] = {}
    """Failure domains, widest first."""
    free_bytes: int | None = None
    """Memory it can give; None where it is not known."""


def choose_peers(node: str, nodes: Sequence[Node], *, copies: int = 1, need_bytes: int = 0) -> list[str]:
    """The names of up to `copies` nodes for `node`'s copies, best first; fewer where there are no more."""
    own = next((one for one in nodes if one.name == node), Node(name=node))
    fitting = [one for one in nodes if one.name != node and (one.free_bytes is None or one.free_bytes >= need_bytes)]
    chosen: list[Node] = []
    while fitting and len(chosen) < copies:
        best = max(fitting, key=lambda one: (_distance([own, *chosen], one), _lot(node, one.name)))
        chosen.append(best)
        fitting.remove(best)
    return [one.name for one in chosen]


def _distance(others: Sequence[Node], one: Node) -> tuple[int, ...]:
    """For each label, widest first, how many of the others lie elsewhere; an unknown domain counts as the same."""
    keys = list(dict.fromkeys(key for other in (*others, one) for key in other.labels))
    return tuple(
        sum(key in one.labels and key in other.labels and one.labels[key] != other.labels[key] for other in others)
        for key in keys
    )


def _lot(node: str, candidate: str) -> int:
    return xxh3_64_intdigest(f"{node}\0{candidate}".encode())
