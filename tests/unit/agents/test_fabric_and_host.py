import os
import time
from pathlib import Path

import pytest

from agents.rules.fabric import FabricRules
from agents.rules.host import HostRules, MountRules, clock_findings, room_findings
from agents.rules.process import ProcessRules
from agents.sensors.cgroup import CgroupSensor
from agents.sensors.clock import ClockSensor
from agents.sensors.fabric import FabricSensor
from agents.sensors.mounts import MountSensor, mount_of, read_mounts
from aimaster.wire.health import Reading


class Tree:
    """A folder like /sys or /sys/fs/cgroup."""

    def __init__(self, root: Path):
        self.root = root

    def write(self, files):
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")


PORT = "class/infiniband/mlx5_0/ports/1"


@pytest.fixture
def sys(tmp_path):
    tree = Tree(tmp_path / "sys")
    tree.write({f"{PORT}/state": "4: ACTIVE", f"{PORT}/phys_state": "5: LinkUp", f"{PORT}/rate": "400 Gb/sec (4X NDR)", f"{PORT}/link_layer": "InfiniBand", f"{PORT}/counters/link_downed": 0, f"{PORT}/counters/symbol_error": 0, f"{PORT}/hw_counters/local_ack_timeout_err": 0})  # fmt: skip
    tree.write({"class/net/eth0/device/vendor": "x", "class/net/eth0/operstate": "up", "class/net/eth0/carrier_changes": 1, "class/net/lo/operstate": "unknown"})  # fmt: skip
    return tree


def test_ports_and_cards_are_read_as_the_kernel_shows_them(sys):
    """State, rate in bits a second and counters of a port; cards with a device of their own."""
    port, card = FabricSensor("n", root=sys.root).read(1.0)
    assert port.values == {"device": "mlx5_0", "port": "1", "link": "ACTIVE", "physical": "LinkUp", "layer": "InfiniBand", "rate_bits_per_second": 4e11, "link_downed": 0, "symbol_error": 0, "local_ack_timeout_err": 0}  # fmt: skip
    assert card.values == {"device": "eth0", "link": "up", "carrier_changes": 1}


def judge(rules, sys, at):
    return [(one.sign, one.category) for one in rules.judge(FabricSensor("n", root=sys.root).read(at))]


def test_a_port_that_goes_down_is_told_while_it_is_down(sys):
    """A port that was never up is nobody's; three falls within twelve hours are a finding even while it is up."""
    rules = FabricRules()
    sys.write({"class/infiniband/mlx5_9/ports/1/state": "1: DOWN"})
    assert judge(rules, sys, 0) == []
    for fall in range(3):
        sys.write({f"{PORT}/state": "1: DOWN"})
        assert ("fabric.down", "net.port_down") in judge(rules, sys, 100 * fall + 50)
        sys.write({f"{PORT}/state": "4: ACTIVE"})
        assert judge(rules, sys, 100 * fall + 100) == ([("fabric.flaps", "net.port_down")] if fall == 2 else [])


def test_counters_are_judged_by_increase_and_rate(sys):
    """One link_downed more is told; timeouts by the second; symbol errors by the hour; what a counter was at first is history."""
    rules = FabricRules()
    sys.write({f"{PORT}/counters/link_downed": 7})
    assert judge(rules, sys, 0) == []
    assert judge(rules, sys, 10) == []
    sys.write({f"{PORT}/counters/symbol_error": 50, f"{PORT}/hw_counters/local_ack_timeout_err": 30})
    assert judge(rules, sys, 20) == [("fabric.local_ack_timeout_err", "net.port_down")]
    assert judge(rules, sys, 30) == []
    sys.write({f"{PORT}/counters/link_downed": 8, f"{PORT}/counters/symbol_error": 130})
    assert judge(rules, sys, 40) == [("fabric.link_downed", "net.port_down"), ("fabric.symbols", "net.port_down")]


