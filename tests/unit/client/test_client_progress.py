import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from aimaster.client import Progress, read_progress
from aimaster.client.fence import fence_seconds
from aimaster.client.leases import ENOUGH, REMEMBERED, Leases


def _until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the deadline passed"
        time.sleep(0.005)
    return value


def _environment(tmp_path: Path, **more: str) -> dict[str, str]:
    return os.environ | {
        "AIMASTER_NODE_MEMORY": str(tmp_path / "memory"),
        "AIMASTER_NODE_DIR": str(tmp_path / "node"),
        "AIMASTER_MEMBER": "policy-0",
        **more,
    }


def test_what_was_beaten_is_what_is_read(tmp_path):
    """A reader sees the phase, step and lineage of the last beat, on the machine's clock, and who made it."""
    progress = Progress(tmp_path / "policy-0")
    assert read_progress(tmp_path / "policy-0").beats == 0
    progress.beat("compute", step=7, lineage=2)
    progress.beat("reduce")
    reading = read_progress(tmp_path / "policy-0")
    assert (reading.phase, reading.step, reading.lineage, reading.beats) == ("reduce", 7, 2, 2)
    assert reading.pid == os.getpid()
    assert reading.thread == threading.get_ident()
    assert 0 <= time.monotonic() - reading.monotonic < 10
    assert reading.lease_hint_seconds is None


def test_nothing_to_read_is_none(tmp_path):
    """A missing, short or foreign file is no reading, and no error."""
    assert read_progress(tmp_path / "none") is None
    (tmp_path / "short").write_bytes(b"AIMPROGR")
    assert read_progress(tmp_path / "short") is None
    (tmp_path / "foreign").write_bytes(os.urandom(256))
    assert read_progress(tmp_path / "foreign") is None


def test_a_writer_killed_inside_a_beat_leaves_no_torn_reading(tmp_path):
    """An odd sequence, the mark of a beat that never ended, is not read."""
    Progress(tmp_path / "m").beat("compute", step=1)
    with (tmp_path / "m").open("r+b") as file:
        file.seek(16)
        file.write(struct.pack("<Q", 3))
    assert read_progress(tmp_path / "m") is None


def test_readers_never_see_a_torn_beat(tmp_path):
    """While the writer beats as fast as it can, step and phase of every reading belong together."""
    path = tmp_path / "m"
    script = (
        "import sys; from aimaster.client import Progress\n"
        "p = Progress(sys.argv[1])\n"
        "i = 0\n"
        "while True:\n"
        "    i += 1; p.beat('p%d' % (i % 1000), step=i, lineage=i * 3)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", script, str(path)])
    try:
        _until(lambda: (r := read_progress(path)) is not None and r.beats > 0)
        seen = 0
        for _ in range(20_000):
            reading = read_progress(path)
            if reading is None or reading.beats == 0:
                continue
            seen += 1
            assert reading.phase == f"p{reading.step % 1000}"
            assert reading.lineage == reading.step * 3
            assert reading.beats == reading.step
        assert seen > 1000
    finally:
        writer.kill()
        writer.wait()


def test_a_new_start_makes_a_new_file(tmp_path):
    """A zombie of an earlier start beats into its own, unlinked file: the reader sees the newcomer alone."""
    zombie = Progress(tmp_path / "m")
    newcomer = Progress(tmp_path / "m")
    newcomer.beat("restore", step=4)
    zombie.beat("compute", step=99)
    assert read_progress(tmp_path / "m").step == 4


def test_a_lease_is_learnt_from_the_second_longest_silence():
    """Unlearnt before eight silences; then ten times the second longest of the last 64, never below the floor; the first is not counted."""
    leases = Leases(floor_seconds=5.0)
    leases.observe("compute", 100.0)
    for number in range(ENOUGH):
        assert leases.lease_seconds("compute") is None
        leases.observe("compute", 0.1 * (number + 1))
    assert leases.lease_seconds("compute") == pytest.approx(7.0)
    assert leases.lease_seconds("reduce") is None
    for _ in range(REMEMBERED):
        leases.observe("compute", 0.01)
    assert leases.lease_seconds("compute") == 5.0


