import pytest

from agents.member import Member, Ordered
from agents.ranks import left_early
from agents.rules.groups import RankLook, Silence, describe, find_apart, find_standing, group, patience_seconds, waits
from agents.rules.hang import Frame
from agents.stacks import spy_text, stack_of
from agents.steps import LogSteps
from aimaster.client import Leases
from aimaster.wire.topology import MemberSpec

TRAIN = Frame("/x/train.py", 40, "<module>")
REDUCE = (Frame("/v/site-packages/torch/distributed/distributed_c10d.py", 3252, "all_reduce"), TRAIN)
BARRIER = (
    Frame("/v/site-packages/torch/distributed/distributed_c10d.py", 4000, "barrier"),
    Frame("/x/train.py", 50, "save"),
    TRAIN,
)
BACKWARD = (Frame("/v/site-packages/torch/autograd/graph.py", 800, "_engine_run_backward"), TRAIN)
LOAD = (Frame("/x/data.py", 5, "load"), Frame("/x/train.py", 30, "<module>"))


def evaluating(line):
    return (Frame("/x/model.py", line, f"layer{line}"), Frame("/x/train.py", 60, "evaluate"), TRAIN)


def looks(stacks, *, at=0.0, spins=(), polls=(), reads=(), loads=(), copies=(), blocks=()):
    """One look at all ranks. `spins` use a whole core, `polls` wake ten times a second, `reads` read, `loads` have children that compute,
    `copies` children that read, `blocks` children that the kernel holds.
    """
    return [
        RankLook(
            rank=rank, member=f"rank-{rank}", pid=100 + rank, at=at, state="S", stack=stack,
            cpu_seconds=at if rank in spins else 0.2 * at if rank in reads else 0.0,
            children_cpu_seconds=at if rank in loads else 0.0,
            switches=int(10 * at) if rank in (*spins, *polls, *reads) else 0,
            calls=int(100 * at) if rank in (*reads, *copies) else 0, blocked=rank in blocks,
        )
        for rank, stack in enumerate(stacks)
    ]  # fmt: skip


def history(stacks, times=(0, 1, 6), **doings):
    return [looks(stacks, at=float(at), **doings) for at in times]


def judge(looked, *, silence=None, lease=None, floor=5.0):
    """Shortest lease 5 s; the job's last step was before the first look, as long as the shortest lease unless told."""
    return find_apart(looked, silent(looked, silence=silence, lease=lease, floor=floor))


def silent(looked, *, silence=None, lease=None, floor=5.0):
    last = looked[-1][0].at if looked and looked[-1] else 0.0
    seconds = last + 5.0 if silence is None else silence
    return Silence(seconds=seconds, lease_seconds=lease, floor_seconds=floor)


@pytest.mark.parametrize(
    ("stacks", "doings", "guilty", "kind"),
    [
        ([REDUCE, REDUCE, LOAD, REDUCE], {}, (2,), "straggler"),
        ([REDUCE, REDUCE, None, REDUCE], {}, (2,), "straggler"),
        ([REDUCE, REDUCE, LOAD, REDUCE], {"spins": (0, 1, 3)}, (2,), "straggler"),
        ([REDUCE, LOAD], {}, (1,), "straggler"),
        ([REDUCE, LOAD, LOAD, REDUCE], {}, (1, 2), "straggler"),
        ([REDUCE, LOAD, LOAD, LOAD], {}, None, ""),
        ([REDUCE, BARRIER, LOAD, REDUCE], {}, (2,), "straggler"),
        ([REDUCE, REDUCE, BARRIER, REDUCE], {}, (2,), "mismatch"),
        ([BACKWARD, BACKWARD, LOAD, BACKWARD], {}, (2,), "straggler"),
        ([BACKWARD, BACKWARD, LOAD, BACKWARD], {"spins": (0,)}, None, ""),
        ([BACKWARD, LOAD], {}, None, ""),
        ([REDUCE] * 4, {}, None, ""),
        ([evaluating(1)] * 4, {}, None, ""),
        ([None] * 4, {}, None, ""),
        ([], {}, None, ""),
    ],
)
@pytest.mark.parametrize("lease", [5.0, None])
def test_the_few_that_the_many_wait_for_are_guilty(stacks, doings, guilty, kind, lease):
    """Steady elsewhere in three looks while the many wait: named, whether a lease was learnt or not; else nobody is."""
    found = judge(history(stacks, (0, 1, 6, 16), **doings), lease=lease)
    assert (None if found is None else found.ranks) == guilty
    assert found is None or found.kind == kind


