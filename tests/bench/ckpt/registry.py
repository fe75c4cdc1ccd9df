"""Which engines there are, and which of them a run takes."""

from tests.bench.ckpt import engines, peers
from tests.bench.ckpt.engines import Engine

ALL: list[type[Engine]] = [
    engines.Floor, engines.OursMemory, peers.DLRoverMemory, peers.NvrxLocal, engines.Ours, peers.DLRover, peers.TorchCheckpointing,
    peers.DcpReused, peers.DcpProcess, peers.DcpAsync, peers.NvrxFork, peers.TorchSnapshot, peers.DcpSave, engines.Safetensors,
    engines.TorchSave, engines.TorchSaveMmap,
]  # fmt: skip
QUICK: list[type[Engine]] = [engines.Floor, engines.OursMemory, engines.Ours, peers.DcpAsync, engines.TorchSave]
LARGE: list[type[Engine]] = [
    engines.Floor, engines.OursMemory, peers.DLRoverMemory, engines.Ours, peers.DLRover, peers.TorchCheckpointing, peers.DcpReused,
    peers.DcpAsync, peers.DcpSave, engines.TorchSave, engines.TorchSaveMmap,
]  # fmt: skip
"""From 4 GiB on: without those that need several times the state's memory, or minutes a save."""
BY_NAME = {engine.__name__: engine for engine in ALL}
