import os
import time

import pytest

from agents.rules.gpu import TEXT_DECIDES
from agents.rules.kernel import Collapse, KernelRules
from agents.sensors.kernel import KernelSensor, read_record
from aimaster import catalogue
from aimaster.wire.health import Finding, Subject

LOST = (
    "NVRM: The NVIDIA GPU 0000:b3:00.0",
    "NVRM: (PCI ID: 10de:26b5) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


@pytest.fixture(scope="module")
def signs():
    return catalogue.load()


@pytest.fixture
def rules(signs):
    return KernelRules(signs, "node-0")


CASES = [
    ("NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", "gpu.lost", "self"),
    ("NVRM: Xid (0000:03:00): 43, Ch 00000010, engmask 00000101", None, "follower"),
    ("NVRM: Xid (PCI:0000:9c:00): 95, pid=71, Uncontained: LTC TAG (0x2, 0x1). RST: Yes, D-RST: No", "gpu.ecc", "self"),
    ("NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.", "gpu.lost", "self"),
    ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", "gpu.fabric", "self"),
    ("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=x,mems_allowed=0,oom_memcg=/a,task_memcg=/a/b,task=python,pid=314,uid=0", "node.oom_cgroup", "self"),
    ("Out of memory: Killed process 4411 (python) total-vm:1kB, anon-rss:1kB", "node.oom_host", "self"),
    ("mce: [Hardware Error]: CPU 44: Machine Check Exception: 5 Bank 12: be2000000005110a", "node.kernel_fault", "self"),
    ("pcieport 0000:80:01.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)", "gpu.pcie", "self"),
    ("watchdog: BUG: soft lockup - CPU#18 stuck for 27s! [python:4411]", "node.kernel_fault", "self"),
    ("INFO: task python:8112 blocked for more than 120 seconds.", "hang.unknown", "follower"),
    ("Buffer I/O error on dev dm-0, logical block 1308098, lost sync page write", "node.disk_fault", "self"),
    ("EXT4-fs (md0): Remounting filesystem read-only", "node.disk_fault", "self"),
    ("mlx5_core 0000:5c:00.0: Port: 1 Link DOWN", "net.port_down", "self"),
    ("mlx5_core 0000:5c:00.0: mlx5_pcie_event:302:(pid 9): Detected insufficient power on the PCIe slot (27W).", None, None),
    ("mlx5_core 0000:5c:00.0: poll_health:800:(pid 0): device's health compromised - reached miss count", "net.nic_fault", "self"),
    ("blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x0:(READ)", "node.disk_fault", "self"),
    ("Memory cgroup out of memory: Killed process 4411 (python) total-vm:1kB, anon-rss:1kB, file-rss:0kB", "node.oom_cgroup", "self"),
    ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7, name=python, Contained: CE User Channel (0x9). RST: No, D-RST: No", "gpu.ecc_contained", "self"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "category", "role"), CASES)
def test_each_kernel_shape_is_known(rules, text, category, role):
    """As a record of /dev/kmsg it means what the same line of a log file means."""
    record = read_record(f"3,871,{int(time.monotonic() * 1e6)},-;{text}".encode(), "node-0")
    found = rules.judge(record.decode() + "\n", time.time())
    if role is None:  # known to be of no weight by itself
        assert all(one.weight < 50 for one in found)
        return
    assert category is None or category in [one.category for one in found]
    assert found[0].role == role
    assert abs(found[0].time_seconds - time.time()) < 5
    assert found[0].evidence[0].file == "kernel"


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_the_three_line_loss_is_known_in_any_two_pieces(rules, cut):
    """The lost GPU that no code announces, whole or read in two pieces; it is told once."""
    lines = [read_record(f"3,1,{int(time.monotonic() * 1e6)},-;{line}".encode(), "n").decode() + "\n" for line in LOST]
    found = (
        rules.judge("".join(lines[:cut]), 1.0)
        + rules.judge("".join(lines[cut:]), 2.0)
        + rules.judge("usb 1-1: x\n", 3.0)
    )
    lost = [one for one in found if one.category == "gpu.lost"]
    assert [(one.subject.gpu, one.role) for one in lost] == [("0000:b3:00", "self")]


def test_everyday_lines_say_nothing(rules):
    """Corrected errors, mounts and programs' own words are no news."""
    lines = (
        "AER: Corrected error received: 0000:81:00.0",
        "EXT4-fs (sda1): mounted filesystem",
        "I/O error, dev loop3, sector 0",
    )
    for line in lines:
        assert rules.judge(f"kernel: {line}\n", 1.0) == []


@pytest.mark.parametrize(
    ("raw", "kept"),
    [(b"6,1,2,-;hello", True), (b"30,1,2,-;hello", True), (b"14,1,2,-;hello", False), (b" DEVICE=b12:8", False), (b"", False), (b"plain line", True)],
)  # fmt: skip
def test_only_kernel_and_daemons_are_heard_on_the_device(raw, kept):
    """Anybody who may write to /dev/kmsg is not the kernel; its key=value lines are no lines."""
    assert (read_record(raw, "n") is not None) == kept


def lines_of(sensor):
    return "".join(one.text for one in sensor.read(time.time()))


def test_a_file_is_followed_from_its_end(tmp_path):
    """What stood there before is history; rotation and half lines lose nothing."""
    path = tmp_path / "kern.log"
    path.write_text("kernel: old\n")
    sensor = KernelSensor("n", source=str(path))
    assert sensor.supported() == ""
    assert lines_of(sensor) == ""
    with path.open("a") as file:
        file.write("kernel: one\nkernel: tw")
    assert lines_of(sensor) == "kernel: one\n"
    with path.open("a") as file:
        file.write("o\n")
    assert lines_of(sensor) == "kernel: two\n"
    path.rename(tmp_path / "kern.log.1")
    path.write_text("kernel: three\n")
    assert "kernel: three\n" in lines_of(sensor)
    source = sensor.read(time.time())[0]
    assert (source.values["source"], source.values["lines"]) == ("file", 3)


JOURNAL = """#!/bin/sh
case "$*" in
  *--follow*) echo "2026-11-29T20:00:00+0000 kernel: one"; echo "2026-11-29T20:00:01+0000 kernel: two"; sleep 600 ;;
  *) echo "2026-11-29T19:00:00+0000 kernel: boot" ;;
esac
"""


def test_the_journal_is_followed_where_the_device_is_hidden(tmp_path, monkeypatch):
    """journalctl's new kernel lines; its end is a source that is gone, not an error."""
    program = tmp_path / "journalctl"
    program.write_text(JOURNAL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sensor = KernelSensor("n", source="journal")
    assert sensor.supported() == ""
    seen, deadline = "", time.monotonic() + 10
    while "two\n" not in seen:
        assert time.monotonic() < deadline
        seen += lines_of(sensor)
    assert seen.startswith("2026-11-29T20:00:00+0000 kernel: one\n")
    assert sensor.read(time.time())[0].values["source"] == "journal"
    sensor.close()
    assert sensor.read(time.time())[0].values["source"] == "none"


def test_where_nothing_can_be_read_it_says_why(tmp_path):
    """A missing file and a sensor switched off are answers."""
    assert "No such file" in KernelSensor("n", source=str(tmp_path / "none")).supported()
    assert KernelSensor("n", source="none").supported() == "switched off"


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK | os.W_OK), reason="/dev/kmsg is not ours to read and write")
def test_the_real_device_wakes_its_reader():
    """A daemon's record comes through /dev/kmsg with the node's time; an ordinary program's does not."""
    sensor = KernelSensor("n")
    assert sensor.supported() == ""
    mark = f"aimaster-test-{time.monotonic_ns()}"
    with open("/dev/kmsg", "w") as device:
        device.write(f"<14>{mark} of a program\n")
        device.flush()
        device.write(f"<29>{mark} of a daemon\n")
    seen, deadline = "", time.monotonic() + 10
    while f"{mark} of a daemon" not in seen:
        assert time.monotonic() < deadline
        seen += lines_of(sensor)
    assert f"{mark} of a program" not in seen
    sensor.close()


def finding(sign, xid="", gpu="0000:05:00", pid=None):
    return Finding(
        sign=sign, category="c", role="self", subject=Subject(gpu=gpu, pid=pid), details={"xid": xid} if xid else {}
    )


def test_a_flood_is_one_event_and_its_return_is_another():
    """800,000 lines of one Xid within a minute of each other are told once; after a quiet minute it is news."""
    collapse = Collapse(TEXT_DECIDES)
    told = [len(collapse.fresh([finding("nvidia.xid", "95")], at / 100)) for at in range(20_000)]
    assert (sum(told), collapse.collapsed) == (1, 19_999)
    assert len(collapse.fresh([finding("nvidia.xid", "95")], 270.0)) == 1


def test_two_sensors_tell_one_event():
    """NVML's Xid and the kernel's line of it are one, unless the words of the line decide what it means; GPUs are apart."""
    collapse = Collapse(TEXT_DECIDES)

    def fresh(*findings):
        return [one.sign for one in collapse.fresh(findings, 1.0)]

    assert fresh(finding("nvml.xid", "79"), finding("nvidia.xid", "79", pid=7)) == ["nvml.xid"]
    assert fresh(finding("nvml.xid", "94"), finding("nvidia.xid", "94")) == ["nvml.xid", "nvidia.xid"]
    assert fresh(finding("nvidia.xid", "79", gpu="0000:06:00")) == ["nvidia.xid"]
