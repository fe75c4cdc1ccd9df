"""All nodes' logs judged from their pictures, as the master does it."""

import time

import pytest
from msgspec.structs import replace

from aimaster.brain.diagnose import diagnose
from aimaster.brain.overview import diagnose_all, read, with_pictures
from aimaster.brain.remedy import is_echo
from aimaster.brain.roots import WEAK, is_victim, of_echoes, of_exit
from aimaster.brain.state import Incident, Member, NodeView, State, View
from aimaster.catalogue import load
from aimaster.catalogue.findings import collect
from aimaster.catalogue.kept import join, keep, keep_steps
from aimaster.catalogue.scan import LogScan
from aimaster.wire import codec
from aimaster.wire.health import Evidence, Finding, Subject, Verdict
from aimaster.wire.messages import LogPicture, MemberExited, Pulse
from aimaster.wire.topology import JobPlan, MemberSpec
from tests.fakes.failure_cases import load_cases

NOW = time.time()
PLAN = JobPlan(run_id="0badcafe", name="job", kind="command", nodes=(), members={}, placement={})
LOST = "kernel: NVRM: GPU 0000:18:00.0: GPU has fallen off the bus.\n"


@pytest.fixture(scope="module")
def catalogue():
    return load()


def scan_of(catalogue, lines, *, node="node-0", file="a.log", base=0):
    scan = LogScan(catalogue, node=node, file=file)
    scan.bytes_read = base
    scan.feed("".join(f"{line}\n" for line in lines).encode())
    return scan


def view_of(logs):
    """A view of nodes from (node, picture)."""
    nodes = {}
    for node, picture in logs:
        known = nodes[node].logs if node in nodes else {}
        nodes[node] = NodeView(pulse=Pulse(at=NOW, members=()), at=NOW, logs=with_pictures(known, node, [picture]))
    return View(nodes=nodes)


def picture(scan):
    return LogPicture(file=scan.file, whole=codec.encode(keep(scan)))


def test_pictures_are_judged_as_their_logs_are(catalogue):
    """What is kept of each log, sent as bytes and put together, gives the verdict, the culprit and the evidence of the logs themselves."""
    for case in load_cases("failure_cases.jsonl") + load_cases("own_cases.jsonl"):
        logs = sorted(case["logs"], key=lambda log: (log["node"], log["file"]))
        scans = [scan_of(catalogue, log["lines"], node=log["node"], file=log["file"]) for log in logs]
        live = diagnose_all(State(plan=PLAN), view_of([(one.node, picture(one)) for one in scans]), catalogue.xids, NOW)
        for scan in scans:
            scan.file = f"{scan.node}/{scan.file}"
            scan.finish()
        whole = diagnose(collect(scans, catalogue.xids, now=NOW), NOW)
        assert (live.category, live.culprit, live.action) == (whole.category, whole.culprit, whole.action), case["id"]
        assert [one.text for one in live.evidence] == [one.text for one in whole.evidence]


def test_steps_replace_steps_and_a_picture_replaces_a_picture(catalogue):
    """How far a log has come is known without its words being sent again; a log that nobody has described is not known by its steps."""
    scan = scan_of(catalogue, ["step 1 loss 1.0", LOST.strip()])
    logs = with_pictures({}, "node-0", [picture(scan)])
    scan.feed(b"step 2 loss 1.0\nstep 3 loss 1.0\n")
    steps = LogPicture(file="a.log", steps=codec.encode(keep_steps(scan)))
    later = with_pictures(logs, "node-0", [steps])
    assert [hit.sign.id for hit in later["a.log"].hits] == [hit.sign.id for hit in logs["a.log"].hits]
    assert later["a.log"].steps_after(0) == 2
    assert with_pictures({}, "node-0", [steps]) == {}


def test_two_scans_of_one_log_are_one(catalogue):
    """A scan that began anew has the first one's words before its own, and their offsets are those of the file."""
    first = scan_of(catalogue, ["step 1", LOST.strip(), "step 2"])
    second = scan_of(
        catalogue, ["step 3", "kernel: EXT4-fs (md0): Remounting filesystem read-only"], base=first.bytes_read
    )
    both = join(keep(first), keep(second))
    whole = scan_of(
        catalogue,
        ["step 1", LOST.strip(), "step 2", "step 3", "kernel: EXT4-fs (md0): Remounting filesystem read-only"],
    )
    assert [(hit.sign.id, hit.offset) for hit in both.hits] == [(hit.sign.id, hit.offset) for hit in whole.hits]
    quiet = scan_of(catalogue, ["nothing"], base=first.bytes_read)
    assert join(keep(first), keep(quiet)).progress == keep(first).progress
    assert join(None, keep(first)) == keep(first)


