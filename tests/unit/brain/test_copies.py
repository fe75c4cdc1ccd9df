"""Where snapshots lie, as `aimaster checkpoints` shows it, and what it warns of."""

import json

import msgspec
import pytest

from aimaster.brain.copies import overview
from aimaster.cli.checkpoints import rows
from aimaster.wire.checkpoint import SnapshotPlace, Version
from aimaster.wire.status import JobStatus, NodeStatus

RACKS = {"a": {"rack": "r1", "switch": "s1"}, "b": {"rack": "r1", "switch": "s2"}, "c": {"rack": "r2"}}


def place(step, where, *, member="policy-0", lineage=0, rank=0, ranks=1, proven=None, damaged=False):
    """`where` is a node, `node+` for a copy held for another node, or `storage`."""
    tier = "storage" if where == "storage" else "peer" if where.endswith("+") else "shm"
    return SnapshotPlace(
        member=member, role="policy", rank=rank, ranks=ranks, version=Version(lineage, step), chain="c" * 32,
        state_digest="d", tier=tier, node=None if tier == "storage" else where.rstrip("+"), name="x", size_bytes=1024,
        verified_at=proven, damaged=damaged,
    )  # fmt: skip


def look(*places, labels=RACKS):
    nodes = tuple(NodeStatus(node=name, state="connected", labels=of) for name, of in labels.items())
    return overview(
        JobStatus(run_id="0", name="j", kind="rl", state="running", started_at=0, now=100.0, term=1, nodes=nodes,
                  snapshots=places)
    )  # fmt: skip


def test_each_member_and_step_says_who_holds_it_whole_proven_when_and_what_is_missing():
    found = look(
        place(8, "a", rank=0, ranks=2),
        place(8, "a", rank=1, ranks=2, proven=40.0),
        place(8, "c+", rank=1, ranks=2, proven=90.0),
        place(7, "c+", rank=0, ranks=2, proven=70.0),
        place(7, "c+", rank=1, ranks=2, proven=60.0),
        place(9, "a", member="policy-1"),
    )
    assert [(one.member, one.version.step, one.whole, one.missing) for one in found.snapshots] == [
        ("policy-1", 9, True, ()),
        ("policy-0", 8, True, ()),
        ("policy-0", 7, True, ()),
    ]
    at_8 = [
        (one.tier, one.node, one.domain, one.ranks, one.missing, one.verified_at) for one in found.snapshots[1].holdings
    ]
    assert at_8 == [
        ("shm", "a", "rack=r1,switch=s1", (0, 1), (), None),
        ("peer", "c", "rack=r2", (1,), (0,), 90.0),
    ]
    assert found.snapshots[2].holdings[0].verified_at == 60.0, "the rank that was proven longest ago"
    shown = rows(found.snapshots, 100.0)[1]
    assert shown[5:] == ("a (rack=r1,switch=s1)", "c (rack=r2) without rank 0 proven 10 s ago", "", "yes")
    document = json.loads(msgspec.json.encode(found))
    assert document["snapshots"][1]["holdings"][1]["missing"] == [0]


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ((place(5, "a"), place(5, "c+")), None),
        ((place(5, "a"), place(5, "storage")), None),
        ((place(5, "a"),), "the only whole copy of step 5 of policy-0 lies on a (rack=r1,switch=s1)"),
        ((place(5, "a"), place(5, "b+")), "all copies of step 5 of policy-0 lie in rack r1 (a, b)"),
        ((place(5, "a"),), "without it, nothing of this member is left"),
        ((place(5, "a"), place(3, "storage")), None),  # on its way
        ((place(5, "a"), place(4, "c+")), None),
        ((place(9, "a"), place(3, "storage")), "the newest copy elsewhere, step 3 on storage, lags 6 steps"),
        ((place(9, "a"), place(3, "c+"), place(2, "storage")), "step 3 on c, lags 6 steps"),
        ((place(9, "a"), place(9, "b+"), place(2, "storage")), ("all copies of step 9 of policy-0 lie in rack r1 (a, b); "
         "the newest copy elsewhere, step 2 on storage, lags 7 steps")),
        ((place(3, "a", lineage=1), place(4, "c+")), "step 4 on c, is of a lineage that is past"),
        ((place(5, "a"), place(5, "c+", rank=0), place(5, "a", rank=1)), None),
        ((place(5, "a", ranks=2), place(5, "c+", rank=0, ranks=2)), "step 5 of policy-0 is not whole: rank 1 lies nowhere"),
        ((place(5, "a", ranks=2),), "no node and no storage holds a whole snapshot of policy-0"),
    ],
)  # fmt: skip
def test_a_newest_step_that_one_failure_takes_away_is_warned_of(places, said):
    warned = "; ".join(look(*places).warnings)
    assert warned == "" if said is None else said in warned


def test_racks_are_no_worry_where_all_nodes_share_one():
    """Two nodes of the only rack there is: nothing better can be had."""
    one_rack = {"a": {"rack": "r1"}, "b": {"rack": "r1"}}
    assert look(place(5, "a"), place(5, "b+"), labels=one_rack).warnings == ()
    assert look(place(5, "a"), place(5, "b+"), labels={"a": {}, "b": {}}).warnings == ()


def test_a_damaged_place_is_shown_and_counts_for_nothing():
    found = look(
        place(8, "a", damaged=True, proven=10.0),
        place(8, "c+", rank=0, proven=90.0),
        place(7, "a", rank=0, ranks=2),
        place(7, "a", rank=1, ranks=2, damaged=True),
    )
    newest, older = found.snapshots
    assert (newest.whole, [one.node for one in newest.safe_places]) == (True, ["c"])
    assert (older.whole, older.missing) == (False, (1,))
    shown = rows(found.snapshots, 100.0)
    assert shown[0][5:] == ("a (rack=r1,switch=s1) DAMAGED rank 0", "c (rack=r2) proven 10 s ago", "", "yes")
    assert shown[1][5:] == ("a (rack=r1,switch=s1) DAMAGED rank 1", "", "", "lacks rank 1")
    assert [warning for warning in found.warnings if "damaged" in warning] == [
        "rank 0 of step 8 of policy-0 is damaged on a: nobody uses it; if it comes again, test that node's memory",
        "rank 1 of step 7 of policy-0 is damaged on a: nobody uses it; if it comes again, test that node's memory",
    ]
    assert any("the only whole copy of step 8 of policy-0 lies on c" in warning for warning in found.warnings)
