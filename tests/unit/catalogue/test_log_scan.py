import random
import tracemalloc

import pytest

from aimaster.catalogue import load
from aimaster.catalogue.blocks import TorchrunReport, Traceback
from aimaster.catalogue.hits import CAP
from aimaster.catalogue.scan import LogScan

OOM = "[rank{r}]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 5 has a total capacity of 79.11 GiB"
STEP = "2026-03-01 10:00:{s:02},000 INFO train: step={s} loss=1.0"


@pytest.fixture(scope="module")
def catalogue():
    return load()


def scan(catalogue, data: bytes, chunk: int = 1 << 20) -> LogScan:
    one = LogScan(catalogue, node="n", file="f.log")
    for at in range(0, len(data), chunk):
        one.feed(data[at : at + chunk])
    one.finish()
    return one


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000, 1 << 20])
def test_a_sign_is_found_wherever_the_chunks_are_cut(catalogue, chunk):
    """Line number, offset and text are the same for every size of chunk."""
    lines = [STEP.format(s=s) for s in range(30)] + [OOM.format(r=3)] + ["bye"]
    data = "\n".join(lines).encode()
    found = [hit for hit in scan(catalogue, data, chunk).hits if hit.sign.id == "torch.cuda-oom"]
    assert [(hit.line, hit.offset, hit.text) for hit in found] == [(31, data.index(b"[rank3]"), OOM.format(r=3))]


def test_repeats_are_counted_not_kept(catalogue):
    """The same statement a thousand times is one statement with a count."""
    one = scan(catalogue, (OOM.format(r=3) + "\n").encode() * 1000)
    assert [hit.count for hit in one.hits if hit.sign.id == "torch.cuda-oom"] == [1000]


def test_a_flood_of_echoes_never_hides_a_root(catalogue):
    """Echoes beyond the limit are counted as dropped; the root after a million of them is kept."""
    echo = "srun: error: worker-{n}: task {n}: Terminated\n"
    data = "".join(echo.format(n=n) for n in range(CAP["echo"] + 500)).encode() + (OOM.format(r=1) + "\n").encode()
    one = scan(catalogue, data)
    assert one.dropped == {"slurm.task-terminated": 500}
    assert "torch.cuda-oom" in {hit.sign.id for hit in one.hits}


def test_memory_is_bounded_by_the_chunk_not_by_the_log(catalogue):
    """Scanning a log of 57 MB keeps little more than a chunk."""
    block = ("\n".join(STEP.format(s=s % 60) for s in range(9000)) + "\n").encode()
    scan(catalogue, block)  # patterns are compiled once
    tracemalloc.start()
    one = LogScan(catalogue, node="n", file="f.log")
    for _ in range(120):
        one.feed(block)
    one.finish()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert one.bytes_read > 50e6
    assert peak < 12e6


def test_long_lines_carriage_returns_and_bad_utf8_do_no_harm(catalogue):
    """A 10 MB line, a progress bar and broken UTF-8 around a sign leave it readable."""
    bar = b"\r".join(b"Epoch 1: %d%%|##| 5/99 [00:01<00:02]" % n for n in range(2000))
    data = (
        b"x" * 10_000_000
        + b" "
        + OOM.format(r=2).encode()
        + b"\n"
        + bar
        + b"\r"
        + OOM.format(r=4).encode()
        + b"\xff\xfe\n\xc3\x28\n"
    )
    ranks = {hit.speaker.subject.rank for hit in scan(catalogue, data, 65536).hits if hit.sign.id == "torch.cuda-oom"}
    assert 4 in ranks
    assert len([hit for hit in scan(catalogue, data, 65536).hits if hit.sign.id == "torch.cuda-oom"]) == 2


def test_interleaved_tracebacks_of_ranks_are_told_apart(catalogue):
    """Each rank's traceback ends with its own exception although their lines are mixed."""
    data = b"""[rank0]: Traceback (most recent call last):
[rank1]: Traceback (most recent call last):
[rank0]:   File "a.py", line 1, in <module>
[rank1]:   File "b.py", line 2, in <module>
[rank1]: ValueError: one
[rank0]: KeyError: 'zero'
"""
    blocks = [block for block in scan(catalogue, data).blocks if isinstance(block, Traceback)]
    assert [(block.exception, block.message) for block in blocks] == [("KeyError", "'zero'"), ("ValueError", "one")]
    assert 'File "b.py"' in blocks[1].text()