def test_the_member_tells_the_reader_what_it_has_learnt(tmp_path):
    """The lease of the phase that a beat enters travels in the file; it was learnt from what followed that phase before."""
    progress = Progress(tmp_path / "m", leases=Leases(floor_seconds=2.0))
    for _ in range(ENOUGH + 2):
        progress.beat("compute")
        progress.beat("wait")
    assert read_progress(tmp_path / "m").lease_hint_seconds == 2.0
    progress.beat("save")
    assert read_progress(tmp_path / "m").lease_hint_seconds is None


@pytest.mark.parametrize(
    ("lease", "expected"),
    [(None, 600.0), (1.0, 30.0), (5.0, 50.0), (60.0, 600.0)],
)
def test_the_fence_is_the_last_resort(lease, expected):
    """Ten leases, at least three group timeouts, the start-up limit while unlearnt."""
    assert fence_seconds(lease, startup_hang_seconds=600.0, group_timeout_seconds=10.0) == expected


def test_outside_a_run_reporting_is_free_of_effect(tmp_path):
    """`report_progress(step)` in a script that nobody started for a run does nothing and needs nothing but the standard library."""
    script = (
        "import os, sys; from aimaster.client import report_progress, start_member\n"
        "report_progress(1); start_member().beat('compute', step=2)\n"
        "heavy = {'msgspec', 'aiohttp', 'structlog', 'torch', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith("AIMASTER_")}
    subprocess.run([sys.executable, "-c", script], check=True, env=clean, timeout=30)


def test_a_user_script_reports_with_one_line(tmp_path):
    """Within a run the same line is seen by the agent."""
    script = "from aimaster.client import report_progress\nreport_progress(41)\nreport_progress(42)\n"
    subprocess.run([sys.executable, "-c", script], check=True, env=_environment(tmp_path), timeout=30)
    reading = read_progress(tmp_path / "memory" / "progress" / "policy-0")
    assert (reading.step, reading.phase, reading.beats) == (42, "compute", 2)


HANGING = """
import ctypes, sys
from aimaster.client import start_member
progress = start_member(group_timeout_seconds=0.05)
def stand_still():
    ctypes.PyDLL(None).sleep(60)
progress.beat("compute", step=3)
stand_still()
"""


def test_the_fence_ends_a_member_that_hangs_with_the_gil_held(tmp_path):
    """A training thread in C with the GIL held: exit code 1, and `Timeout (` with the guilty frame in stacks.txt."""
    environment = _environment(tmp_path, AIMASTER_STARTUP_HANG_SECONDS="0.3")
    ended = subprocess.run([sys.executable, "-c", HANGING], env=environment, timeout=30, check=False)
    assert ended.returncode == 1
    stacks = (tmp_path / "node" / "members" / "policy-0" / "stacks.txt").read_text()
    assert stacks.startswith("Timeout (")
    assert "stand_still" in stacks


def test_a_member_that_beats_is_never_fenced(tmp_path):
    """Beats move the fence: a member that works for three fence lengths ends well."""
    script = (
        "import time; from aimaster.client import start_member\n"
        "p = start_member(group_timeout_seconds=0.01)\n"
        "end = time.monotonic() + 1.8\n"
        "while time.monotonic() < end:\n"
        "    p.beat('compute'); time.sleep(0.02)\n"
        "p.close()\n"
    )
    environment = _environment(tmp_path, AIMASTER_STARTUP_HANG_SECONDS="0.6", AIMASTER_LEASE_FLOOR_SECONDS="0.2")
    subprocess.run([sys.executable, "-c", script], env=environment, timeout=60, check=True)


def test_a_signal_dumps_stacks_with_the_gil_held(tmp_path):
    """SIGUSR2 writes the stacks of all threads though the GIL is held in C, and the member goes on."""
    member = subprocess.Popen([sys.executable, "-c", HANGING], env=_environment(tmp_path))
    stacks = tmp_path / "node" / "members" / "policy-0" / "stacks.txt"
    try:
        reading = _until(
            lambda: (r := read_progress(tmp_path / "memory" / "progress" / "policy-0")) and r.phase == "compute" and r
        )
        os.kill(member.pid, 12)
        text = _until(lambda: stacks.exists() and "stand_still" in stacks.read_text() and stacks.read_text())
        assert f"0x{reading.thread:016x}" in text
        assert member.poll() is None
    finally:
        member.kill()
        member.wait()