@pytest.mark.parametrize(
    ("doing", "lease", "silence", "named"),
    [
        ("", 5.0, 19.0, False), ("", 5.0, 21.0, True), ("", 15.0, 21.0, True), ("", 50.0, 24.0, False), ("", 50.0, 26.0, True),
        ("", None, 19.0, False), ("", None, 21.0, True),
        ("spins", 5.0, 19.0, False), ("spins", 5.0, 21.0, True), ("spins", 25.0, 24.0, False), ("spins", 25.0, 26.0, True),
        ("spins", None, 19.0, False), ("spins", None, 21.0, True),
        ("polls", None, 30.0, False), ("polls", 5.0, 119.0, False), ("polls", 5.0, 121.0, True),
        ("reads", None, 30.0, False), ("reads", 5.0, 121.0, True), ("loads", 5.0, 30.0, False), ("loads", None, 121.0, True),
        ("copies", 5.0, 30.0, False), ("copies", 5.0, 121.0, True), ("blocks", 5.0, 30.0, False), ("blocks", 5.0, 121.0, True),
    ],
)  # fmt: skip
def test_patience_depends_on_what_the_guilty_does(doing, lease, silence, named):
    """Asleep: four shortest leases or half a learnt one. Spinning: four or a whole one. Reading, polling, or with children at work: two minutes."""
    looked = history([REDUCE, REDUCE, LOAD, REDUCE], (0, 1, silence - 5.0), **({doing: (2,)} if doing else {}))
    assert (judge(looked, silence=silence, lease=lease) is not None) == named


def test_half_a_minute_is_enough_for_usual_steps():
    """Steps of 2.5 s teach a lease of 25 s: asleep is named after 20 s of silence, as with quick steps, spinning after 25."""
    silence = Silence(seconds=0.0, lease_seconds=25.0, floor_seconds=5.0)
    assert patience_seconds("asleep", silence) == 20.0
    assert patience_seconds("busy", silence) == 25.0


@pytest.mark.parametrize(
    ("stacks", "doings", "lease", "waits"),
    [
        ([REDUCE] * 2, {}, None, True),
        ([REDUCE] * 2, {"spins": (0, 1)}, 5.0, True),
        ([REDUCE] * 2, {"spins": (0, 1)}, None, None),
        ([LOAD] * 2, {}, None, False),
        ([LOAD], {}, 5.0, False),
        ([LOAD] * 2, {"spins": (0, 1)}, 5.0, False),
        ([LOAD] * 2, {"spins": (0, 1)}, 30.0, None),
        ([LOAD, REDUCE], {}, 5.0, None),
        ([None] * 2, {}, 5.0, None),
    ],
)
def test_where_a_whole_node_stands_is_told(stacks, doings, lease, waits):
    """All ranks in one place, as long as it takes to name one: waiting or not, for the master to compare with other nodes."""
    looked = history(stacks, (0, 1, 6, 15), **doings)
    found = find_standing(looked, silent(looked, silence=20.5, lease=lease))
    assert (None if found is None else found.waits) == waits


def test_two_looks_prove_nothing():
    """A third look, at a distance, is needed however long the silence."""
    assert judge(history([REDUCE, REDUCE, LOAD, REDUCE], (0, 20)), lease=5.0) is None
    assert judge(history([REDUCE, REDUCE, LOAD, REDUCE], (0, 1, 3)), silence=600.0, lease=5.0) is None


def test_who_moves_is_working():
    """A rank that is in another function at each look computes: what it did before it stood still does not count against it."""
    moving = [looks([REDUCE, REDUCE, evaluating(at), REDUCE], at=at) for at in (0.0, 1.0, 6.0, 20.0)]
    assert judge(moving, lease=5.0) is None
    stands = [*moving, *(looks([REDUCE, REDUCE, LOAD, REDUCE], at=at) for at in (21.0, 22.0, 27.0))]
    assert judge(stands, lease=5.0) is None
    assert judge([*stands, looks([REDUCE, REDUCE, LOAD, REDUCE], at=42.0)], lease=5.0).ranks == (2,)


def test_steps_that_nobody_tells_of_are_no_silence():
    """Where no lease is learnt and the many are scheduled too, they may step on between the looks: nobody is guilty of being busy."""
    stacks = [REDUCE, REDUCE, LOAD, REDUCE]
    assert judge(history(stacks, (0, 1, 60), spins=(0, 1, 2, 3)), silence=600.0) is None
    assert judge(history(stacks, (0, 1, 60), spins=(0, 1, 2, 3)), silence=600.0, lease=5.0).ranks == (2,)


def test_a_rank_that_is_gone_ends_the_comparison():
    """Looks at different ranks are not compared."""
    two = [looks([REDUCE, REDUCE, LOAD], at=0.0), *history([REDUCE, REDUCE, LOAD, REDUCE], (1, 2))]
    assert judge(two, lease=0.5, floor=0.1) is None


