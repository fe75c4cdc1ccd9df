"""The sensor against the fake driver, a C library; `pytest -m gpu` asks the same of a real one."""

import os
import time

import pytest

from agents.rules.gpu import GpuRules
from agents.sensors.gpu import GpuSensor
from aimaster.catalogue import load_xids


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the deadline passed"
        time.sleep(0.01)
    return value


@pytest.fixture
def sensor(driver):
    sensor = GpuSensor("node-0", interval_seconds=0.1, limit_seconds=0.5)
    yield sensor
    sensor.close()


def find(sensor, kind, **values):
    """The next reading of a kind with these values."""

    def look():
        for reading in sensor.read(time.time()):
            if reading.kind == kind and all(reading.values.get(name) == value for name, value in values.items()):
                return reading
        return None

    return until(look)


def device(sensor, gpu="0", **values):
    return until(
        lambda: next(
            (
                one
                for one in sensor.read(time.time())
                if one.kind == "gpu.device"
                and one.subject.gpu == gpu
                and all(one.values.get(name) == value for name, value in values.items())
            ),
            None,
        )
    )


def test_every_value_is_read(sensor, driver):
    """Memory, heat, power, clocks, ECC, remapping, NVLink, PCIe, what the driver asks for, and who holds memory."""
    driver.set(gpu1__temp=91, gpu1__ecc_ue=3, gpu1__remap_failure=1, gpu1__throttle=0x48, recovery=2, pid=os.getpid())
    driver.set(
        ecc_ce=7,
        retired=5,
        retired_pending=1,
        remap_ue=2,
        pcie_replays=12,
        nvlink_errors=3,
        nvlink_recoveries=1,
        nvlink_down=1,
    )
    head = find(sensor, "gpu.nvml")
    assert head.values == {"count": 2, "driver": "999.fake", "events": True}
    one = device(sensor, "1", temperature_celsius=91, pids=str(os.getpid()))
    expected = {
        "uuid": "GPU-fake-1", "pci": "00000000:11:00.0", "status": "", "memory_total_bytes": 80 << 30, "power_watts": 300.0,
        "sm_clock_hertz": 1_980_000_000, "throttle_bits": 0x48, "ecc_uncorrected_volatile": 3, "ecc_uncorrected_aggregate": 3,
        "ecc_corrected_volatile": 7, "ecc_corrected_aggregate": 7, "remap_failure": True, "remap_pending": False,
        "remapped_uncorrected": 2, "remapped_corrected": 0, "retired_pages": 5, "retired_pending": True, "recovery_action": 2,
        "nvlink_up": 3, "nvlink_down": 1, "nvlink_replay_errors": 12, "nvlink_recovery_errors": 4, "pcie_replays": 12,
        "pcie_width": 16, "pcie_width_most": 16, "pcie_generation": 5, "process_bytes": 1 << 30, "utilization_ratio": 0.5,
    }  # fmt: skip
    assert {name: one.values[name] for name in expected} == expected


def test_what_is_not_there_is_an_answer(sensor, driver):
    """Not supported and cannot read leave the value out and say which of the two it is; neither makes the GPU bad."""
    driver.set(unsupported_power=1, unreadable_ecc=1, unsupported_links=1)
    one = device(sensor, missing_power="unsupported")
    assert one.state == "ok"
    assert one.values["missing_links"] == "unsupported"
    assert "Unknown Error" in one.values["missing_ecc"]
    assert not {"power_watts", "ecc_uncorrected_volatile", "nvlink_up"} & set(one.values)
    assert one.values["temperature_celsius"] == 40


def test_an_xid_is_a_reading_of_its_own(sensor, driver):
    """The driver's event names code and GPU, once."""
    find(sensor, "gpu.nvml")
    driver.xid(79, gpu=1)
    event = find(sensor, "gpu.xid")
    assert (event.subject.gpu, event.values["xid"], event.values["pci"]) == ("1", 79, "00000000:11:00.0")
    device(sensor)
    assert not [one for one in sensor.read(time.time()) if one.kind == "gpu.xid"]


