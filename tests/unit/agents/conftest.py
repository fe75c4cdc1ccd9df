"""The fake NVIDIA driver, built once a session where a compiler is."""

import pytest

from tests.fakes import fake_nvml


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory):
    if not fake_nvml.has_compiler():
        pytest.skip("gcc is not installed: the fake NVML cannot be built")
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(nvml_library, tmp_path, monkeypatch):
    """A fake driver of two GPUs that helpers started by this test find."""
    driver = fake_nvml.FakeNvml(nvml_library, tmp_path / "nvml-state")
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
    return driver
