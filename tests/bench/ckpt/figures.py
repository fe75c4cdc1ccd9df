"""From raw seconds to the figures that have targets: ratios inside one interleaved run. Pure.

A figure is None where an engine it needs is not installed or failed. `_cpu` figures are the same ratios in CPU seconds of the trainer: on a
machine whose cores are shared with other work they are the steadier ones.
"""

from statistics import median
from typing import Any, NamedTuple

Rounds = list[dict[str, Any]]


class Target(NamedTuple):
    """What a figure has to reach."""

    limit: float
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.limit:.4g}"


def targets(gib: float) -> dict[str, Target]:
    """Of one process with a state of that size."""
    large = gib >= 4
    faster = Target(4 if large else 3, at_least=True)
    return {
        "stall_overlapped_over_copy": Target(0.02),
        "stall_overlapped_ms_per_gib": Target(5),
        "best_waiting_peer_over_stall_overlapped": Target(20, at_least=True),
        "stall_copy_over_floor": Target(1.15),
        "stall_copy_over_dcp_default": Target(1 / 5 if large else 2 / 3),
        "stall_copy_over_best_peer": Target(1.1),
        "first_over_later": Target(1.5),
        "durable_cpu_seconds_per_gib": Target(0.9),
        "durable_cpu_over_best_peer": Target(1 / 3),
        "durable_over_torch_save": Target(1.0),
        "step_slowdown": Target(0.15),
        "restore_shm_over_floor": Target(1.3),
        "torch_load_over_restore_shm": faster,
        "dcp_load_over_restore_shm": faster,
        "torch_load_cold_over_restore_shm": Target(5, at_least=True),
        "dcp_load_cold_over_restore_shm": Target(5, at_least=True),
        "restore_shm_over_mmap_load": Target(1.0),
        "restore_peer_over_socket_and_floor": Target(1.3),
        "extra_memory": Target(2.05),
        "wrong_restores": Target(0),
    }


RANKS_TARGETS = {
    "stall_copy_over_floor": Target(1.15),
    "stall_copy_over_dcp_default": Target(1 / 3),
    "stall_copy_over_best_peer": Target(1.1),
    "first_over_later": Target(1.5),
    "restore_shm_over_floor": Target(1.3),
    "torch_load_over_restore_shm": Target(3, at_least=True),
    "dcp_load_over_restore_shm": Target(3, at_least=True),
    "wrong_restores": Target(0),
}
PARITY = ("DLRover", "DLRoverMemory", "TorchCheckpointing", "DcpReused")
"""Peers that stage into memory they reuse."""
WAITING = (*PARITY, "DcpAsync", "DcpProcess", "NvrxFork", "NvrxLocal", "TorchSnapshot")
"""Peers whose trainer waits for the copy."""


def later(rounds: Rounds, key: str) -> list[float]:
    """Of all saves but each process's first."""
    return [save[key] for one in rounds for save in one["saves"][1:] if save.get(key) is not None]


def middle(values: list[float]) -> float | None:
    return median(values) if values else None


def ratio(a: float | None, b: float | None) -> float | None:
    return round(a / b, 4) if a is not None and b else None


def least(values: dict[str, float | None], names: tuple[str, ...]) -> float | None:
    return min((value for name in names if (value := values.get(name))), default=None)


