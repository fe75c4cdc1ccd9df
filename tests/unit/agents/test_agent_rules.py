import pytest

from agents.config import read_pace
from agents.peers import whole
from agents.rules.hang import Frame, Look, evidence, same_place
from agents.rules.host import room_findings
from agents.stacks import parse_dump, stack_of
from aimaster.wire.checkpoint import FetchRequest, SnapshotPlace, Version
from aimaster.wire.health import Reading

HERE = (Frame("a.py", 10, "wait"), Frame("b.py", 20, "main"))


def look(at: float, state: str = "S", cpu: float = 0.0, stack=HERE) -> Look:
    return Look(at=at, state=state, cpu_seconds=cpu, stack=stack)


@pytest.mark.parametrize(
    ("first", "second", "lease", "words"),
    [
        (look(0, "T", stack=None), look(1, "T", stack=None), None, ("state-T-twice", "no-cpu")),
        (look(0, "T", stack=None), look(1, "R", cpu=0.9), None, ()),
        (look(0, "t", stack=None), look(1, "t", stack=None), None, ("no-cpu",)),
        (look(0), look(6), 5.0, ("same-frame-twice", "no-cpu")),
        (look(0), look(6, cpu=6.0), 5.0, ("same-frame-twice",)),
        (look(0), look(4), 5.0, ("no-cpu",)),
        (look(0), look(6), None, ("no-cpu",)),
        (look(0), look(6, stack=(Frame("a.py", 11, "other"), HERE[1]), cpu=3.0), 5.0, ()),
        (look(0, stack=None), look(6, cpu=3.0), 5.0, ()),
    ],
)
def test_what_two_looks_prove(first, second, lease, words):
    """State T must be seen twice; the same frame counts a learnt lease apart; silence with processor time proves nothing."""
    assert evidence(first, second, lease_seconds=lease) == words


def test_a_spinning_thread_stands_in_one_place():
    """Lines of the innermost function may differ, everything above must not."""
    assert same_place(HERE, (Frame("a.py", 12, "wait"), HERE[1]))
    assert not same_place(HERE, (HERE[0], Frame("b.py", 21, "main")))
    assert not same_place(HERE, HERE[:1])
    assert not same_place((), ())


DUMP = """Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait
  File "/x/data.py", line 5 in load

Current thread 0x00007f0000000002 (most recent call first):
  File "/x/train.py", line 40 in reduce
  File "/x/train.py", line 99 in <module>
"""
NAMED = """Thread 0x00007f0000000001 [loader] (most recent call first):
  File "/x/data.py", line 5 in load
Thread 0x00007f0000000002 [python] (most recent call first):
  File "<string>", line ??? in <module>
"""


def test_a_dump_is_read_thread_by_thread():
    """Threads by their number, named or not, frames innermost first; the beating thread is found among them."""
    stacks = parse_dump(DUMP)
    assert [frame.function for frame in stacks[0x7F0000000002]] == ["reduce", "<module>"]
    assert stacks[0x7F0000000001][1] == Frame("/x/data.py", 5, "load")
    assert stack_of(DUMP, 0x7F0000000001)[1].function == "load"
    assert stack_of(DUMP, 0)[0].function == "reduce"
    assert stack_of(DUMP, 99) is None
    assert parse_dump(NAMED)[0x7F0000000002] == (Frame("<string>", 0, "<module>"),)
    assert parse_dump("no dump") == {}


def room(free: int, total: int = 100 << 30, folder: str = "run", state: str = "ok") -> Reading:
    values = {"folder": folder, "free_bytes": free, "total_bytes": total}
    return Reading(sensor="host", kind="host.room", node="node-0", time_seconds=1.0, state=state, values=values)


def test_a_full_folder_is_a_finding():
    """Neither 16 MiB nor 0.2 % left: a disk, or the node's memory; what cannot be read accuses nobody."""
    assert room_findings([room(50 << 30), room(0, state="unreadable"), room(1 << 30)]) == []
    found = room_findings([room(1 << 20), room(8 << 20, total=64 << 20, folder="memory")])
    assert [(one.category, one.id) for one in found] == [
        ("node.disk_full", "node-0:host.room:run"),
        ("node.shm_full", "node-0:host.room:memory"),
    ]


def place(
    member: str, step: int, *, rank: int = 0, ranks: int = 1, lineage: int = 0, role: str = "policy"
) -> SnapshotPlace:
    return SnapshotPlace(
        member=member, role=role, rank=rank, ranks=ranks, version=Version(lineage, step), chain="", state_digest="",
        tier="shm", node="node-0", name=f"{member}.r{rank}.s0.safetensors", size_bytes=1,
    )  # fmt: skip


def test_only_whole_snapshots_of_the_asked_kind_are_offered():
    """All ranks of one member at one step, of the role, newer than what is had or exactly as asked."""
    held = [place("policy-0", 3), place("policy-1", 4, rank=0, ranks=2), place("policy-0", 5, role="other")]
    assert [group[0].version.step for group in whole(held, FetchRequest(role="policy"))] == [3]
    held.append(place("policy-1", 4, rank=1, ranks=2))
    groups = whole(held, FetchRequest(role="policy", newer_than=Version(0, 3)))
    assert [[one.rank for one in group] for group in groups] == [[0, 1]]
    assert whole(held, FetchRequest(role="policy", at=Version(0, 9))) == []
    rewound = [place("policy-0", 2, lineage=1)]
    assert whole(rewound, FetchRequest(role="policy", newer_than=Version(0, 9)))


def test_the_pace_is_set_by_the_environment():
    """Names in capitals; a wrong name or value is refused by name."""
    assert read_pace({"AIMASTER_AGENT__LOOK_SECONDS": "0.5", "OTHER": "x"}).look_seconds == 0.5
    with pytest.raises(ValueError, match="AIMASTER_AGENT__LOOK_SECOND"):
        read_pace({"AIMASTER_AGENT__LOOK_SECOND": "0.5"})
    with pytest.raises(ValueError, match="look_seconds"):
        read_pace({"AIMASTER_AGENT__LOOK_SECONDS": "soon"})