def mountinfo(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


ROOT_LINE = "1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw"


def test_a_silent_file_server_is_a_reading(tmp_path):
    """statvfs of a remote folder is a helper's business: it is killed at its deadline, and the next reading says so."""
    info = mountinfo(tmp_path / "mountinfo", ROOT_LINE, f"2 1 0:5 / {tmp_path}/nfs rw - nfs4 fs1:/export rw")
    sensor = MountSensor(
        "n", {"storage": tmp_path / "nfs"}, limit_seconds=0.1, mountinfo=info, stat=("sh", "-c", "sleep 600")
    )
    assert sensor.read(1.0)[0].state == "unreadable"
    deadline = time.monotonic() + 10
    while (reading := sensor.read(2.0)[0]).state != "bad":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (reading.values["server"], reading.values["folder"]) == ("fs1", "storage")
    (found,) = room_findings([reading])
    assert found.category == "node.shared_fs"
    sensor.close()


def test_a_remote_folder_that_answers_is_read_like_any_other(tmp_path):
    """The helper's numbers are those of statvfs."""
    (tmp_path / "nfs").mkdir()
    info = mountinfo(tmp_path / "mountinfo", ROOT_LINE, f"2 1 0:5 / {tmp_path}/nfs rw - nfs4 fs1:/export rw")
    sensor = MountSensor("n", {"storage": tmp_path / "nfs"}, mountinfo=info)
    deadline = time.monotonic() + 10
    while (reading := sensor.read(2.0)[0]).state != "ok":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert reading.values["total_bytes"] == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    sensor.close()


def test_other_file_servers_of_the_machine_are_asked_as_well(tmp_path):
    """A network mount that is none of the run's: its silence is a warning, since nobody knows whether the job needs it; its answer is a reading."""
    (tmp_path / "data").mkdir()
    info = mountinfo(
        tmp_path / "m",
        ROOT_LINE,
        f"2 1 0:5 / {tmp_path}/data rw - nfs4 fs2:/sets rw",
        "3 1 0:6 / /x rw - fuse.lxcfs lxcfs rw",
    )

    def servers(**how):
        sensor = MountSensor("n", {"run": tmp_path}, mountinfo=info, **how)
        deadline = time.monotonic() + 10
        try:
            while (reading := next(one for one in sensor.read(1.0) if one.kind == "host.remote")).values.get(
                "error"
            ) == "not asked yet":
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert len([one for one in sensor.read(1.0) if one.kind == "host.remote"]) == 1
        finally:
            sensor.close()
        return reading

    assert servers().values["total_bytes"] > 0
    silent = servers(limit_seconds=0.1, stat=("sh", "-c", "sleep 600"))
    assert (silent.state, silent.values["server"]) == ("bad", "fs2")
    (found,) = room_findings([silent])
    assert (found.category, found.weight < 50) == ("node.shared_fs", True)


def test_a_full_disk_beside_the_runs_own_only_warns():
    """Room and inodes of the machine's other disks."""

    def disk(kind, **values):
        values = {"total_bytes": 100 << 30, "free_bytes": 50 << 30, "inodes": 1000, "free_inodes": 500} | values
        return Reading(
            sensor="mounts", kind=kind, node="n", time_seconds=1.0, values={"device": "sda1", "folder": "run"} | values
        )

    assert room_findings([disk("host.mount"), disk("host.room")]) == []
    weights = [room_findings([disk(kind, free_bytes=1)])[0].weight for kind in ("host.room", "host.mount")]
    assert weights[0] >= 50 > weights[1]
    assert [one.sign for one in room_findings([disk("host.mount", free_inodes=0)])] == ["host.inodes"]


def test_memory_and_threads_of_the_machine_that_run_out_are_told():
    """At the pace of the last minute the rest would be gone within ten: a warning; much that is left, or a slow pace, is none."""
    rules = HostRules()

    def judge(at, left, **more):
        values = {"total_bytes": 1000, "available_bytes": left} | more
        return [one.sign for one in rules.judge([Reading(sensor="host", kind="host.memory", node="n", time_seconds=at, values=values)])]  # fmt: skip

    assert [judge(0, 900), judge(61, 700), judge(121, 480), judge(182, 479), judge(243, 478)] == [
        [],
        [],
        ["host.growth"],
        [],
        [],
    ]
    load = Reading(
        sensor="host", kind="host.load", node="n", time_seconds=1.0, values={"threads": 96, "threads_limit": 100}
    )
    assert [one.category for one in rules.judge([load])] == ["node.limits"]


def test_a_disk_that_turns_read_only_is_given_up(tmp_path):
    """Writable before and read-only now is the kernel's verdict on the disk; one that always was is meant so."""
    rules = MountRules()

    def read(*lines):
        return MountSensor("n", {}, mountinfo=mountinfo(tmp_path / "m", *lines)).read(1.0)

    fixed = "3 1 8:2 / /usr ro - ext4 /dev/sdb1 ro"
    assert rules.judge(read(ROOT_LINE, fixed)) == []
    (found,) = rules.judge(read(ROOT_LINE.replace("rw", "ro"), fixed))
    assert (found.category, found.details["device"]) == ("node.disk_fault", "sda1")


def test_the_mount_of_a_folder_is_the_innermost(tmp_path):
    """Found by names alone; a blank in a mount point is no end of it."""
    info = mountinfo(
        tmp_path / "m", ROOT_LINE, r"2 1 0:5 / /data\040one rw - nfs fs:/x rw", "3 1 0:6 / /data rw - xfs /dev/b rw"
    )
    mounts = read_mounts(info)
    kinds = {folder: mount_of(folder, mounts).kind for folder in ("/data one/x", "/data/x", "/database", "/")}
    assert kinds == {"/data one/x": "nfs", "/data/x": "xfs", "/database": "ext4", "/": "ext4"}


def proc(tmp_path, text):
    (tmp_path / "proc" / "7").mkdir(parents=True, exist_ok=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text(text)
    return tmp_path / "proc"


@pytest.mark.parametrize("version", [1, 2])
def test_kills_of_a_group_are_events(tmp_path, version):
    """Both versions: a kill after the first reading is told, with the members of the group, once; those before are history."""
    tree = Tree(tmp_path / "cgroup")
    if version == 2:
        root = proc(tmp_path, "0::/job\n")
        tree.write({"job/memory.events": "oom 1\noom_kill 1", "job/memory.current": 900, "job/memory.max": 1000, "job/pids.current": 3, "job/pids.max": "max"})  # fmt: skip
        more = {"job/memory.events": "oom 2\noom_kill 3"}
    else:
        root = proc(tmp_path, "4:memory:/job\n8:pids:/job\n0::/\n")
        tree.write({"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1", "memory/job/memory.usage_in_bytes": 900, "memory/job/memory.limit_in_bytes": 1000, "pids/job/pids.current": 3})  # fmt: skip
        more = {"memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3"}
    pids = {"rank-0": 7}
    sensor = CgroupSensor("n", lambda: pids, root=tree.root, proc=root)
    rules = ProcessRules()
    readings = sensor.read(1.0)
    memory = next(one for one in readings if one.kind == "cgroup.memory")
    assert (memory.values["oom_kills"], memory.values["used_bytes"], memory.values["limit_bytes"]) == (1, 900, 1000)
    assert next(one for one in readings if one.kind == "cgroup.pids").values["pids"] == 3
    assert rules.kills(readings) == []
    tree.write(more)
    pids.clear()  # the member is dead: its group is read once more
    (found,) = rules.kills(sensor.read(2.0))
    assert (found.category, found.details["members"], found.details["count"]) == ("node.oom_cgroup", "rank-0", "2")
    assert rules.kills(sensor.read(3.0)) == []


def usage(at, **values):
    return Reading(
        sensor="process", kind="process.usage", node="n", time_seconds=at, values={"member": "m", "state": "S"} | values
    )


def test_limits_and_stuck_processes_warn():
    """95 % of a limit, a minute in state D, five without processor time, memory that reaches its limit within ten: they raise nothing."""
    rules = ProcessRules()
    assert rules.judge([usage(0, files=100, files_limit=1024)]) == []
    assert [one.category for one in rules.judge([usage(0, files=1000, files_limit=1024)])] == ["node.limits"]
    assert rules.judge([usage(0, state="D")]) == []
    assert [one.weight for one in rules.judge([usage(61, state="D")])] == [19]

    for at in range(0, 400, 50):
        notes = rules.judge([usage(at, member="idle", cpu_seconds=5.0), usage(at, member="busy", cpu_seconds=5.0 + at)])
        assert [(one.sign, one.severity) for one in notes] == ([("process.still", "info")] if at >= 300 else [])
    assert [one.sign for one in rules.judge([usage(0, member="forks", cpu_seconds=1.0, zombies=60)])] == [
        "process.zombies"
    ]

    def memory(at, used):
        values = {"group": "g", "used_bytes": used, "limit_bytes": 1000}
        return [Reading(sensor="cgroup", kind="cgroup.memory", node="n", time_seconds=at, values=values)]

    assert rules.judge(memory(0, 600)) == []
    assert rules.judge(memory(61, 605)) == []
    assert [one.sign for one in rules.judge(memory(119, 800))] == ["cgroup.growth"]


def test_the_clock_is_known_better_with_every_answer():
    """Each whole second bounds the offset; together they narrow it; a clock that was set begins anew; a minute apart is a fault."""
    bounds = ClockSensor("n")
    date = "Tue, 24 Jun 2025 17:00:{:02d} GMT"
    base = 1750784400.0
    first = bounds.hear(date.format(10), base + 10.9, base + 10.92)
    assert first.values["uncertainty_seconds"] > 0.4
    second = bounds.hear(date.format(20), base + 20.05, base + 20.06)
    assert second.values["uncertainty_seconds"] < 0.1
    assert abs(second.values["offset_seconds"]) < 0.1
    assert clock_findings([second]) == []
    skewed = bounds.hear(date.format(30), base + 100.0, base + 100.01)
    (found,) = clock_findings([skewed])
    assert (found.category, found.severity) == ("node.clock_skew", "critical")
    assert bounds.hear("no date", 1.0, 2.0) is None
