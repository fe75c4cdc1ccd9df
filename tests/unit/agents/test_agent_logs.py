import msgspec
import pytest

from agents.logs import LogWatch
from agents.member import Member, Ordered
from aimaster import catalogue
from aimaster.brain.diagnose import from_exit
from aimaster.catalogue.scan import LogScan
from aimaster.wire.messages import Found
from aimaster.wire.topology import MemberSpec


@pytest.fixture(scope="module")
def signs():
    return catalogue.load()


@pytest.fixture
async def member(tmp_path):
    spec = MemberSpec(member="policy-0", role="policy", argv=("x",))
    ordered = Ordered(spec=spec, incarnation=2, cookie="c", log_offset=0, stacks_offset=0)
    return Member(tmp_path, ordered)


def write(member, text: str) -> None:
    with (member.folder / "output.log").open("a") as file:
        file.write(text)


XID = "kernel: NVRM: Xid (PCI:0000:b3:00): 79, pid=12, name=python, GPU has fallen off the bus.\n"


async def test_only_this_start_is_judged(member, signs):
    """What an earlier start wrote into the same file is nobody's news, and offsets are those of the file."""
    write(member, XID * 2)
    member.ordered = msgspec.structs.replace(member.ordered, log_offset=2 * len(XID))
    told = []
    watch = LogWatch("node-0", signs, lambda event, _at: told.append(event))
    watch.add(member)
    watch.tick()
    assert told == []
    write(member, "step 1\n" + XID)
    watch.tick()
    watch.tick()
    assert [type(event) for event in told] == [Found]
    finding = told[0].finding
    assert (finding.category, finding.evidence[0].offset) == ("gpu.lost", 2 * len(XID) + len("step 1\n"))
    assert finding.id.startswith("node-0:policy-0:2:")


async def test_an_unknown_end_offers_what_no_earlier_start_printed(member, signs):
    """Of two alarming lines that no sign knows, the one that the first start printed too is not offered; the verdict evicts nobody."""
    first = "ERROR cache: failed to prefetch shard 3, using the slow path\n"
    write(member, first * 2)
    member.ordered = msgspec.structs.replace(member.ordered, log_offset=2 * len(first))
    write(member, first.replace("3", "77") + "FATAL frobnicator: oscillator 7 lost its phase\n")
    event = LogWatch("node-0", signs, lambda *_: None).exit_report(member, 7, None, 5.0)
    verdict = from_exit(
        "policy-0", "node-0", 0, 12, 7, None, event.findings, log_tail="\n".join(event.log_tail), now=5.0
    )
    assert (verdict.category, verdict.action) == ("unknown", "restart_process")
    assert [line.text for line in verdict.candidates] == ["FATAL frobnicator: oscillator 7 lost its phase"]
    assert verdict.candidates[0].offset == 3 * len(first) + 1


async def test_an_end_carries_the_traceback(member, signs):
    """All that the log says comes with the end: the exception as a finding, the last lines, bounded and without secrets."""
    write(member, "x" * 100 + "\n" + "password=hunter2222\n")
    write(member, 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nValueError: bad batch\n')
    event = LogWatch("node-0", signs, lambda *_: None).exit_report(member, 1, None, 5.0)
    assert event.log_tail[-1] == "ValueError: bad batch"
    assert "hunter2222" not in str(event)
    assert any(finding.category == "app.exception" for finding in event.findings)
    assert (event.incarnation, event.expected, event.at) == (2, False, 5.0)


async def test_an_expected_end_says_so(member, signs):
    """Exit code 0, or any code after an order to stop, is expected."""
    watch = LogWatch("node-0", signs, lambda *_: None)
    assert watch.exit_report(member, 0, None, 1.0).expected
    assert not watch.exit_report(member, None, 15, 1.0).expected
    member.ordered = msgspec.structs.replace(member.ordered, stopping=True)
    assert watch.exit_report(member, None, 15, 1.0).expected


async def test_a_sign_that_fails_costs_one_log_and_not_the_agent(member, signs, monkeypatch):
    """A rule that raises blinds the agent for that log alone; the end of the member is still told with its last lines."""

    def fail(self, data):
        raise RuntimeError("a rule of the user")

    monkeypatch.setattr(LogScan, "feed", fail)
    watch = LogWatch("node-0", signs, lambda *_: None)
    watch.add(member)
    write(member, "hello\n")
    watch.tick()
    write(member, "goodbye\n")
    watch.tick()
    event = watch.exit_report(member, 3, None, 1.0)
    assert event.log_tail == ("hello", "goodbye")
    assert event.findings == ()
