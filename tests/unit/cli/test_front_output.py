"""Output passes on at its reader's pace, and nobody waits for a reader that stands still."""

import fcntl
import os
import threading
import time

from aimaster.cli.front_output import NoteStream, OutputFollower
from aimaster.cli.front_plan import plan_command
from aimaster.wire.ids import RunId
from aimaster.wire.places import RunPlaces


def files_of(tmp_path, ranks):
    """A plan of so many ranks, its places, and the output file of each."""
    plan = plan_command(
        ["x"], run_id=RunId("0a"), name="x", cwd="/", front_pid=1, ranks=ranks, port=1, max_restarts=1, environ={}
    )
    places = RunPlaces(tmp_path / "run")
    files = [places.member(node, member) / "output.log" for member, node in plan.placement.items()]
    for file in files:
        file.parent.mkdir(parents=True)
    return plan, places, files


def finish(follower, seconds=20.0, stall_seconds=10.0):
    deadline = time.monotonic() + seconds
    while not follower.finish(0.02, stall_seconds=stall_seconds):
        assert time.monotonic() < deadline, "the follower does not end"


def wait_for(question, what):
    deadline = time.monotonic() + 10
    while not question():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_output_is_passed_on_from_where_it_stood(tmp_path):
    """Whole lines with their rank before them; what an earlier start printed is not repeated; a last line without end is not lost."""
    plan, places, (zero, one) = files_of(tmp_path, 2)
    zero.write_bytes(b"old\n")
    out = tmp_path / "out"
    with out.open("wb") as stream:
        follower = OutputFollower(plan, places, stream.fileno())
        follower.start()
        with zero.open("ab") as file:
            file.write(b"a\nb")
        wait_for(lambda: out.read_bytes() == b"[rank-0]: a\n", "the first line")
        one.write_bytes(b"c\n")
        wait_for(lambda: out.read_bytes().endswith(b"c\n"), "the second rank's")
        with zero.open("ab") as file:
            file.write(b"b\n\xff no utf-8")
        finish(follower)
    assert out.read_bytes() == b"[rank-0]: a\n[rank-1]: c\n[rank-0]: bb\n[rank-0]: \xff no utf-8\n"
    assert follower.unshown() == []


def test_all_of_a_flood_comes_through_to_its_last_line(tmp_path):
    """One line of many megabytes, and the line behind it, reach the reader whole."""
    plan, places, (file,) = files_of(tmp_path, None)
    flood = b"z" * (8 << 20) + b"\ntail\n"
    out = tmp_path / "out"
    with out.open("wb") as stream:
        follower = OutputFollower(plan, places, stream.fileno())
        follower.start()
        file.write_bytes(flood)
        finish(follower)
    assert out.read_bytes() == flood


def test_a_line_without_end_shows_while_it_grows(tmp_path):
    """A question or a progress bar of a lone command is seen before its line ends."""
    plan, places, (file,) = files_of(tmp_path, None)
    out = tmp_path / "out"
    with out.open("wb") as stream:
        follower = OutputFollower(plan, places, stream.fileno())
        follower.start()
        file.write_bytes(b"50 %\r")
        wait_for(lambda: out.read_bytes() == b"50 %\r", "the unfinished line")
        finish(follower)
    assert out.read_bytes() == b"50 %\r\n"


def small_pipe():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    return reader, writer


def test_a_reader_that_stands_still_is_told_of_by_bytes_and_file(tmp_path):
    """It holds nobody up: past the deadline what it did not take is counted, and named with the file that holds it."""
    plan, places, (file,) = files_of(tmp_path, None)
    reader, writer = small_pipe()
    try:
        follower = OutputFollower(plan, places, writer)
        follower.start()
        file.write_bytes(b"x" * 100_000)
        finish(follower, stall_seconds=0.3)
        (left,) = follower.unshown()
        assert left.file == file
        assert 80_000 <= left.size_bytes <= 100_000
    finally:
        os.close(reader)
        os.close(writer)


def test_a_slow_reader_gets_all_of_it(tmp_path):
    """As long as it takes something now and then, the end waits for it."""
    plan, places, (file,) = files_of(tmp_path, None)
    reader, writer = small_pipe()
    got = bytearray()

    def read_slowly():
        while block := os.read(reader, 4096):
            got.extend(block)
            time.sleep(0.01)

    slow = threading.Thread(target=read_slowly)
    slow.start()
    follower = OutputFollower(plan, places, writer)
    follower.start()
    file.write_bytes(b"y" * 300_000 + b"\n")
    finish(follower, stall_seconds=2.0)
    os.close(writer)
    slow.join()
    os.close(reader)
    assert bytes(got) == b"y" * 300_000 + b"\n"
    assert follower.unshown() == []


def test_a_reader_that_goes_away_wanted_no_more(tmp_path):
    """`| head` is no trouble and nothing is said of it."""
    plan, places, (file,) = files_of(tmp_path, None)
    reader, writer = small_pipe()
    os.close(reader)
    follower = OutputFollower(plan, places, writer)
    follower.start()
    file.write_bytes(b"x" * 100_000)
    finish(follower)
    os.close(writer)
    assert follower.unshown() == []


def test_words_of_the_front_wait_for_nobody():
    """With stderr stuck, notes are taken at once, dropped when too many, and the end of the stream comes."""
    reader, writer = small_pipe()
    try:
        with open(writer, "w", closefd=False) as stream:
            notes = NoteStream(stream)
            for number in range(3000):
                print(f"note {number} " + "." * 100, file=notes)
            assert notes.dropped > 0
            notes.close()
        assert os.read(reader, 7) == b"note 0 "
    finally:
        os.close(reader)
        os.close(writer)
