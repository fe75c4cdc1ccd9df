"""A journal under concurrent appends, compaction, a second opener, SIGKILL and a full disk."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aimaster.journal import (
    Journal,
    JournalClosedError,
    JournalFailedError,
    JournalFullError,
    JournalHeldError,
    read_frames,
)


def payloads(folder: Path) -> list[bytes]:
    return [frame.payload for frame in read_frames(folder)]


async def test_many_appends_share_few_fsyncs(tmp_path, monkeypatch):
    """Appends that wait together are covered by one fsync, keep their order, and return their own sequence."""
    synced = 0
    fdatasync = os.fdatasync

    def counted(descriptor: int) -> None:
        nonlocal synced
        synced += 1
        fdatasync(descriptor)

    monkeypatch.setattr(os, "fdatasync", counted)
    with Journal.open(tmp_path) as journal:
        numbers = await asyncio.gather(*(journal.append(b"%d" % number) for number in range(500)))
        assert numbers == list(range(1, 501))
        assert synced <= 3
        assert list(journal.replay()) == [b"%d" % number for number in range(500)]


async def test_compaction_keeps_its_place_among_appends(tmp_path):
    """A snapshot stands for the records appended before it; those appended after it follow it; the old segment is gone."""
    with Journal.open(tmp_path, compact_bytes=100) as journal:
        await journal.append(bytes(200))
        assert journal.compaction_due
        await asyncio.gather(
            journal.append(b"before"), journal.compact(b"snapshot"), journal.append(b"after"), journal.append(b"later")
        )
        assert not journal.compaction_due
        assert list(journal.replay()) == [b"snapshot", b"after", b"later"]
        assert [frame.sequence for frame in journal.frames()] == [3, 4, 5]
    assert len(list(tmp_path.glob("*.journal"))) == 1
    with Journal.open(tmp_path, compact_bytes=100) as journal:
        assert list(journal.replay()) == [b"snapshot", b"after", b"later"]
        assert not journal.compaction_due
        assert journal.last_sequence == 5


def test_a_crash_between_the_new_segment_and_the_removal_of_the_old_loses_nothing(tmp_path):
    """Where both segments are there, the newer counts and the older is removed at the next opening; half-made files too."""
    with Journal.open(tmp_path) as journal:
        journal.append_now([b"one"])
        (old,) = tmp_path.glob("*.journal")
        kept = old.read_bytes()
        journal.compact_now(b"sum")
        journal.append_now([b"two"])
    old.write_bytes(kept)
    (tmp_path / "00000000000000000009.aside").write_bytes(b"half")
    assert payloads(tmp_path) == [b"sum", b"two"]
    with Journal.open(tmp_path) as journal:
        assert list(journal.replay()) == [b"sum", b"two"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000000000000000002.journal", "lock"]


def test_a_second_opener_is_told_who_holds_it(tmp_path):
    """The lock is held for life and the error names the holder's pid; a killed holder frees it."""
    holder = start(f"""
        journal = Journal.open(Path({str(tmp_path)!r}))
        journal.append_now([b"mine"])
        print("open", flush=True)
        sys.stdin.read()
    """)
    try:
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(JournalHeldError, match=f"process {holder.pid}") as caught:
            Journal.open(tmp_path)
        assert caught.value.holder_pid == holder.pid
        assert payloads(tmp_path) == [b"mine"]
    finally:
        holder.kill()
        holder.communicate()
    with Journal.open(tmp_path) as journal:
        assert list(journal.replay()) == [b"mine"]


async def test_a_closed_journal_refuses(tmp_path):
    """After close nothing is accepted, and close may be called twice."""
    journal = Journal.open(tmp_path)
    journal.close()
    journal.close()
    with pytest.raises(JournalClosedError):
        await journal.append(b"late")
    with pytest.raises(JournalClosedError):
        journal.append_now([b"late"])


@pytest.mark.parametrize("seed", range(4))
def test_what_was_acknowledged_survives_sigkill(tmp_path, seed):
    """A writer killed in the middle of concurrent appends and compactions has lost nothing it was told is durable."""
    writer = start(f"""
        async def one(journal, number):
            await journal.append(b"%d " % number + b"x" * (number * 37 % 4000))
            os.write(1, b"%d\\n" % number)

        async def main():
            journal = Journal.open(Path({str(tmp_path)!r}))
            number = 0
            while True:
                await asyncio.gather(*(one(journal, number + step) for step in range(16)))
                number += 16
                if number % 160 == 0:
                    await journal.compact(b"%d " % (number - 1))

        asyncio.run(main())
    """)
    acknowledged = []
    while len(acknowledged) < 150 + seed * 133:
        acknowledged.append(int(writer.stdout.readline()))
    writer.send_signal(signal.SIGKILL)
    rest, _ = writer.communicate()
    acknowledged += [int(line) for line in rest.split("\n")[:-1]]
    with Journal.open(tmp_path) as journal:
        numbers = [int(payload.split(b" ")[0]) for payload in journal.replay()]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert numbers[-1] >= max(acknowledged)


def test_a_full_disk_is_named_and_the_journal_goes_on_when_space_returns(tmp_path):
    """A file that may not grow (a file size limit stands for the full disk) keeps what was durable, and only that."""
    done = start(f"""
        folder = Path({str(tmp_path)!r})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with Journal.open(folder) as journal:
            journal.append_now([b"kept"])
            resource.setrlimit(resource.RLIMIT_FSIZE, (120, resource.RLIM_INFINITY))

            async def full():
                return await asyncio.gather(*(journal.append(bytes(100)) for _ in range(5)), return_exceptions=True)

            answers = asyncio.run(full())
            assert all(isinstance(answer, JournalFullError) for answer in answers), answers
            try:
                journal.compact_now(bytes(300))
            except JournalFullError:
                pass
            assert list(journal.replay()) == [b"kept"]
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert journal.append_now([b"again"]) == 2
        print("fine")
    """)
    out, _ = done.communicate(timeout=60)
    assert out == "fine\n"
    assert payloads(tmp_path) == [b"kept", b"again"]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".journal"]


@pytest.fixture
def tiny_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this machine does not let the test mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


async def test_a_real_full_file_system(tiny_disk):
    """On a file system without space the append is refused by name, and works once something was deleted."""
    ballast = tiny_disk / "ballast"
    with Journal.open(tiny_disk / "journal") as journal:
        await journal.append(b"kept")
        ballast.write_bytes(bytes(56 << 10))
        with pytest.raises(JournalFullError, match="free space"):
            await journal.append(bytes(20 << 10))
        with pytest.raises(JournalFullError):
            await journal.compact(bytes(20 << 10))
        ballast.unlink()
        await journal.append(bytes(20 << 10))
        assert list(journal.replay()) == [b"kept", bytes(20 << 10)]


async def test_a_failing_device_is_named_and_nothing_of_the_group_stays(tmp_path, monkeypatch):
    """When fsync itself fails, the group is cut off again: pages that look written may never reach the disk."""

    def broken(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with Journal.open(tmp_path) as journal:
        await journal.append(b"kept")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", broken)
            with pytest.raises(JournalFailedError):
                await journal.append(b"gone")
        assert await journal.append(b"again") == 2
    assert payloads(tmp_path) == [b"kept", b"again"]


def start(body: str) -> subprocess.Popen[str]:
    """Run a program in another process, with the journal's names at hand."""
    head = "import asyncio, os, resource, signal, sys\nfrom pathlib import Path\nfrom aimaster.journal import Journal, JournalFullError\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(body)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