def test_the_launcher_is_no_collective():
    """`torch/distributed/run.py` is how the program was started, not where it waits."""
    assert waits(REDUCE)
    assert not waits(
        (
            LOAD[0],
            Frame("/v/torch/distributed/run.py", 1, "main"),
            Frame("/v/torch/distributed/launcher/api.py", 3, "__call__"),
        )
    )
    assert not waits(LOAD)
    assert not waits(None)


def test_places_are_said_in_a_sentence_each():
    """Who is where, the largest group first, with the place in the user's own file."""
    assert describe(group(looks([REDUCE, REDUCE, LOAD, None]))) == [
        "ranks 0,1 are waiting in all_reduce (distributed_c10d.py:3252), called from <module> (train.py:40)",
        "rank 2 is in load (data.py:5)",
        "rank 3 is where no stack can be read",
    ]


def test_a_stack_from_outside_reads_like_one_from_inside():
    """py-spy's threads in faulthandler's words, the main thread last; what is no dump gives nothing."""
    frame = '{"name": "load", "filename": "/x/data.py", "line": 5, "locals": null}'
    main = f'{{"thread_id": 255, "os_thread_id": 7, "frames": [{frame}], "active": true}}'
    other = '{"thread_id": 254, "os_thread_id": 8, "frames": []}'
    text = spy_text(f"[{main}, {other}]".encode(), 7)
    assert stack_of(text, 0) == stack_of(text, 255) == (Frame("/x/data.py", 5, "load"),)
    assert spy_text(b"Error: no such process", 7) is None
    assert spy_text(f"[{other}]".encode(), 7) is None


def feed(steps, text, at):
    steps.feed(text.encode(), at, 1000.0 + at)


@pytest.mark.parametrize("line", ["step {0} loss 1.0\n", "iteration {0}/700 | lm loss\n", "\r {0}/700 [00:10<00:20, 9.9it/s]", "{{'loss': 1.0, 'step': {0}}}\n"])  # fmt: skip
def test_steps_are_read_in_the_usual_words(line):
    """Each new number is a beat and ten times the slowest but one is the lease; the same number again is none."""
    steps = LogSteps(7, Leases(0.5))
    assert steps.reading() is None
    for number in range(1, 13):
        feed(steps, f"noise\n{line.format(number)}", number / 10)
    feed(steps, line.format(12), 9.0)
    reading = steps.reading()
    assert (reading.step, reading.beats, reading.phase, reading.monotonic) == (12, 12, "compute", 1.2)
    assert reading.lease_hint_seconds == pytest.approx(1.0)


def test_an_announced_phase_has_a_lease_of_its_own():
    """Evaluation is unlearnt when it is first announced, and the steps' lease is not stretched by it."""
    steps = LogSteps(7, Leases(0.5))
    for number in range(1, 13):
        feed(steps, f"step {number}\n", number / 10)
    feed(steps, "Evaluating on 1000 samples\n", 1.3)
    assert (steps.reading().phase, steps.reading().lease_hint_seconds) == ("evaluation", None)
    feed(steps, "step 13\n", 61.3)
    assert (steps.reading().phase, steps.reading().lease_hint_seconds) == ("compute", pytest.approx(1.0))
    feed(steps, "Saving checkpoint to /x\n", 61.4)
    assert steps.reading().phase == "save"
    quiet = LogSteps(7, Leases(0.5))
    feed(quiet, "Loading model checkpoint shards\n", 1.0)
    assert quiet.reading() is None


@pytest.fixture
async def ranks_of(tmp_path):
    def make(rank, exit_code=None, at=10.0, world=4):
        env = {"RANK": str(rank), "WORLD_SIZE": str(world)}
        spec = MemberSpec(member=f"rank-{rank}", role="command", rank=rank, argv=("x",), env=env)
        folder = tmp_path / spec.member
        folder.mkdir()
        if exit_code is not None:
            (folder / "exit.json").write_text(f'{{"incarnation":0,"exit_code":{exit_code},"signal":null,"at":{at}}}')
        return Member(folder, Ordered(spec=spec, incarnation=0, cookie="c", log_offset=0, stacks_offset=0))

    return make


async def test_who_left_early_is_accused_by_those_it_left(ranks_of):
    """Exit code 0 shortly before a peer lost it; who failed, left long ago, is no rank or is the dying one itself is not."""
    dying = ranks_of(0, exit_code=0, at=10.0)
    others = [dying, ranks_of(1, 1), ranks_of(2, 0), ranks_of(3), ranks_of(4, 0, at=-100.0), ranks_of(5, 0, world=1)]
    (found,) = left_early("n", dying, others, 12.0)
    assert (found.role, found.subject.rank, found.weight) == ("accusation", 2, 70)
    assert "2.0 s before rank-0" in found.evidence[0].text
