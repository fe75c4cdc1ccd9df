"""One name per node: joins folders, host names, addresses and Ray's node ids of one collection of logs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aimaster.catalogue.kept import Log

_ADDRESS = re.compile(r"^\d+\.\d+\.\d+\.\d+$")
_HOST_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
MOST_HOSTS: Final = 64
"""Of the hosts that one line names."""
_AWS_NAME = re.compile(r"^ip-(\d+)-(\d+)-(\d+)-(\d+)(?:\..*)?$")


def is_address(name: str) -> bool:
    """Whether a name is an IPv4 address."""
    return _ADDRESS.match(name) is not None


def plain(name: str) -> str:
    """A host name without its domain; an ip-10-0-0-7 style name as the address."""
    name = name.strip("[]")
    found = _AWS_NAME.match(name)
    if found:
        return ".".join(found.groups())
    return name if is_address(name) else name.split(".", 1)[0]


def expand_hosts(text: str) -> list[str]:
    """Slurm's short form of many hosts, in full: `gpu-[07-08,11],m3` is gpu-07, gpu-08, gpu-11 and m3. At most MOST_HOSTS of them."""
    hosts: list[str] = []
    for part in _HOST_PART.findall(text):
        hosts += _one_range(part)[: MOST_HOSTS - len(hosts)]
    return hosts


def _one_range(part: str) -> list[str]:
    """The first bracket of a name, spelt out; the rest of the name by itself, for it may hold another."""
    before, bracket, rest = part.partition("[")
    inside, closed, after = rest.partition("]")
    if not bracket or not closed:
        return [part]
    numbers: list[str] = []
    for piece in inside.split(","):
        low, _, high = piece.partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            return [part]
        last = min(int(high or low), int(low) + MOST_HOSTS)
        numbers += [str(number).zfill(len(low)) for number in range(int(low), last + 1)]
    tails = _one_range(after)
    return [f"{before}{number}{tail}" for number in numbers[:MOST_HOSTS] for tail in tails]


def _neighbours(host: str, node: str | None) -> bool:
    """Two names that differ in their numbers only: two nodes, never two names of one."""
    return node is not None and host != node and re.sub(r"\d+", "#", host) == re.sub(r"\d+", "#", node)


def _accused(scan: Log) -> set[str]:
    """Hosts that a log speaks of as others: what they print into it is theirs, not its own node's."""
    return {
        host
        for hit in scan.hits
        if hit.sign.role == "accusation" and hit.groups.get("node")
        for host in expand_hosts(hit.groups["node"])
    }


class Names:
    """Answers which node a name, address or id means."""

    def __init__(self, scans: Sequence[Log]) -> None:
        self._known = {scan.node for scan in scans if scan.node is not None}
        self._alias: dict[str, str] = {}
        self._ray: dict[str, str] = {}
        self._central: set[int] = set()
        claims: dict[str, set[str]] = {}
        for scan in scans:
            hosts = {
                plain(host) for host in scan.hosts if not is_address(host)
            }  # Ray's ip= names a member, not the log's node
            others = {plain(name) for name in _accused(scan)} - {scan.node}
            if (
                hosts & others
                or (len(hosts) > 1 and hosts - {scan.node})
                or any(_neighbours(host, scan.node) for host in hosts)
            ):
                self._central.add(id(scan))
            elif scan.node is not None and hosts:
                claims.setdefault(next(iter(hosts)), set()).add(scan.node)
            self._learn_addresses(scan, claims)
        for host, nodes in claims.items():
            if len(nodes) == 1 and host not in self._known:
                self._alias[host] = next(iter(nodes))
        for scan in scans:
            self._learn_ray(scan)

    def _learn_addresses(self, scan: Log, claims: dict[str, set[str]]) -> None:
        for hit in scan.hits:
            if hit.sign.id == "nccl.own-address" and scan.node is not None and id(scan) not in self._central:
                claims.setdefault(hit.groups["address"], set()).add(scan.node)

    def _learn_ray(self, scan: Log) -> None:
        for hit in scan.hits:
            node_id = hit.groups.get("node_id")
            if not node_id or hit.sign.source != "ray":
                continue
            where = hit.groups.get("address") or hit.groups.get("node") or hit.groups.get("name")
            if where and (hit.sign.kind == "fact" or node_id not in self._ray):
                self._ray[node_id] = where

    def ray_node(self, node_id: str) -> str | None:
        """The node of a Ray node id, where some line of the collection told it."""
        where = self._ray.get(node_id)
        return None if where is None else self.resolve(where)

    def resolve(self, name: str) -> str:
        """The node meant by a name: a folder of the collection if one fits, else the name itself.

        A pod of which no folder is known (raycluster-head-0) is the folder whose name is one of its parts.
        """
        if name in self._known:
            return name
        short = plain(name)
        if short in self._known:
            return short
        if short in self._alias:
            return self._alias[short]
        parts = set(short.split("-"))
        fitting = [known for known in self._known if known in parts or short.endswith(f"-{known}")]
        if len(fitting) == 1:
            return fitting[0]
        return name if is_address(name) else short

    def speaker_node(self, scan: Log, host: str) -> str | None:
        """The node that wrote a line of this log: its folder, except in a log that many nodes write to."""
        if not host:
            return scan.node
        if is_address(host) or id(scan) in self._central or scan.node is None:
            return self.resolve(host)
        return scan.node
