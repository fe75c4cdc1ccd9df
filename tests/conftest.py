"""What every test shares: quiet cores, no network hubs, seeded search, and skips that say their reason."""

import importlib.util
import os
import signal
from pathlib import Path

# Before torch is imported anywhere, here or in a child process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

# Behind nohup or in the background of a script these come ignored, and every process that a test starts would ignore them too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of test data."""
    return ROOT / "tests" / "data"


@pytest.fixture(scope="session")
def gsm8k_folder() -> Path:
    """The folder with GSM8K's train.jsonl and test.jsonl, named by GSM8K_DIR."""
    folder = os.environ.get("GSM8K_DIR")
    if not folder:
        pytest.skip("GSM8K_DIR is unset: name the folder that holds GSM8K's train.jsonl and test.jsonl")
    return Path(folder)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
