import msgspec
import pytest

from agents import pictures
from agents.pictures import LogPictures
from aimaster import catalogue
from aimaster.catalogue.kept import Kept, Steps, keep
from aimaster.catalogue.scan import LogScan
from aimaster.wire import codec

LOST = "kernel: NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.\n"


@pytest.fixture(scope="module")
def signs():
    return catalogue.load()


class Log:
    """A log that is followed."""

    def __init__(self, signs, file="a.log"):
        self.scan = LogScan(signs, node="node-0", file=file)
        self.past = None

    def write(self, text):
        self.scan.feed(text.encode())


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def kinds(found):
    return [(one.file, "whole" if one.whole else "steps") for one in found]


def test_news_is_sent_whole_and_steps_alone(signs, clock):
    """A log's first picture and each new statement go whole; steps go by themselves, not at every pulse; silence sends nothing."""
    log = Log(signs)
    shown = LogPictures(lambda: [log], clock)
    assert shown.fresh(1) == ()
    log.write("step 1\n")
    assert kinds(shown.fresh(1)) == [("a.log", "whole")]
    assert shown.fresh(1) == ()
    log.write("step 2\n")
    assert shown.fresh(1) == ()
    clock.now += pictures.STEPS_SECONDS
    (steps,) = shown.fresh(1)
    assert codec.decode(steps.steps, Steps).bytes_read == len("step 1\nstep 2\n")
    log.write(LOST)
    (whole,) = shown.fresh(1)
    assert len(codec.decode(whole.whole, Kept).hits) == 1


def test_the_same_words_again_go_now_and_then(signs, clock):
    """Repeats change counts and times alone: they wait, and how far the log has come is not told before them."""
    log = Log(signs)
    shown = LogPictures(lambda: [log], clock)
    log.write(LOST)
    assert kinds(shown.fresh(1)) == [("a.log", "whole")]
    log.write(LOST)
    assert shown.fresh(1) == ()
    log.write(LOST + "step 1\n")
    clock.now += pictures.STEPS_SECONDS
    (whole,) = shown.fresh(1)
    assert codec.decode(whole.whole, Kept).hits[0].count == 3
    log.write("step 2\n")
    clock.now += pictures.STEPS_SECONDS
    assert kinds(shown.fresh(1)) == [("a.log", "steps")]


def test_a_new_connection_is_told_everything(signs, clock):
    """Logs that go on, and the last words of those that are followed no more; a new log of the same name replaces those."""
    log, ended = Log(signs), Log(signs, "b.log")
    shown = LogPictures(lambda: [log], clock)
    log.write("step 1\n")
    ended.write(LOST)
    shown.end(keep(ended.scan))
    assert kinds(shown.fresh(1)) == [("b.log", "whole"), ("a.log", "whole")]
    assert shown.fresh(1) == ()
    assert kinds(shown.fresh(2)) == [("b.log", "whole"), ("a.log", "whole")]
    begun = Log(signs, "b.log")
    begun.write("step 1\n")
    shown = LogPictures(lambda: [begun], clock)
    shown.end(keep(ended.scan))
    assert len(shown.fresh(1)) == 2
    (only,) = shown.fresh(2)
    assert codec.decode(only.whole, Kept).hits == []


def test_a_pulse_has_a_size(signs, clock, monkeypatch):
    """What has no room goes with the next pulse; a large picture is sent less often."""
    logs = [Log(signs, f"{n}.log") for n in range(4)]
    for log in logs:
        log.write(LOST)
    shown = LogPictures(lambda: logs, clock)
    size = len(codec.encode(keep(logs[0].scan)))
    monkeypatch.setattr(pictures, "PULSE_BYTES", size + 1)
    assert [len(shown.fresh(1)) for _ in range(3)] == [2, 2, 0]
    monkeypatch.setattr(pictures, "BYTES_PER_SECOND", size)
    shown = LogPictures(lambda: logs[:1], clock)
    assert len(shown.fresh(1)) == 1
    logs[0].write("kernel: EXT4-fs (md0): Remounting filesystem read-only\n")
    assert shown.fresh(1) == ()
    clock.now += 1.0
    assert len(shown.fresh(1)) == 1


def test_what_was_kept_before_a_scan_began_anew_stays(signs, clock):
    """The picture joins the earlier scan's words and the present one's."""
    log = Log(signs)
    log.write(LOST)
    log.past, log.scan = keep(log.scan), LogScan(signs, node="node-0", file="a.log")
    log.scan.bytes_read = len(LOST)
    log.write("kernel: EXT4-fs (md0): Remounting filesystem read-only\n")
    (whole,) = LogPictures(lambda: [log], clock).fresh(1)
    kept = codec.decode(whole.whole, Kept)
    assert [hit.sign.category for hit in kept.hits] == ["gpu.lost", "node.disk_fault"]
    assert msgspec.to_builtins(kept)["file"] == "a.log"
