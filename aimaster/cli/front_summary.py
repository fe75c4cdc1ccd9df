"""What a run amounted to, as one record: printed as a table, kept as RUN/summary.json, and the answer of `--json`.

Made purely from the last picture of the run, the rewards seen on the way and the members' exit files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from aimaster.cli.front_folder import RunInfo
from aimaster.wire.health import Verdict
from aimaster.wire.ids import MemberId
from aimaster.wire.status import IncidentStatus, JobStatus

Outcome = Literal["finished", "failed", "stopped"]
EXIT_OF_OUTCOME: dict[Outcome, int] = {"finished": 0, "failed": 1, "stopped": 130}


CANDIDATES: Final = 5
UNKNOWN_ADVICE: Final = "Its output holds no line that tells more; see it whole with `aimaster logs`."


class IncidentLine(msgspec.Struct, frozen=True, kw_only=True):
    """One incident as the summary tells it."""

    incident: str
    what: str
    """What died or hung, and of what: `policy-1 process.killed`."""
    action: str
    detected_after_seconds: float
    recovered_after_seconds: float | None
    """Until the next committed step (or first sign of life); None when it did not recover."""
    lost: str
    drill: bool


class ChildEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a wrapped process ended, from its exit.json."""

    exit_code: int | None = None
    signal: int | None = None


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why the job failed."""

    category: str
    member: str
    rank: int | None
    node: str | None
    sentence: str
    advice: str
    traceback: str
    candidates: tuple[str, ...] = ()
    """Lines of its output that may tell more, where no sign explains it."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run."""

    outcome: Outcome
    exit_code: int
    reason: str
    run_dir: str
    run_id: str
    name: str
    kind: str
    seconds: float
    """Of this start; an interrupted run has earlier ones."""
    starts: int
    steps: int
    steps_planned: int | None
    reward_before: float | None
    reward_after: float | None
    incidents: tuple[IncidentLine, ...]
    seconds_lost: float
    """Time in which some incident of a controller, policy member, command or node kept the next step from coming; overlaps count once."""
    failure: Failure | None
    children: dict[MemberId, ChildEnd]
    """Wrapped commands only."""
    drills_not_reached: tuple[str, ...]
    status: JobStatus | None
    """The last picture of the run; None when the master never answered."""


def summarize(
    info: RunInfo,
    run: Path,
    outcome: Outcome,
    reason: str,
    status: JobStatus | None,
    *,
    seconds: float,
    rewards: tuple[float | None, float | None],
    children: Mapping[MemberId, ChildEnd],
    drills_not_reached: Sequence[str] = (),
) -> Summary:
    """Put the parts together."""
    incidents = status.incidents if status is not None else ()
    return Summary(
        outcome=outcome,
        exit_code=EXIT_OF_OUTCOME[outcome],
        reason=reason,
        run_dir=str(run),
        run_id=info.run_id,
        name=info.name,
        kind=info.kind,
        seconds=round(seconds, 1),
        starts=info.starts,
        steps=status.step if status is not None else 0,
        steps_planned=status.steps if status is not None else None,
        reward_before=rewards[0],
        reward_after=rewards[1],
        incidents=tuple(incident_line(incident) for incident in incidents),
        seconds_lost=round(seconds_lost(incidents, status), 1),
        failure=failure_of(incidents, status) if outcome == "failed" else None,
        children=dict(children),
        drills_not_reached=tuple(drills_not_reached),
        status=status,
    )


def what(incident: IncidentStatus) -> str:
    """Whom it struck and what it was: `node-1 node.lost (with it policy-1, rollout-1)`."""
    others = dict.fromkeys(name for name in incident.deaths if name != incident.subject)
    return f"{incident.subject} {incident.verdict.category}" + (f" (with it {', '.join(others)})" if others else "")


def incident_line(incident: IncidentStatus) -> IncidentLine:
    resumed = incident.resumed_at
    return IncidentLine(
        incident=incident.incident,
        what=what(incident),
        action=incident.action,
        detected_after_seconds=round(max(0.0, incident.detected_at - incident.occurred_at), 3),
        recovered_after_seconds=None if resumed is None else round(max(0.0, resumed - incident.occurred_at), 3),
        lost=incident.lost,
        drill=incident.drill,
    )


def seconds_lost(incidents: Sequence[IncidentStatus], status: JobStatus | None) -> float:
    """Length of the union of the incidents' times, those of rollout members left out: training goes on without one."""
    roles = {member.member: member.role for member in status.members} if status is not None else {}
    spans = sorted(
        (incident.occurred_at, incident.resumed_at)
        for incident in incidents
        if incident.resumed_at is not None and roles.get(MemberId(incident.subject)) != "rollout"
    )
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def failure_of(incidents: Sequence[IncidentStatus], status: JobStatus | None) -> Failure | None:
    """The incident that ended the job: the last one that was answered by stopping, else the last one not recovered."""
    ended = [incident for incident in incidents if incident.action == "stop_job"]
    ended = ended or [incident for incident in incidents if incident.resumed_at is None]
    if not ended:
        return None
    incident = ended[-1]
    verdict: Verdict = incident.verdict
    nodes = {member.member: member.node for member in status.members} if status is not None else {}
    return Failure(
        category=verdict.category,
        member=incident.subject,
        rank=verdict.culprit.rank,
        node=verdict.culprit.node or nodes.get(MemberId(incident.subject)),
        sentence=verdict.summary,
        advice=verdict.advice if verdict.candidates or verdict.category != "unknown" else UNKNOWN_ADVICE,
        traceback=verdict.traceback,
        candidates=tuple(line.text for line in verdict.candidates[:CANDIDATES]),
    )


class Rewards:
    """Mean reward at the beginning and now, from the figures seen on the way.

    `eval_before` and `eval_after` (held-out prompts) win; without them, the first and the newest training reward that
    was shown. What an earlier start of the run saw before is handed in.
    """

    def __init__(self, before: float | None = None) -> None:
        self.before = before
        """On held-out prompts."""
        self._first: float | None = None
        self._last: float | None = None
        self._after: float | None = None

    def see(self, figures: Mapping[str, float]) -> None:
        if self.before is None:
            self.before = figures.get("eval_before")
        self._after = figures.get("eval_after", self._after)
        reward = figures.get("reward_mean")
        if reward is not None:
            self._first = reward if self._first is None else self._first
            self._last = reward

    def ends(self) -> tuple[float | None, float | None]:
        return (
            self._first if self.before is None else self.before,
            self._last if self._after is None else self._after,
        )
