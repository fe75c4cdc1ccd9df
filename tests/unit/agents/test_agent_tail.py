import os
import tracemalloc

from agents.tail import BUDGET_BYTES, HELD_BYTES, Tail


def everything(tail: Tail) -> bytes:
    return b"".join(tail.read())


def append(path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_only_what_is_new_is_read(tmp_path):
    """From the given offset on, each byte once; a file that is not there yet is waited for."""
    path = tmp_path / "log"
    tail = Tail(path, 4)
    assert everything(tail) == b""
    append(path, b"old\nnew\n")
    assert everything(tail) == b"new\n"
    append(path, b"more")
    assert everything(tail) == b"more"
    assert everything(tail) == b""


def test_rotation_and_truncation_lose_nothing_that_was_there(tmp_path):
    """The rest of the old file is read before the new one; a file truncated in place is read from its beginning."""
    path = tmp_path / "log"
    tail = Tail(path)
    append(path, b"one\n")
    assert everything(tail) == b"one\n"
    append(path, b"two\n")
    path.rename(tmp_path / "log.1")
    append(path, b"three\n")
    assert everything(tail) == b"two\n\nthree\n"
    os.truncate(path, 0)
    append(path, b"4\n")
    assert everything(tail) == b"\n4\n"


def test_the_last_lines_are_those_a_terminal_shows(tmp_path):
    """Progress bars leave their last state, bytes that are no text are replaced, at most fifty lines are kept."""
    path = tmp_path / "log"
    append(path, b"".join(b"line %d\n" % n for n in range(100)) + b" 10%\r 90%\r100%\nbad \xff byte\r\nlast")
    tail = Tail(path)
    everything(tail)
    lines = tail.last_lines()
    assert len(lines) == 50
    assert lines[-3:] == ["100%", "bad � byte", "last"]


def test_a_flood_takes_time_and_no_memory(tmp_path):
    """A call reads a bounded amount; a line of ten megabytes and a flood are held in a bounded buffer, and read to the end."""
    path = tmp_path / "log"
    append(path, b"x" * (10 << 20) + b"\n" + b"a line of the flood\n" * 200_000 + b"the end\n")
    size = path.stat().st_size
    tail = Tail(path)
    tracemalloc.start()
    try:
        total, calls = 0, 0
        while piece_bytes := sum(len(piece) for piece in tail.read()):
            assert piece_bytes <= BUDGET_BYTES
            total += piece_bytes
            calls += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (total, calls) == (size, -(-size // BUDGET_BYTES))
    assert peak < 8 * HELD_BYTES + (2 << 20)
    assert tail.last_lines()[-1] == "the end"
