import time

import pytest

from agents import discovery, follow, paths
from agents.discovery import Discovery, split
from agents.follow import Follower, FollowThread
from agents.paths import NamedLogs
from aimaster import catalogue
from aimaster.catalogue.kept import join, keep

LOST = "kernel: NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.\n"
DEAD = "kernel: EXT4-fs (md0): Remounting filesystem read-only\n"


@pytest.fixture(scope="module")
def signs():
    return catalogue.load()


@pytest.fixture
def watch(tmp_path, signs, monkeypatch):
    monkeypatch.setattr(discovery, "SAFETY_SECONDS", 0.0)
    told = []
    patterns = [str(tmp_path / "**" / "*.log")]
    watch = NamedLogs("node-0", patterns, signs, lambda event, _at: told.append(event.finding))
    watch.told, watch.follower = told, Follower(patterns, Discovery(patterns))
    watch.tick = lambda: watch.take(watch.follower.look())
    yield watch
    watch.follower.close()


def test_what_was_there_is_history_and_what_comes_is_news(watch, tmp_path):
    """Lines from before the agent raise nothing; a line now does, once; a new file is read from its beginning."""
    old = tmp_path / "old.log"
    old.write_text(LOST)
    watch.tick()
    assert watch.told == []
    with old.open("a") as file:
        file.write(DEAD)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "new.log").write_text("begin\n" + LOST + LOST)
    watch.tick()
    watch.tick()
    assert sorted(
        (one.category, one.evidence[0].file.rpartition("/")[2], one.evidence[0].offset) for one in watch.told
    ) == [
        ("gpu.lost", "new.log", len("begin\n")),
        ("node.disk_fault", "old.log", len(LOST)),
    ]


def test_rotation_loses_nothing_and_tells_nothing_twice(watch, tmp_path):
    """A file renamed within the pattern is no new file; the one under the old name is read from its beginning."""
    log = tmp_path / "a.log"
    log.write_text("")
    watch.tick()
    log.write_text(LOST)
    watch.tick()
    log.rename(tmp_path / "a.1.log")
    log.write_text(DEAD)
    watch.tick()
    watch.tick()
    assert [one.category for one in watch.told] == ["gpu.lost", "node.disk_fault"]


def test_a_decisive_line_is_found_in_any_flood(watch, tmp_path):
    """Within 20 MB of noise in one burst, a line of 10 MB, broken UTF-8 and progress bars: what is decisive is told."""
    log = tmp_path / "flood.log"
    log.write_text("")
    watch.tick()
    with log.open("ab") as file:
        file.write(b"2026-11-29 step ok, loss 1.0, all is well\n" * 250_000)
        file.write(b"x" * (10 << 20) + b"\n")
        file.write(b"\xff\xfe\x80 broken\n" + b"\r 10% |###| 1/10 [00:01<00:09]" * 1000 + b"\n")
        file.write(LOST.encode())
        file.write(b"2026-11-29 step ok, loss 1.0, all is well\n" * 100_000)
    deadline = time.monotonic() + 30
    while not watch.told:
        watch.tick()
        assert time.monotonic() < deadline
    assert [one.category for one in watch.told] == ["gpu.lost"]


def test_a_last_line_without_an_end_is_read_when_all_is_quiet(watch, tmp_path):
    """A program that died in the middle of its last line: what stands there is told, once."""
    log = tmp_path / "a.log"
    watch.tick()
    log.write_text("step 1\n" + LOST.rstrip())
    watch.tick()
    assert watch.told == []
    watch.settle()
    watch.settle()
    assert [(one.category, one.evidence[0].offset) for one in watch.told] == [("gpu.lost", len("step 1\n"))]


def test_a_scan_begins_anew_between_two_lines(watch, tmp_path, monkeypatch):
    """However the pieces are cut, no decisive line falls into the seam between two scans, and what the first kept is kept."""
    monkeypatch.setattr(paths, "SCAN_BYTES", 50)
    log = tmp_path / "a.log"
    watch.tick()
    text = (
        "".join(f"step {n} loss 1.0\n" for n in range(10))
        + LOST
        + "".join(f"step {n} loss 1.0\n" for n in range(10, 20))
        + DEAD
    )
    for cut in range(0, len(text), 7):
        with log.open("a") as file:
            file.write(text[cut : cut + 7])
        watch.tick()
    (named,) = watch.followed()
    assert named.began > 50
    assert [(one.category, one.evidence[0].offset) for one in watch.told] == [
        ("gpu.lost", text.index(LOST)),
        ("node.disk_fault", text.index(DEAD)),
    ]
    assert [hit.sign.category for hit in join(named.past, keep(named.scan)).hits] == ["gpu.lost", "node.disk_fault"]


