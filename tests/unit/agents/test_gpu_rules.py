import pytest

from agents.rules.gpu import GpuRules
from aimaster.catalogue import load_xids
from aimaster.wire.health import Reading, Subject

GIB = 1 << 30


@pytest.fixture
def rules():
    return GpuRules(load_xids())


def gpu(at=0.0, state="ok", index="0", **values):
    values = {"uuid": f"GPU-{index}", "pci": f"00000000:1{index}:00.0", "status": ""} | values
    return Reading(sensor="gpu", kind="gpu.device", node="n", time_seconds=at, state=state, subject=Subject(gpu=index), values=values)  # fmt: skip


def nvml(at=0.0, state="ok", **values):
    return Reading(sensor="gpu", kind="gpu.nvml", node="n", time_seconds=at, state=state, values=values)


def categories(findings):
    return [one.category for one in findings]


def test_a_healthy_gpu_is_no_news(rules):
    """Idle clocks, a software power cap, old ECC counts and absent features say nothing."""
    for at in range(200):
        one = gpu(
            at, throttle_bits=0x1 | 0x4, ecc_uncorrected_volatile=7, nvlink_up=4, pcie_width=16, recovery_action=0
        )
        assert rules.judge([nvml(count=1), one, gpu(at, index="1", missing_power="unsupported")]) == []


@pytest.mark.parametrize(
    ("values", "category", "action"),
    [
        ({"ecc_uncorrected_volatile": 8}, "gpu.ecc", None),
        ({"remap_failure": True}, "gpu.row_remap_failure", None),
        ({"remap_pending": True}, "gpu.row_remap_pending", None),
        ({"retired_pending": True}, "gpu.row_remap_pending", None),
        ({"nvlink_up": 3}, "gpu.nvlink", None),
        ({"pcie_width": 4}, "gpu.pcie", None),
        ({"recovery_action": 2}, "gpu.firmware", "replace_node"),
        ({"status": "lost"}, "gpu.lost", None),
        ({"status": "reset_required"}, "gpu.firmware", None),
    ],
)
def test_each_fault_is_told_of_its_gpu(rules, values, category, action):
    """What changed against the first reading, and what the driver says outright; the subject is the PCI address."""
    well = {"ecc_uncorrected_volatile": 7, "nvlink_up": 4, "pcie_width": 16, "recovery_action": 0}
    assert rules.judge([gpu(**well)]) == []
    (found,) = rules.judge([gpu(1.0, **(well | values))])
    assert (found.category, found.subject.gpu, found.action, found.role) == (category, "0000:10:00", action, "self")
    (again,) = rules.judge([gpu(2.0, **(well | values))])
    assert again.id == found.id


def test_packets_sent_again_are_judged_by_the_minute(rules):
    """More than eight PCIe replays a minute warn, fewer and old ones do not; every NVLink that had to be trained anew is told."""
    at = {0: 500, 60: 507, 120: 514, 180: 530}
    signs = [
        [one.sign for one in rules.judge([gpu(seconds, pcie_replays=count, nvlink_recovery_errors=9)])]
        for seconds, count in at.items()
    ]
    assert signs == [[], [], [], ["nvml.pcie_replays"]]
    (found,) = rules.judge([gpu(400.0, pcie_replays=530, nvlink_recovery_errors=10)])
    assert (found.category, found.severity) == ("gpu.nvlink", "warning")


def test_a_slowdown_must_last(rules):
    """A minute of hardware slowdown is told, as a warning; a pause begins the minute anew."""
    assert rules.judge([gpu(0, throttle_bits=0x40)]) == []
    assert rules.judge([gpu(50, throttle_bits=0)]) == []
    assert rules.judge([gpu(60, throttle_bits=0x40)]) == []
    (found,) = rules.judge([gpu(125, throttle_bits=0x40)])
    assert (found.category, found.severity) == ("gpu.slowdown", "warning")


def test_a_missing_gpu_is_told_at_the_third_poll(rules):
    """Two polls may be a reset under way; a machine that never had it is well."""
    assert rules.judge([nvml(count=7)]) == []
    assert rules.judge([nvml(count=8)]) == []
    assert [categories(rules.judge([nvml(at, count=7)])) for at in range(4)] == [[], [], ["gpu.lost"], ["gpu.lost"]]
    assert rules.judge([nvml(count=8)]) == []


def test_one_hang_warns_and_three_blame(rules):
    """A hang of NVML is a warning that raises nothing; the third in a row is a sick driver."""

    def hang(often):
        values = {"call": "nvmlDeviceGetMemoryInfo(3)", "seconds": 10.0, "in_a_row": often}
        return rules.judge(
            [Reading(sensor="gpu", kind="gpu.hang", node="n", time_seconds=1, state="bad", values=values)]
        )[0]

    assert (hang(1).category, hang(1).severity, hang(1).weight < 50) == ("gpu.firmware", "warning", True)
    assert (hang(3).severity, hang(3).weight >= 60, hang(3).id != hang(2).id) == ("critical", True, True)


def test_an_error_counts_only_where_it_worked_before(rules):
    """Unknown Error at the start may be this machine's normal state; after good readings the device was taken away."""
    assert rules.judge([nvml(state="unreadable", code=999, error="Unknown Error")]) == []
    assert categories(rules.judge([nvml(state="bad", code=18, error="mismatch")])) == ["gpu.driver_mismatch"]
    rules.judge([nvml(count=1)])
    assert categories(rules.judge([nvml(state="unreadable", code=999)])) == ["gpu.access_lost"]


@pytest.mark.parametrize(
    ("code", "category", "role", "weight"),
    [(79, "gpu.lost", "self", 88), (43, None, "follower", 10), (31, "app.illegal_access", "self", 62), (48, "gpu.ecc", "self", 88)],
)  # fmt: skip
def test_an_xid_means_what_the_table_says(rules, code, category, role, weight):
    """Followers never lead; what is usually the program's doing weighs less than what is the hardware's."""
    event = Reading(sensor="gpu", kind="gpu.xid", node="n", time_seconds=5.0, subject=Subject(gpu="3"),
                    values={"xid": code, "pci": "00000000:1B:00.0"})  # fmt: skip
    found = rules.xid(event)
    assert category in (None, found.category)
    assert (found.role, found.weight, found.subject.gpu, found.details["xid"]) == (
        role,
        weight,
        "0000:1b:00",
        str(code),
    )


def test_memory_held_by_nobody_of_the_job(rules):
    """Twice over a GiB used by a stranger or by nobody is a warning; a pid that does not exist here may be ours by its host's name."""
    stranger = [gpu(memory_used_bytes=9 * GIB, pids="77")]
    assert rules.held(stranger, frozenset({5}), frozenset({77})) == []
    (found,) = rules.held(stranger, frozenset({5}), frozenset({77}))
    assert (found.category, found.subject.pid, found.weight < 50) == ("gpu.memory_held", 77, True)
    for job, alive, used, pids in [({77}, {77}, 9, "77"), ({5}, set(), 9, "77"), ({5}, {77}, 0.5, "77")]:
        reading = [gpu(memory_used_bytes=used * GIB, pids=pids)]
        assert [rules.held(reading, frozenset(job), frozenset(alive)) for _ in range(2)] == [[], []]
    nobody = [gpu(memory_used_bytes=9 * GIB, pids="")]
    assert [len(rules.held(nobody, frozenset({5}), frozenset())) for _ in range(2)] == [0, 1]
