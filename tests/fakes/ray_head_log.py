"""Writes a Ray head's gcs_server.out as a big cluster would: one node truly failed, tens of thousands of lines speak of its victims.

The truth stands beside the log. `loud_first` decides the order: victims die and are reported before the head notices that the guilty node is gone
(health checks take a minute), or after it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

HEADER = "[2026-06-24 {clock} {level} 65 {thread}] (gcs_server) {place}: {text}"


class RayTruth(NamedTuple):
    category: str
    node: str
    action: str


def ray_head_log(
    *, nodes: int = 1000, followers: int = 50_000, loud_first: bool = True, startup: bool = False, seed: int = 1
) -> tuple[Iterator[str], RayTruth]:
    """Lines of the log and what really happened."""
    dice = random.Random(seed)
    guilty = dice.randrange(nodes)
    truth = (
        RayTruth("ray.memory_monitor", _address(guilty), "stop_job")
        if startup
        else RayTruth("node.lost", _address(guilty), "replace_node")
    )
    body = (
        _startup(dice, nodes, followers, guilty)
        if startup
        else _running(dice, nodes, followers, guilty, loud_first=loud_first)
    )
    return body, truth


def _address(node: int) -> str:
    return f"10.{node // 62500}.{node // 250 % 250}.{node % 250 + 1}"


def _node_id(node: int) -> str:
    return f"{node * 2654435761 % (1 << 64):016x}{node:040x}"


def _line(second: float, level: str, place: str, text: str, thread: int = 65) -> str:
    whole = int(second)
    clock = f"{10 + whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02},{int(second % 1 * 1000):03}"
    return HEADER.format(clock=clock, level=level, thread=thread, place=place, text=text)


def _register(nodes: int) -> Iterator[str]:
    for node in range(nodes):
        yield _line(
            node * 0.01,
            "I",
            "gcs_node_manager.cc:78",
            f"Registering node info, node id = {_node_id(node)}, address = {_address(node)}, node name = {_address(node)}",
        )


def _chatter(dice: random.Random, start: float, count: int) -> Iterator[str]:
    for number in range(count):
        yield _line(
            start + number * 0.05,
            "I",
            "gcs_placement_group_mgr.cc:831",
            f"Placement group of an id, {dice.randrange(1 << 48):012x}, is created successfully.",
        )


def _worker_exit(dice: random.Random, second: float, node: int, kind: str = "SYSTEM_ERROR") -> str:
    detail = (
        "Task was killed due to the node running low on memory."
        if kind == "NODE_OUT_OF_MEMORY"
        else "Worker unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. (1) The process is killed "
        "by SIGKILL by OOM killer due to high memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly due to SIGSEGV "
        "or other unexpected errors."
    )
    return _line(
        second,
        "W",
        "gcs_worker_manager.cc:55",
        f"Reporting worker exit, worker id = {dice.randrange(1 << 112):028x}, node id = {_node_id(node)}, address = {_address(node)}, "
        f"exit_type = {kind}, exit_detail = {detail}",
    )


def _victims(dice: random.Random, start: float, count: int, nodes: int, guilty: int) -> Iterator[str]:
    for number in range(count):
        node = dice.randrange(nodes)
        yield _worker_exit(dice, start + number * 0.0005, node if node != guilty else (node + 1) % nodes)


def _death(start: float, node: int) -> Iterator[str]:
    name, address = _node_id(node), _address(node)
    for number, left in enumerate((4, 3, 2, 1, 0)):
        yield _line(
            start + number * 10,
            "W",
            "gcs_health_check_manager.cc:108",
            f"Health check failed for node {name}, remaining checks {left}, status 4, response status 0, status message Deadline Exceeded, status details ",
            90,
        )
    yield _line(
        start + 41,
        "W",
        "gcs_health_check_manager.cc:121",
        f"Node is dead because the health check failed. node_id={name}",
        90,
    )
    yield _line(
        start + 41.1,
        "I",
        "gcs_node_manager.cc:373",
        f"Removing node, node name = {address}, death reason = UNEXPECTED_TERMINATION, death message = health check failed due to missing too many "
        f"heartbeats node_id={name}",
    )
    yield _line(start + 41.2, "I", "gcs_actor_manager.cc:1117", f"Node is dead, reconstructing actors. node_id={name}")


def _running(dice: random.Random, nodes: int, followers: int, guilty: int, *, loud_first: bool) -> Iterator[str]:
    yield from _register(nodes)
    yield from _chatter(dice, 600, 2000)
    idle = (guilty + 7) % nodes
    yield _line(
        900,
        "I",
        "gcs_node_manager.cc:373",
        f"Removing node, node name = {_address(idle)}, death reason = AUTOSCALER_DRAIN_IDLE, death message = idle node_id={_node_id(idle)}",
    )
    flaky = (guilty + 13) % nodes
    yield _line(
        1000,
        "W",
        "gcs_health_check_manager.cc:108",
        f"Health check failed for node {_node_id(flaky)}, remaining checks 4, status 4, response status 0, status message Deadline Exceeded, status details ",
        90,
    )
    if loud_first:
        yield from _victims(dice, 1200, followers, nodes, guilty)
        yield from _death(1201, guilty)
    else:
        yield from _death(1201, guilty)
        yield from _victims(dice, 1243, followers, nodes, guilty)
    yield from _chatter(dice, 1400, 100)


def _startup(dice: random.Random, nodes: int, followers: int, guilty: int) -> Iterator[str]:
    yield from _register(nodes)
    for number in range(6):
        yield _worker_exit(dice, 30 + number, guilty, "NODE_OUT_OF_MEMORY")
        yield from _victims(dice, 31 + number, followers // 6, nodes, guilty)
