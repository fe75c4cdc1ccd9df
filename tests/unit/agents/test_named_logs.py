import time

import pytest

from agents import paths
from agents.paths import NamedLogs
from aimaster import catalogue

LOST = "kernel: NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.\n"
DEAD = "kernel: EXT4-fs (md0): Remounting filesystem read-only\n"


@pytest.fixture(scope="module")
def signs():
    return catalogue.load()


@pytest.fixture
def watch(tmp_path, signs, monkeypatch):
    monkeypatch.setattr(paths, "DISCOVERY_SECONDS", 0.0)
    told = []
    watch = NamedLogs("node-0", [str(tmp_path / "**" / "*.log")], signs, lambda event, _at: told.append(event.finding))
    watch.told = told
    yield watch
    watch.close()


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


def test_files_are_bounded(watch, tmp_path, monkeypatch):
    """Beyond the most files the others are counted, not followed; one that is gone makes room."""
    monkeypatch.setattr(paths, "MOST_FILES", 2)
    for name in "abc":
        (tmp_path / f"{name}.log").write_text("")
    watch.tick()
    assert (len(watch), watch.left_out) == (2, 1)
    for name in "ab":
        (tmp_path / f"{name}.log").unlink(missing_ok=True)
    watch.tick()
    watch.tick()
    assert (len(watch), watch.left_out) == (1, 0)