@pytest.mark.parametrize(("key", "status"), [("lost", "lost"), ("reset", "reset_required")])
def test_a_lost_gpu_is_bad_and_the_other_is_not(sensor, driver, key, status):
    """GPU_IS_LOST and RESET_REQUIRED are states of one GPU."""
    device(sensor)
    driver.set(**{f"gpu1__{key}": 1})
    assert device(sensor, "1", status=status).state == "bad"
    assert device(sensor, "0").state == "ok"


def test_a_call_that_hangs_is_a_reading_and_the_helper_is_another(sensor, driver):
    """Over its limit the helper is killed, the call is named; when NVML answers again, so does the sensor."""
    device(sensor)
    first = sensor.pids
    driver.set(gpu1__hang_ms=60_000)
    hang = find(sensor, "gpu.hang")
    assert hang.state == "bad"
    assert hang.values["call"] == "nvmlDeviceGetMemoryInfo(1)"
    assert 0.5 <= hang.values["seconds"] < 10
    assert not os.path.exists(f"/proc/{first[0]}")
    driver.set(gpu1__hang_ms=0)
    device(sensor, "1")
    assert sensor.pids != first


def test_a_helper_that_dies_is_started_again(sensor, driver):
    """The next reading comes from another process."""
    device(sensor)
    first = sensor.pids[0]
    os.kill(first, 9)
    until(lambda: sensor.read(time.time()) and sensor.pids and sensor.pids[0] != first)
    device(sensor)


def test_a_driver_that_does_not_match_is_bad(sensor, driver):
    """The library's error at the start is a reading; the helper is tried again later, not at once."""
    driver.set(init=18)
    reading = find(sensor, "gpu.nvml", code=18)
    assert reading.state == "bad"
    driver.set(init=9)
    assert find(sensor, "gpu.nvml", code=9).state == "unreadable"


def test_a_machine_without_the_driver_says_so(monkeypatch):
    """No library: not supported here, and why."""
    sensor = GpuSensor("node-0")
    if os.environ.get("LD_LIBRARY_PATH") or not sensor.supported():
        pytest.skip("there is an NVML on this machine")
    assert "libnvidia-ml.so.1" in sensor.supported()
    sensor.close()


@pytest.fixture
def real():
    sensor = GpuSensor("node-0", interval_seconds=0.5)
    if reason := sensor.supported():
        sensor.close()
        pytest.skip(reason)
    yield sensor
    sensor.close()


@pytest.mark.gpu
def test_a_real_gpu_is_read(real):
    """The real driver: memory, temperature and UUID of every GPU, events, and no value that is both read and missing."""
    readings = real.read_fresh(time.time(), 60.0)
    devices = [one for one in readings if one.kind == "gpu.device"]
    head = next(one for one in readings if one.kind == "gpu.nvml")
    assert len(devices) == head.values["count"]
    assert head.values["events"]
    for one in devices:
        assert one.state == "ok"
        assert one.values["uuid"].startswith("GPU-")
        assert one.values["memory_total_bytes"] > 1 << 30
        assert 0 < one.values["temperature_celsius"] < 120
        assert one.values.get("missing_memory") is None


@pytest.mark.gpu
def test_a_real_gpu_is_well(real):
    """An idle, healthy GPU raises nothing, poll after poll."""
    rules = GpuRules(load_xids())
    for _ in range(5):
        readings = until(lambda: real.read(time.time()), 60.0)
        assert [one for one in rules.judge(readings) if one.weight >= 50] == []
        time.sleep(0.5)


@pytest.mark.gpu
def test_a_process_on_a_real_gpu_is_seen(real):
    """Memory that this process takes shows in the next picture, as used and (where the driver tells) with a process."""
    torch = pytest.importorskip("torch")
    held = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    devices = [one for one in real.read_fresh(time.time(), 60.0) if one.kind == "gpu.device"]
    assert max(one.values["memory_used_bytes"] for one in devices) >= held.numel()


@pytest.mark.gpu
def test_a_real_helper_that_is_killed_comes_back(real):
    """SIGKILL of the helper costs one restart."""
    real.read_fresh(time.time(), 60.0)
    first = real.pids[0]
    os.kill(first, 9)
    until(lambda: real.read(time.time()) and real.pids and real.pids[0] != first, 60.0)
