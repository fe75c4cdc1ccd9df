import os
import signal
import subprocess
import sys
import time

import pytest

from agents import shim
from agents.config import Sight
from agents.sensors.all import Sensors
from agents.sensors.host import HostSensor
from agents.sensors.mounts import MountSensor
from agents.sensors.process import ProcessSensor, handles_signal, identify, read_process
from agents.sensors.reader import SensorReader


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the deadline passed"
        time.sleep(0.005)
    return value


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_a_process_is_known_beyond_doubt(sleeper):
    """By boot, pid and start time: another start time is not this process, and a dead one is nobody."""
    who = identify(sleeper.pid)
    assert who.pid == sleeper.pid
    descriptor = shim.open_process(who.pid, who.start_ticks)
    assert descriptor is not None
    os.close(descriptor)
    assert shim.open_process(who.pid, who.start_ticks + 1) is None
    sleeper.kill()
    until(lambda: identify(sleeper.pid) is None)  # a zombie is dead
    assert shim.open_process(who.pid, who.start_ticks) is None


def test_states_are_read(sleeper):
    """Stopped processes show T; a dead one shows nothing."""
    until(lambda: read_process(sleeper.pid).resident_bytes > 1 << 20)
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: read_process(sleeper.pid).state == "T")
    sleeper.kill()
    sleeper.wait()
    assert read_process(sleeper.pid) is None


def test_a_signal_is_only_safe_where_it_is_caught(sleeper):
    """Python catches SIGINT by itself and SIGUSR2 only when told to."""
    until(lambda: handles_signal(sleeper.pid, signal.SIGINT))
    assert not handles_signal(sleeper.pid, signal.SIGUSR2)
    assert not handles_signal(1 << 22, signal.SIGUSR2)


def test_names_with_brackets_do_not_confuse(tmp_path):
    """A program may call itself `) R 1`; the fields behind its name are read all the same."""
    program = tmp_path / ") R 1"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "600"])
    try:
        until(lambda: (fields := shim.stat_fields(process.pid)) and fields[0] == "S" and int(fields[1]) == os.getpid())
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("text", "key", "number"),
    [
        ('{"pid":12,"start_ticks":345}', "start_ticks", 345),
        ('{"pid": 12, "x": 1}', "pid", 12),
        ('{"pid":12', "pid", 12),
        ('{"pid":"a"}', "pid", None),
        ("", "pid", None),
    ],
)
def test_the_shim_reads_numbers_without_a_parser(text, key, number):
    """Only flat integers of a file the agent wrote; anything else is nobody."""
    assert shim.number_of(text, key) == number


def test_the_shim_costs_little():
    """It imports none of the modules that would double its memory, for there is one for each member."""
    names = {"json", "re", "enum", "signal", "subprocess", "ctypes", "typing", "asyncio"}
    code = (
        f"import sys; exec(open(sys.argv[1]).read(), {{'__name__': 'shim'}}); print(sorted({names} & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, shim.__file__], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_the_agent_imports_nothing_heavy():
    """No torch, no numpy, no transformers in the sidecar, whatever is installed."""
    code = "import sys, agents.node, agents.once; print(sorted({'torch', 'numpy', 'transformers', 'safetensors', 'watchdog'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_sensors_answer_where_they_cannot_read(tmp_path):
    """A folder that is not there is unreadable, which is an answer; all others are read."""
    mounts = MountSensor("node-0", {"run": tmp_path, "gone": tmp_path / "gone"})
    reader = SensorReader(
        [HostSensor("node-0"), mounts, ProcessSensor("node-0", lambda: {"me": os.getpid(), "nobody": 1 << 22})]
    )
    readings = {(one.kind, one.values.get("folder") or one.values.get("member")): one for one in reader.read_once()}
    assert readings["host.room", "run"].values["free_bytes"] > 0
    assert readings["host.room", "gone"].state == "unreadable"
    assert readings["host.memory", None].values["total_bytes"] > 1 << 28
    assert readings["process.usage", "me"].values["state"] == "R"
    assert ("process.usage", "nobody") not in readings


class Stuck:
    """A sensor on a file system that does not answer."""

    name = "stuck"
    interval_seconds = 0.01

    def supported(self):
        return ""

    def read(self, now):  # noqa: ARG002 - the shape of all sensors
        time.sleep(600)
        return []


def test_a_read_that_hangs_stops_nobody_else(tmp_path):
    """The sensors' thread may hang; whoever asks gets the readings there are, at once."""
    reader = SensorReader([HostSensor("node-0", 0.01), Stuck()])
    reader.start()
    until(reader.newest)
    reader.close()


def test_all_sensors_have_one_shape(tmp_path):
    """Name, interval, supported and read: the daemon, `--once` and the tests drive the same code; no name is there twice."""
    sensors = Sensors("node-0", {"run": tmp_path}, dict, sight=Sight(kernel_log="none"), interval_seconds=5.0)
    try:
        names = [sensor.name for sensor in sensors.row]
        assert sorted(names) == ["cgroup", "clock", "fabric", "gpu", "host", "kernel", "mounts", "process"]
        for sensor in sensors.row:
            assert sensor.interval_seconds > 0
            reason = sensor.supported()
            assert isinstance(reason, str)
            for reading in [] if reason else sensor.read(time.time()):
                assert (reading.sensor, reading.node) == (sensor.name, "node-0")
    finally:
        sensors.close()