def test_torchruns_report_is_read(catalogue):
    """Rank, local rank, exit code, pid and order of each failed process are read from the table."""
    data = b"""torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-03-01_10:00:01
  host      : node-5
  rank      : 41 (local_rank: 1)
  exitcode  : -6 (pid: 51878)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-03-01_10:00:00
  host      : node-5
  rank      : 40 (local_rank: 0)
  exitcode  : 1 (pid: 51877)
============================================================
"""
    (report,) = [block for block in scan(catalogue, data).blocks if isinstance(block, TorchrunReport)]
    assert [(one.rank, one.local_rank, one.exit_code, one.pid, one.first) for one in report.entries] == [
        (41, 1, -6, 51878, False),
        (40, 0, 1, 51877, True),
    ]


def test_scanning_survives_any_bytes(catalogue):
    """Random bytes mixed with fragments of real lines never raise, and offsets stay inside the data."""
    dice = random.Random(5)
    pieces = [sign.match[0].encode() for sign in catalogue.signs]
    for _ in range(40):
        data = b"".join(
            dice.choice((dice.randbytes(dice.randrange(200)), dice.choice(pieces)[: dice.randrange(300)], b"\n", b"\r"))
            for _ in range(60)
        )
        one = scan(catalogue, data, dice.randrange(1, 400))
        assert all(0 <= hit.offset <= len(data) for hit in one.hits)


@pytest.mark.parametrize(
    "prefix",
    [
        b"",
        b"[rank3]:",
        b"(EngineCore_DP0 pid=3) ERROR 03-01 10:00:%02d [core.py:596] ",
        b"2026-03-01 10:00:%02d,120 - x - ERROR - ",
        b"worker-1: ",
        b"[1,3]<stderr>:",
        b"[pod/w-1/pytorch] ",
        b"i.pretrain/0 [rank4]: ",
    ],
)
def test_a_traceback_is_read_behind_any_prefix(catalogue, prefix):
    """Whatever a launcher or logger puts before each line, clock and all, the exception is found."""
    lines = [
        b"Traceback (most recent call last):",
        b'  File "a.py", line 1, in <module>',
        b"    run()",
        b"demo.StrangeError: odd",
    ]
    heads = [prefix % second if b"%" in prefix else prefix for second in (58, 59, 59, 59)]
    data = b"\n".join(head + line for head, line in zip(heads, lines, strict=True)) + b"\n"
    (block,) = [one for one in scan(catalogue, data).blocks if isinstance(one, Traceback)]
    assert (block.exception, block.message) == ("demo.StrangeError", "odd")


def test_last_words_without_a_traceback_are_kept(catalogue):
    """An exception among the last lines counts although its traceback was not printed; not so when steps follow it."""
    end = b"\n".join(STEP.format(s=s).encode() for s in range(5))
    words = [b for b in scan(catalogue, end + b"\n[rank1]: odd.StrangeError: why\n").blocks if isinstance(b, Traceback)]
    assert [(block.exception, block.message) for block in words] == [("odd.StrangeError", "why")]
    assert scan(catalogue, b"odd.StrangeError: why\n" + end + b"\n").blocks == []


def test_an_exception_that_a_program_goes_on_without_is_none(catalogue):
    """Ray's monitor finds its metrics port taken, says so with a traceback, and goes on; the same words under another heading count."""
    trace = 'Traceback (most recent call last):\n  File "monitor.py", line 207, in __init__\nOSError: [Errno 98] Address already in use\n'
    heading = (
        "2026-03-01 23:04:10,478\tERROR monitor.py:218 -- An exception occurred while starting the metrics server.\n"
    )
    after = "2026-03-01 23:04:10,480\tINFO monitor.py:226 -- Monitor: Started\n"
    for size in (1 << 20, 50):
        assert scan(catalogue, (heading + trace + after).encode(), size).hits == []
    assert [hit.sign.id for hit in scan(catalogue, (heading + trace + after + trace).encode()).hits] == [
        "torch.address-in-use"
    ]
