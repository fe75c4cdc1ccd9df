"""Frames and segments as bytes: what is whole, what is torn, what is damaged."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimaster.journal import Journal, JournalDamagedError, read_frames
from aimaster.journal.frames import decode_frames, encode_frame

PAYLOADS = [b"", b"one", b"\xa7JR1 looks like a frame", bytes(300), b"last"]


def frames(payloads: list[bytes], durable: int = 0) -> list[bytes]:
    return [encode_frame(payload, sequence=number, durable=durable) for number, payload in enumerate(payloads, 1)]


def journal_of(folder: Path, groups: list[list[bytes]]) -> Path:
    """A closed journal whose groups were fsynced one by one; returns its only segment."""
    with Journal.open(folder) as journal:
        for group in groups:
            journal.append_now(group)
    (segment,) = folder.glob("*.journal")
    return segment


@given(st.lists(st.binary(max_size=200), max_size=8), st.integers(0, 2**63))
def test_frames_come_back(payloads, durable):
    """What was framed is read back, in order and with its sequence numbers."""
    found = list(decode_frames(b"".join(frames(payloads, durable)), 1))
    assert [frame.payload for frame in found] == payloads
    assert [frame.sequence for frame in found] == list(range(1, len(payloads) + 1))
    assert all(frame.durable == durable for frame in found)


@given(st.data())
def test_a_flipped_bit_is_never_read(data):
    """A frame with any bit flipped is not a frame, and none after it is taken for the next."""
    raw = bytearray(b"".join(frames([b"first", b"second", b"third"])))
    second = len(frames([b"first"])[0])
    end = second + len(frames([b"second"])[0])
    bit = data.draw(st.integers(second * 8, end * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    assert [frame.payload for frame in decode_frames(bytes(raw), 1)] == [b"first"]


def test_a_journal_torn_at_any_byte_keeps_every_whole_record_before_it(tmp_path):
    """Cut anywhere, a journal opens, says how much it cut, holds the records that are whole, and appends after them."""
    segment = journal_of(tmp_path / "source", [PAYLOADS])
    raw = segment.read_bytes()
    ends = [frame.end for frame in decode_frames(raw, 1)]
    for cut in range(len(raw) + 1):
        folder = tmp_path / f"cut-{cut}"
        folder.mkdir()
        (folder / segment.name).write_bytes(raw[:cut])
        whole = sum(end <= cut for end in ends)
        with Journal.open(folder) as journal:
            assert list(journal.replay()) == PAYLOADS[:whole]
            assert journal.torn_bytes == cut - ([0, *ends][whole])
            assert journal.append_now([b"after"]) == whole + 1
        assert [frame.payload for frame in read_frames(folder)] == [*PAYLOADS[:whole], b"after"]


def test_the_unsynced_group_may_be_torn_in_its_middle(tmp_path):
    """After a power cut, pages of the last write may be missing before pages that are there: still a torn tail."""
    segment = journal_of(tmp_path, [[b"kept"], [b"x" * 100, b"y" * 100, b"z" * 100]])
    raw = bytearray(segment.read_bytes())
    start = raw.find(b"x" * 100)
    raw[start : start + 100] = bytes(100)
    segment.write_bytes(raw)
    with Journal.open(tmp_path) as journal:
        assert list(journal.replay()) == [b"kept"]
        assert journal.torn_bytes > 0


@pytest.mark.parametrize("spoil", ["payload", "length"])
def test_damage_in_the_middle_is_an_error_and_changes_nothing(tmp_path, spoil):
    """A record that was durable and no longer reads stops the opening; the file stays as it is, even where the damage looks like a torn tail."""
    segment = journal_of(tmp_path, [[b"a" * 50], [b"b" * 50], [b"c" * 50]])
    raw = bytearray(segment.read_bytes())
    second = next(decode_frames(bytes(raw), 1)).end
    if spoil == "payload":
        raw[raw.find(b"b" * 50)] ^= 1
    else:
        raw[second + 6] = 0xFF  # the length now reaches far past the end of the file
    segment.write_bytes(raw)
    for _ in range(2):
        with pytest.raises(JournalDamagedError, match=f"record 2 at byte {second}"):
            Journal.open(tmp_path)
    assert segment.read_bytes() == bytes(raw)
    with pytest.raises(JournalDamagedError):
        list(read_frames(tmp_path))


def test_a_segment_born_of_compaction_must_begin_with_its_snapshot(tmp_path):
    """A compacted segment without its snapshot is damage, not an empty journal."""
    with Journal.open(tmp_path) as journal:
        journal.append_now([b"one", b"two"])
        journal.compact_now(b"sum")
    (segment,) = tmp_path.glob("*.journal")
    segment.write_bytes(segment.read_bytes()[:-1])
    with pytest.raises(JournalDamagedError):
        Journal.open(tmp_path)


@pytest.mark.parametrize("spoil", ["garbage", "overwritten magic"])
def test_a_file_of_which_nothing_can_be_read_is_named_and_stays(tmp_path, spoil):
    """What does not even begin as a journal is no torn tail: it is refused, and not a byte of it is cut."""
    segment = journal_of(tmp_path, [[b"a" * 50]])
    raw = b"no journal at all\n" * 20 if spoil == "garbage" else b"XXXX" + segment.read_bytes()[4:]
    segment.write_bytes(raw)
    for _ in range(2):
        with pytest.raises(JournalDamagedError, match=r"nothing of .* can be read"):
            Journal.open(tmp_path)
    assert segment.read_bytes() == raw


def test_a_first_record_whose_pages_never_came_is_a_torn_tail(tmp_path):
    """A power cut may leave the very first append as zeros: nobody was told of it, and the journal begins."""
    segment = journal_of(tmp_path, [[b"a" * 50]])
    segment.write_bytes(bytes(100))
    with Journal.open(tmp_path) as journal:
        assert journal.torn_bytes == 100
        assert journal.append_now([b"first"]) == 1