def test_what_a_log_floods_is_bounded(catalogue):
    """A thousand different echoes and roots leave a picture of a bounded size, the first of each sign."""
    lines = [f"[rank{n}]:[E1118 20:32:23.955028747 ProcessGroupNCCL.cpp:632] [Rank {n}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={n}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600000 milliseconds before timing out." for n in range(2000)]  # fmt: skip
    scan = scan_of(catalogue, lines)
    assert len(scan.hits) > 400
    assert len(codec.encode(keep(scan))) < 64 << 10


def finding(file, node="node-0", category="gpu.lost"):
    proof = Evidence(node=node, file=file, time_seconds=NOW, text=LOST)
    return Finding(
        sign="s", category=category, role="self", severity="critical", weight=90, subject=Subject(node=node), node=node,
        time_seconds=NOW, evidence=(proof,),
    )  # fmt: skip


def test_what_the_machine_says_counts_beside_the_logs(catalogue):
    """A sensor's finding speaks of a node whose logs are silent; what stands in a log whose picture is here counts once."""
    silent = view_of([("node-1", picture(scan_of(catalogue, ["step 1"], node="node-1")))])
    told = State(plan=PLAN, findings=(finding("sensor:gpu"),))
    assert diagnose_all(told, silent, catalogue.xids, NOW).culprit.node == "node-0"
    again = State(plan=PLAN, findings=(finding("a.log", node="node-1"),))
    assert diagnose_all(again, silent, catalogue.xids, NOW).category == "benign"
    assert read(silent) == {"files": 1, "bytes": len("step 1\n"), "nodes": ["node-1"]}


def echoing(at=NOW):
    own = Verdict(category="process.killed", summary="a victim")
    return Incident(
        incident="i-1", subject="rank-0", kind="member", verdict=own, occurred_at=at, detected_at=at, settle_at=at + 2
    )


@pytest.mark.parametrize(
    ("category", "at", "taken"),
    [("gpu.lost", NOW - 600, True), ("gpu.lost", None, True), ("gpu.lost", NOW - 3600, False), ("hang.unknown", NOW, False), ("benign", NOW, False)],
)  # fmt: skip
def test_a_death_that_only_echoes_is_explained_by_all_logs(category, at, taken):
    """Where the dead name no cause, what all nodes' logs say of the time shortly before is the verdict; old or weak words are not."""
    whole = Verdict(category=category, time_seconds=at, summary="the logs")
    assert (of_echoes(echoing(), whole, NOW).summary == "the logs") == taken
    assert of_echoes(echoing(), None, NOW).summary == "a victim"


def death_of(case, catalogue):
    """The end of a member with exit code 1 whose log is the case's only one."""
    (log,) = case["logs"]
    scan = scan_of(catalogue, log["lines"], node=log["node"])
    scan.finish()
    found = collect([scan], catalogue.xids, now=NOW)
    at = max((one.time_seconds for one in found if one.time_seconds is not None), default=NOW)
    event = MemberExited(
        member="m", role="command", incarnation=0, process=None, exit_code=1, signal=None, at=at, expected=False,
        findings=tuple(one for one in found if one.kind in ("sign", "announcement")), log_tail=tuple(log["lines"][-50:]),
    )  # fmt: skip
    return event, diagnose(found, NOW)


def test_a_death_is_judged_as_its_log_is(catalogue):
    """The end of a member with this log, or what it settles to where it only echoes, has the category and the action of the log itself."""
    spec = MemberSpec(member="m", role="command", argv=("true",))
    member = Member(member="m", role="command", node="node-0")
    state = State(plan=replace(PLAN, members={"m": spec}))
    judged = 0
    for case in load_cases("failure_cases.jsonl") + load_cases("own_cases.jsonl"):
        if len(case["logs"]) != 1:
            continue
        event, whole = death_of(case, catalogue)
        if whole.action == "ignore":
            continue
        verdict = of_exit(state, member, event)
        roles = [one.role for one in event.findings if one.kind == "sign"]
        if is_echo(roles=roles, is_victim=is_victim(verdict, event), was_killed=False):
            incident = replace(echoing(event.at), verdict=verdict, findings=event.findings)
            verdict = of_echoes(incident, whole, event.at)
        weak = whole.category in WEAK and verdict.category in WEAK
        assert weak or (verdict.category, verdict.action) == (whole.category, whole.action), case["id"]
        judged += 1
    assert judged > 40
