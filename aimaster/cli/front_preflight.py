"""Looks before anything starts: what would surely fail is said now, all of it at once, in sentences a person can act on.

What the configuration itself tells (paths, models, rows, devices) the settings have found already; here is what only this machine
tells: packages, ports, memory, programs. Cheap on purpose: packages are looked for, not imported. What these cannot tell is left to
the members, which say it in their own words.
"""

import importlib.util
import os
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

from aimaster.settings import JobSettings
from aimaster.wire.places import MEMORY_ROOT


def check_training(job: JobSettings, port: int) -> list[str]:
    """What would fail of a job of ours; empty when nothing is known to."""
    return [
        *check_memory(),
        *check_port(job.aimaster.host, port),
        *check_packages(job.aimaster.engine),
    ]


def check_command(command: Sequence[str], base: Path, port: int) -> list[str]:
    """What would fail of a wrapped command."""
    troubles = [*check_memory(), *check_port("127.0.0.1", port)]
    program = command[0]
    if shutil.which(program) is None:
        return [*troubles, f"no such program: {program!r} is neither on PATH nor an executable file"]
    if Path(program).name.startswith("python") and len(command) > 1 and command[1].endswith(".py"):
        script = command[1]
        if not (base / script).exists():
            troubles.append(f"no such script: {script} (looked in {base})")
    return troubles


def check_memory() -> list[str]:
    """Whether snapshot memory can be made at all."""
    if not os.access(MEMORY_ROOT, os.W_OK):
        return [f"{MEMORY_ROOT} cannot be written: snapshots live there. Mount a tmpfs on it (docker: --shm-size)."]
    return []


def check_port(host: str, port: int) -> list[str]:
    """Whether the wished port of the master is free; 0 always is."""
    if port == 0:
        return []
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = "Name another with --port, or leave it out for a free one."
            return [f"port {port} on {host} cannot be used: {error.strerror}. {remedy}"]
    return []


def check_packages(engine: str) -> list[str]:
    """Whether the packages that members import are there. They are looked for, not imported."""
    troubles = []
    if importlib.util.find_spec("torch") is None:
        troubles.append("torch is not installed: a training job needs `pip install 'aimaster-selfheal[runtime]'`")
    if engine == "vllm" and importlib.util.find_spec("vllm") is None:
        remedy = "`pip install 'aimaster-selfheal[vllm]'`, or choose engine = \"hf\""
        troubles.append(f"aimaster.engine is vllm, which is not installed: {remedy}")
    return troubles
