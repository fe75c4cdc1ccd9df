"""Flight recorder dumps: read without pickle, compared without mercy for the one who never came."""

import contextlib
import json
import pickle
import subprocess
import sys

import pytest

from aimaster.catalogue import load
from aimaster.catalogue.flight import compare, may_be_dump, read_dump
from aimaster.catalogue.plain_pickle import NotPlainError, read_plain_pickle
from aimaster.cli.diagnose import examine


def entry(sequence, operation="all_reduce", *, group="0", done=True, sizes=((4,),), at=1_772_000_000):
    return {
        "record_id": sequence,
        "pg_id": int(group),
        "process_group": (group, "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": f"nccl:{operation}",
        "time_created_ns": int((at + sequence) * 1e9),
        "input_sizes": [list(size) for size in sizes],
        "state": "completed" if done else "started",
        "frames": [{"name": "step", "filename": "train.py", "line": 7}],
        "is_p2p": False,
    }


def document(entries, *, groups=None):
    groups = groups or {"0": range(4)}
    config = {name: {"name": name, "desc": "x", "ranks": str(list(ranks))} for name, ranks in groups.items()}
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}


def dump(rank, entries, *, node=None, groups=None):
    data = pickle.dumps(document(entries, groups=groups), protocol=2)
    found = read_dump(data, file=f"nccl_trace_rank_{rank}", node=node or f"n{rank // 2}")
    assert found is not None
    return found


def blamed(findings):
    return {(one.category, one.subject.node, one.subject.rank) for one in findings}


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_are_read_as_pickle_would(protocol):
    """Every protocol's plain values come out equal, shared ones included."""
    shared = ["a", 1]
    value = {
        "x": [1, -1, 2**40, 1.5, None, True, False, "é\n", (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ()],
        "y": [shared, shared],
        "z": {},
    }
    assert read_plain_pickle(pickle.dumps(value, protocol)) == value


class Evil:
    def __reduce__(self):
        return (print, ("called",))


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_in_a_pickle_is_called(protocol, capsys):
    """A pickle that would call something is refused before anything happens."""
    for value in (Evil(), {"entries": [Evil()]}, {1, 2}, complex(1, 2)):
        with pytest.raises(NotPlainError):
            read_plain_pickle(pickle.dumps(value, protocol))
    assert capsys.readouterr().out == ""


def test_damaged_pickles_are_refused():
    """Cut at any byte, or with any byte turned, the reading ends in a value or in NotPlainError, never otherwise."""
    whole = pickle.dumps(document([entry(1), entry(2)]), 2)
    for at in range(len(whole)):
        for broken in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]):
            with contextlib.suppress(NotPlainError):
                read_plain_pickle(broken)


def test_a_small_dump_cannot_grow_large():
    """Lists that hold one another a hundred levels deep are two kilobytes, and stay so."""
    bomb = [1]
    for _ in range(100):
        bomb = [bomb, bomb]
    strange = {**entry(1), "input_sizes": bomb, "profiling_name": bomb, "process_group": bomb}
    config = {"0": {"ranks": bomb}}
    data = pickle.dumps({"version": "2.10", "entries": [strange], "pg_config": config}, 2)
    assert read_dump(data, file="trace_0", node=None) is not None


def test_the_rank_that_never_came_is_named():
    """Three ranks wait at number 7; the fourth stopped at 6."""
    ahead = [entry(n) for n in range(1, 7)] + [entry(7, done=False)]
    dumps = [dump(rank, ahead) for rank in (0, 1, 3)] + [dump(2, ahead[:6])]
    assert blamed(compare(dumps)) == {("hang.straggler", "n1", 2)}


def test_a_rank_without_a_dump_is_missing_too():
    """The one rank of the group that left no dump while the others wait."""
    waiting = [entry(1), entry(2, done=False)]
    assert blamed(compare([dump(rank, waiting) for rank in (0, 1, 2)])) == {("hang.straggler", None, 3)}


def test_ranks_that_wait_in_another_group_are_held_up_themselves():
    """Rank 1 misses the large group because it waits in the small one, for rank 3."""
    groups = {"0": range(4), "1": (1, 3)}
    big = [entry(1), entry(2, done=False)]
    dumps = [
        dump(0, big, groups=groups),
        dump(2, big, groups=groups),
        dump(1, [entry(1), entry(5, group="1", done=False)], groups=groups),
        dump(3, [entry(1)], groups=groups),
    ]
    assert blamed(compare(dumps)) == {("hang.straggler", "n1", 3)}


def test_other_operations_under_one_number_blame_nobody():
    """The program diverged: all_gather here, all_reduce there."""
    one, two = [entry(1), entry(2, done=False)], [entry(1), entry(2, "all_gather", done=False)]
    found = compare([dump(0, one), dump(1, one), dump(2, two), dump(3, one)])
    assert blamed(found) == {("app.collective_mismatch", None, None)}
    assert "all_gather" in " ".join(one.details["why"] for one in found)


def test_agreeing_dumps_say_nothing():
    """All at one number, all done: no statement."""
    assert compare([dump(rank, [entry(1), entry(2)]) for rank in range(4)]) == []


def test_dumps_in_a_folder_name_the_rank(tmp_path):
    """`aimaster diagnose` reads the dumps that lie beside the logs, and names rank and node."""
    ahead = [entry(n) for n in range(1, 7)] + [entry(7, done=False)]
    for rank in range(4):
        folder = tmp_path / f"node-{rank // 2}"
        folder.mkdir(exist_ok=True)
        entries = ahead[:6] if rank == 2 else ahead
        data = json.dumps(document(entries)).encode() if rank % 2 else pickle.dumps(document(entries), 2)
        (folder / f"comm_lib_trace_rank_{rank}").write_bytes(data)
    verdict = examine((str(tmp_path),), load(), now=1_772_000_900.0).verdict
    assert (verdict.category, verdict.culprit.node, verdict.culprit.rank) == ("hang.straggler", "node-1", 2)
    assert "never enqueued" in verdict.evidence[0].text


def test_a_stranger_that_looks_like_a_dump_is_read_as_a_log(tmp_path):
    """A JSON log that begins with the same words is scanned for signs as any other."""
    log = tmp_path / "events.json"
    log.write_text(
        '{"entries": 1}\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.27 GiB. GPU 5\n'
    )
    assert may_be_dump(log.read_bytes())
    assert examine((str(log),), load(), now=1_772_000_900.0).verdict.category == "app.cuda_oom"


def test_the_recorder_of_this_torch_is_understood(tmp_path):
    """What torch itself writes, pickled and as JSON, is read to the same calls."""
    program = (
        "import sys, torch, torch.distributed as dist, torch._C._distributed_c10d as c10d\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "for _ in range(3): dist.all_reduce(torch.ones(4))\n"
        "open(sys.argv[1] + '_0', 'wb').write(c10d._dump_fr_trace())\n"
        "open(sys.argv[1] + '_json_0', 'wb').write(c10d._dump_fr_trace_json())\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "trace")],
        check=True,
        timeout=100,
        env={"TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"},
    )
    one, two = (read_dump((tmp_path / name).read_bytes(), file=name, node="n") for name in ("trace_0", "trace_json_0"))
    assert one is not None
    assert two is not None
    assert [call.operation for call in one.calls["0"]] == ["all_reduce"] * 3
    assert one.calls == two.calls