def of_one_process(results: dict[str, Rounds], overlap: dict[str, Any], wire: Rounds, gib: float) -> dict[str, Any]:
    """All figures of one size."""
    good = {name: [one for one in rounds if "error" not in one] for name, rounds in results.items()}
    stall, stall_cpu, cpu, durable = (
        {name: middle(later(rounds, key)) for name, rounds in good.items()}
        for key in ("stall", "stall_cpu", "save_cpu", "durable")
    )
    warm, warm_cpu, cold = (
        {name: middle([one[key] for one in rounds if one.get(key) is not None]) for name, rounds in good.items()}
        for key in ("restore", "restore_cpu", "restore_cold")
    )
    ours, memory = good.get("Ours", []), good.get("OursMemory", [])
    size = next((one["bytes"] for one in ours), gib * 2**30) / 2**30
    first = middle([one["saves"][0]["stall"] for one in memory])
    own_restore = warm.get("OursMemory")
    overlapped = overlap.get("stall_overlapped")
    writers = {name: value for name, value in cpu.items() if durable.get(name) is not None}
    per_gib = {
        "open_seconds_per_gib": middle([one["open_seconds"] for one in ours]),
        "durable_cpu_seconds_per_gib": cpu.get("Ours"),
        "stall_overlapped_ms_per_gib": overlapped * 1000 if overlapped is not None else None,
    }
    return {
        **{name: ratio(value, size) for name, value in per_gib.items()},
        "stall_overlapped_over_copy": ratio(overlapped, overlap.get("copy_seconds")),
        "stall_overlapped_cpu_over_copy": ratio(overlap.get("stall_overlapped_cpu"), overlap.get("copy_cpu")),
        "best_waiting_peer_over_stall_overlapped": ratio(least(stall, WAITING), overlapped),
        "stall_copy_over_floor": ratio(stall.get("OursMemory"), stall.get("Floor")),
        "stall_copy_over_floor_cpu": ratio(stall_cpu.get("OursMemory"), stall_cpu.get("Floor")),
        "stall_copy_over_dcp_default": ratio(stall.get("OursMemory"), stall.get("DcpAsync")),
        "stall_copy_over_best_peer": ratio(stall.get("OursMemory"), least(stall, PARITY)),
        "stall_copy_over_best_peer_cpu": ratio(stall_cpu.get("OursMemory"), least(stall_cpu, PARITY)),
        "first_over_later": ratio(first, stall.get("OursMemory")),
        "durable_cpu_over_best_peer": ratio(cpu.get("Ours"), least(writers, WAITING)),
        "durable_over_torch_save": ratio(durable.get("Ours"), durable.get("TorchSave")),
        "step_slowdown": _rounded(overlap.get("step_slowdown")),
        "restore_shm_over_floor": ratio(own_restore, warm.get("Floor")),
        "restore_shm_over_floor_cpu": ratio(warm_cpu.get("OursMemory"), warm_cpu.get("Floor")),
        "torch_load_over_restore_shm": ratio(warm.get("TorchSave"), own_restore),
        "dcp_load_over_restore_shm": ratio(least(warm, ("DcpSave", "DcpAsync", "DcpReused")), own_restore),
        "torch_load_over_restore_shm_cpu": ratio(warm_cpu.get("TorchSave"), warm_cpu.get("OursMemory")),
        "dcp_load_over_restore_shm_cpu": ratio(
            least(warm_cpu, ("DcpSave", "DcpAsync", "DcpReused")), warm_cpu.get("OursMemory")
        ),
        "restore_shm_over_mmap_load_cpu": ratio(warm_cpu.get("OursMemory"), warm_cpu.get("TorchSaveMmap")),
        "torch_load_cold_over_restore_shm": ratio(cold.get("TorchSave"), own_restore),
        "dcp_load_cold_over_restore_shm": ratio(cold.get("DcpSave"), own_restore),
        "restore_shm_over_mmap_load": ratio(own_restore, warm.get("TorchSaveMmap")),
        "restore_peer_over_socket_and_floor": _rounded(middle([one["ours"] / (one["raw"] + one["floor"]) for one in wire])),
        "extra_memory": _rounded(middle([one["extra_memory"] for one in ours])),
        "wrong_restores": sum(bool(one["wrong"]) for one in [*ours, *memory, *wire]),
    }  # fmt: skip


def of_ranks(found: dict[str, Any]) -> dict[str, Any]:
    """All figures of the sharded state; the first round of each engine is its first save."""

    def over(key: str) -> dict[str, float | None]:
        return {name: middle([one[key] for one in rounds[1:]]) for name, rounds in found["engines"].items()}

    stall, stall_cpu, restore, restore_cpu = (over(key) for key in ("stall", "stall_cpu", "restore", "restore_cpu"))
    floor, ours = "FLOOR copy_ of local shards into touched shared memory", "easyckpt, copy mode, memory only"
    dcp = ("dcp.async_save, reused stager", "dcp.async_save in a process, reused shared stager")
    return {
        "stall_copy_over_floor": ratio(stall[ours], stall[floor]),
        "stall_copy_over_floor_cpu": ratio(stall_cpu[ours], stall_cpu[floor]),
        "stall_copy_over_dcp_default": ratio(stall[ours], stall["dcp.async_save, default"]),
        "stall_copy_over_best_peer": ratio(stall[ours], least(stall, dcp)),
        "first_over_later": ratio(found["engines"][ours][0]["stall"], stall[ours]),
        "restore_shm_over_floor": ratio(restore[ours], restore[floor]),
        "restore_shm_over_floor_cpu": ratio(restore_cpu[ours], restore_cpu[floor]),
        "torch_load_over_restore_shm": ratio(restore["torch.save of local shards, a file each"], restore[ours]),
        "dcp_load_over_restore_shm": ratio(least(restore, ("dcp.save", *dcp)), restore[ours]),
        "wrong_restores": sum(bool(one["wrong"]) for one in found["engines"][ours]),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
