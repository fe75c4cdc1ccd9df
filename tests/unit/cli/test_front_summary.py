"""The summary: what it counts, and how it is shown."""

import io
import json
from pathlib import Path

import pytest

from aimaster.cli.front_display import decided_sentence, resumed_sentence
from aimaster.cli.front_folder import RunInfo
from aimaster.cli.front_report import print_summary
from aimaster.cli.front_summary import ChildEnd, Rewards, Summary, failure_of, seconds_lost, summarize
from aimaster.wire.health import Evidence, Subject, Verdict
from aimaster.wire.ids import MemberId, NodeId, RunId
from aimaster.wire.status import IncidentStatus, JobStatus, MemberStatus

INFO = RunInfo(run_id=RunId("0a"), name="train", kind="command", source=("x",), created_at=0.0, starts=2)
VERDICT = Verdict(
    category="app.exception",
    culprit=Subject(rank=1, node="node-0"),
    fault_of="user_code",
    action="stop_job",
    summary="ValueError: no",
    advice="Mend the program; the traceback says where.",
    traceback="Traceback (most recent call last):\n  ...\nValueError: no",
)


def incident(
    name="i-1", subject="policy-1", start=0.0, end: float | None = 1.0, action="restart_process", verdict=VERDICT
):
    return IncidentStatus(
        incident=name,
        subject=subject,
        verdict=verdict,
        action=action,
        occurred_at=start,
        detected_at=start + 0.01,
        decided_at=start + 0.02,
        resumed_at=end,
    )


def picture(*incidents: IncidentStatus, kind="rl") -> JobStatus:
    members = tuple(
        MemberStatus(member=MemberId(name), role=name[:-2], node=NodeId("node-0"), state="running", incarnation=0)
        for name in ("controller-0", "policy-0", "policy-1", "rollout-0", "rank-1")
    )
    return JobStatus(
        run_id="0a",
        name="train",
        kind=kind,
        state="failed",
        started_at=0.0,
        now=9.0,
        term=1,
        step=7,
        steps=9,
        members=members,
        incidents=incidents,
    )


def summary(*incidents: IncidentStatus, outcome="failed", kind="command") -> Summary:
    return summarize(
        INFO,
        Path("runs/train"),
        outcome,
        "because",
        picture(*incidents, kind=kind),
        seconds=12.34,
        rewards=(0.1, 0.9),
        children={MemberId("rank-1"): ChildEnd(exit_code=1)},
    )


@pytest.mark.parametrize(
    ("incidents", "lost"),
    [
        ([], 0.0),
        ([incident(start=1.0, end=3.0)], 2.0),
        ([incident(start=1.0, end=3.0), incident(start=2.0, end=4.0)], 3.0),
        ([incident(start=1.0, end=9.0), incident(start=2.0, end=4.0)], 8.0),
        ([incident(start=1.0, end=2.0), incident(start=5.0, end=6.0)], 2.0),
        ([incident(start=1.0, end=None)], 0.0),
        ([incident(subject="rollout-0", start=1.0, end=5.0)], 0.0),
    ],
)
def test_seconds_lost_count_overlapping_incidents_once_and_rollouts_not(incidents, lost):
    """Training waits for policy, controller and nodes, not for a rollout member; two troubles at once cost their union."""
    assert seconds_lost(incidents, picture(*incidents)) == pytest.approx(lost)


def test_the_failure_is_the_incident_that_was_answered_by_stopping():
    """Of several incidents, the one that stopped the job explains its end, with rank, node and traceback."""
    earlier = incident("i-1", end=None, verdict=Verdict(category="process.killed"))
    found = failure_of([earlier, incident("i-2", "rank-1", action="stop_job", end=None)], picture())
    assert found is not None
    assert (found.category, found.member, found.rank, found.node) == ("app.exception", "rank-1", 1, "node-0")
    assert found.traceback.endswith("ValueError: no")
    assert failure_of([incident(end=2.0)], picture()) is None


def test_the_table_shows_verdict_culprit_traceback_and_the_child_s_own_code():
    """A person sees why the job failed, who failed, what the child itself answered, and where the run folder is."""
    out = io.StringIO()
    print_summary(summary(incident("i-1", "rank-1", action="stop_job", end=None)), as_json=False, stream=out)
    text = out.getvalue()
    assert text.startswith("Traceback (most recent call last):")
    for words in (
        "app.exception",
        "rank-1 on node-0, rank 1",
        "exit code 1",
        "Mend the program",
        "runs/train",
        "i-1",
    ):
        assert words in text
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_the_document_is_one_line_of_json_and_reads_back():
    """`--json` prints exactly one document, from which the record can be read."""
    import msgspec

    out = io.StringIO()
    made = summary(incident(end=3.0), outcome="finished", kind="rl")
    print_summary(made, as_json=True, stream=out)
    document = json.loads(out.getvalue())
    assert document["exit_code"] == 0
    assert document["incidents"][0]["recovered_after_seconds"] == 3.0
    assert msgspec.json.decode(out.getvalue(), type=Summary) == made


@pytest.mark.parametrize(
    ("figures", "ends"),
    [
        ([], (None, None)),
        ([{"reward_mean": 0.2}, {}, {"reward_mean": 0.8}], (0.2, 0.8)),
        ([{"reward_mean": 0.2, "eval_before": 0.1}, {"reward_mean": 0.8, "eval_after": 0.9}], (0.1, 0.9)),
    ],
)
def test_rewards_before_and_after(figures, ends):
    """Held-out rewards win where the controller gives them; else the first and newest training reward stand for them."""
    rewards = Rewards()
    for seen in figures:
        rewards.see(seen)
    assert rewards.ends() == ends


def test_the_reward_before_is_that_of_the_first_start():
    """A resumed run keeps the held-out reward that its first start saw, whatever a restored member says."""
    rewards = Rewards(before=0.1)
    rewards.see({"eval_before": 0.7, "eval_after": 0.9})
    assert rewards.ends() == (0.1, 0.9)


def test_an_incident_is_told_in_two_sentences():
    """What died and of what and what is done; then how long it took and what was lost."""
    told = incident(start=10.0, end=12.5)
    assert decided_sentence(told) == "incident i-1: policy-1 (rank 1) app.exception: ValueError: no -> restart_process"
    assert resumed_sentence(told, "rl") == "incident i-1: going on 2.50 s after it; lost: nothing"
    assert resumed_sentence(told, "command") == "incident i-1: runs again 2.50 s after it"


def test_a_traceback_that_was_passed_on_is_not_printed_again():
    """A wrapped command has shown it itself; what it meant is told all the same."""
    out = io.StringIO()
    made = summary(incident("i-1", "rank-1", action="stop_job", end=None))
    print_summary(made, as_json=False, stream=out, with_traceback=False)
    assert "Traceback" not in out.getvalue()
    assert "app.exception" in out.getvalue()


def test_an_unexplained_end_shows_its_candidate_lines_or_does_not_speak_of_them():
    """Advice to look at lines comes with the lines."""
    advice = "No sign explains this; look at the candidate lines."
    bare = Verdict(category="unknown", advice=advice)
    told = Verdict(category="unknown", advice=advice, candidates=(Evidence(text="odd words"),))
    for verdict, shown, absent in ((bare, "aimaster logs", "candidate"), (told, "odd words", "aimaster logs")):
        out = io.StringIO()
        print_summary(summary(incident("i-1", action="stop_job", end=None, verdict=verdict)), as_json=False, stream=out)
        assert shown in out.getvalue()
        assert absent not in out.getvalue()