def test_files_are_bounded(watch, tmp_path, monkeypatch):
    """Beyond the most files the others are counted, not followed; one that is gone makes room."""
    monkeypatch.setattr(follow, "MOST_FILES", 2)
    for name in "abc":
        (tmp_path / f"{name}.log").write_text("")
    watch.tick()
    assert (len(watch.follower), watch.follower.left_out) == (2, 1)
    for name in "ab":
        (tmp_path / f"{name}.log").unlink(missing_ok=True)
    watch.tick()
    watch.tick()
    assert (len(watch.follower), watch.follower.left_out) == (1, 0)


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "the deadline passed"
        time.sleep(0.01)
    return value


def test_a_removed_files_number_is_no_name(watch, tmp_path):
    """A file system gives the inode of a removed file to the next one: that one is read from its beginning all the same."""
    log = tmp_path / "a.log"
    log.write_text(LOST)
    watch.tick()
    log.unlink()
    watch.tick()
    (tmp_path / "b.log").write_text(DEAD)
    watch.tick()
    assert [one.category for one in watch.told] == ["node.disk_fault"]


@pytest.mark.parametrize(
    ("pattern", "base"),
    [
        ("/var/log/*.log", ("/var/log", False)),
        ("/tmp/ray/**/*.out", ("/tmp/ray", True)),
        ("/tmp/ray/session_*/logs/*", ("/tmp/ray", True)),
        ("/var/log/messages", ("/var/log", False)),
        ("*.log", (".", False)),
        ("/*/x", ("/", True)),
    ],
)
def test_the_folder_to_watch_is_the_longest_plain_one(pattern, base):
    """Up to the first part that holds a wildcard; deeper where others follow it."""
    assert split(pattern) == base


def test_a_new_file_rings_and_a_write_does_not(tmp_path):
    """Between two looks nobody looks: a file that is made, moved in or removed below the folder is told by the kernel, writes are not."""
    watching = Discovery([str(tmp_path / "**" / "*.log")])
    try:
        assert watching.due(0.0)
        assert watching.watched == {str(tmp_path): "notices"}
        assert not watching.due(0.5)
        (tmp_path / "deep").mkdir()
        until(lambda: watching.due(1.0))
        log = tmp_path / "deep" / "a.log"
        log.write_text("")
        until(lambda: watching.due(2.0))
        with log.open("a") as file:
            file.write("more\n")
        log.unlink()
        until(lambda: watching.due(3.0))
        assert not watching.due(4.0)
        assert watching.due(4.0 + discovery.SAFETY_SECONDS)
    finally:
        watching.close()


def test_a_network_folder_is_compared_and_a_missing_one_looked_for(tmp_path, monkeypatch):
    """On NFS and FUSE the kernel tells nobody: a thread compares listings. A folder that is not there is looked for each second."""
    monkeypatch.setattr(discovery, "COMPARE_SECONDS", 0.05)
    info = tmp_path / "mountinfo"
    info.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda1 rw\n2 1 0:5 / {tmp_path}/share rw - fuse.sshfs host:/x rw\n")
    watching = Discovery([str(tmp_path / "share" / "*.log")], mountinfo=str(info))
    try:
        assert [watching.due(at) for at in (0.0, 0.5, 1.1)] == [True, False, True]
        (tmp_path / "share").mkdir()
        assert watching.due(2.2)
        assert watching.watched == {str(tmp_path / "share"): "compared"}
        (tmp_path / "share" / "a.log").write_text("")
        until(lambda: watching.due(2.3))
        (tmp_path / "share" / "a.log").unlink()
        (tmp_path / "share").rmdir()
        until(lambda: watching.due(3.4))
        assert watching.watched == {}
    finally:
        watching.close()


def test_reading_goes_on_in_a_thread_and_waits_for_its_judge(tmp_path):
    """One look's gains at a time are handed on: memory is bounded by a look; the end of the thread is asked for and comes."""
    log = tmp_path / "a.log"
    handed = []
    patterns = [str(tmp_path / "*.log")]
    thread = FollowThread(Follower(patterns, Discovery(patterns)), handed.append, 0.01)
    thread.start()
    until(lambda: thread._follower.begun)
    log.write_text("one\n")
    until(lambda: handed)
    with log.open("a") as file:
        file.write("two\n")
    assert [one.pieces for one in handed[0]] == [(b"one\n",)]
    assert len(handed) == 1
    thread.taken()
    until(lambda: len(handed) == 2)
    assert [one.pieces for one in handed[1]] == [(b"two\n",)]
    thread.close()
    assert not thread._thread.is_alive()
