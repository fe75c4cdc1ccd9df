import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.outbox import Outbox
from aimaster.wire.health import Finding
from aimaster.wire.messages import Found, OrderDone


def done(number: int) -> OrderDone:
    return OrderDone(order_id=f"1.{number}", ok=True)


def found() -> Found:
    return Found(finding=Finding(sign="x", category="unknown", role="self"))


def test_reports_are_numbered_and_kept_until_acknowledged(tmp_path):
    """Numbers begin with 1 and have no gap; an acknowledgement drops all up to it, and nothing else does."""
    box = Outbox(tmp_path)
    for number in range(1, 6):
        assert box.put(done(number), at=float(number))
    assert [report.sequence for report in box.after(0)] == [1, 2, 3, 4, 5]
    box.acknowledge(3)
    assert [report.sequence for report in box.after(0)] == [4, 5]
    box.acknowledge(2)
    assert len(box) == 2


def test_a_restarted_agent_goes_on_where_it_was(tmp_path):
    """Id, waiting reports and the count outlive the agent, also when everything was acknowledged before."""
    box = Outbox(tmp_path)
    box.put(done(1), at=1.0)
    box.put(done(2), at=2.0)
    again = Outbox(tmp_path)
    assert again.outbox_id == box.outbox_id
    assert again.after(0) == box.after(0)
    again.acknowledge(2)
    again.put(done(3), at=3.0)
    third = Outbox(tmp_path)
    assert third.after(2)[-1].sequence == 3


def test_an_emptied_folder_is_a_new_outbox(tmp_path):
    """A lost file begins a new count under a new id."""
    first = Outbox(tmp_path).outbox_id
    (tmp_path / "reports").unlink()
    assert Outbox(tmp_path).outbox_id != first


@given(cut=st.integers(min_value=1, max_value=2000))
def test_a_kill_inside_a_write_loses_at_most_the_last_report(tmp_path_factory, cut):
    """Cut at any byte, the file gives its whole records, and goes on from there; cut inside the header, it begins anew."""
    folder = tmp_path_factory.mktemp("outbox")
    box = Outbox(folder)
    for number in range(10):
        box.put(done(number), at=0.0)
    data = (folder / "reports").read_bytes()
    (folder / "reports").write_bytes(data[: max(0, len(data) - cut)])
    again = Outbox(folder)
    kept = [report.sequence for report in again.after(0)]
    assert kept == list(range(1, len(kept) + 1))
    again.put(done(99), at=0.0)
    assert [report.sequence for report in Outbox(folder).after(0)] == list(range(1, len(kept) + 2))


def test_a_changed_byte_ends_the_file_there(tmp_path):
    """A record that does not match its check is not read, and nothing behind it is."""
    box = Outbox(tmp_path)
    for number in range(4):
        box.put(done(number), at=0.0)
    path = tmp_path / "reports"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))
    assert [report.sequence for report in Outbox(tmp_path).after(0)] == [1, 2, 3]


def test_a_full_outbox_refuses_news_and_keeps_what_happened(tmp_path):
    """Beyond the bound findings are refused and counted; ends of members and outcomes of orders are always taken."""
    box = Outbox(tmp_path, limit=3)
    assert [box.put(found(), at=0.0) for _ in range(5)] == [True, True, True, False, False]
    assert box.refused == 2
    assert box.put(done(1), at=0.0)
    assert len(box) == 4


def test_the_file_shrinks_when_the_master_has_it(tmp_path):
    """Acknowledged reports leave the disk once they are a megabyte; the count goes on."""
    box = Outbox(tmp_path)
    detail = "x" * 10_000
    for number in range(150):
        box.put(OrderDone(order_id=f"1.{number}", ok=True, detail=detail), at=0.0)
    assert (tmp_path / "reports").stat().st_size > 1 << 20
    box.acknowledge(149)
    assert (tmp_path / "reports").stat().st_size < 20_000
    box.put(done(1), at=0.0)
    assert [report.sequence for report in Outbox(tmp_path).after(0)] == [150, 151]


def test_a_file_of_another_version_is_not_guessed_at(tmp_path):
    """What cannot be decoded begins a new outbox instead of ending the agent."""
    (tmp_path / "reports").write_bytes(b"\x05\x00\x00\x00garbage")
    assert len(Outbox(tmp_path)) == 0


@pytest.mark.parametrize("size", [0, 5])
def test_after_gives_only_what_is_newer(tmp_path, size):
    """The link asks for what it has not sent yet."""
    box = Outbox(tmp_path)
    for number in range(size):
        box.put(done(number), at=0.0)
    assert [report.sequence for report in box.after(3)] == list(range(4, size + 1))
