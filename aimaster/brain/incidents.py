"""Deaths become incidents: each death belongs to exactly one, and what followed from a root death joins the root's.

open -> (settle: an echo of somebody else's death waits for that death) -> decide -> resumed, healed
"""

from typing import Final

from aimaster.brain import members, roots
from aimaster.brain.draft import Draft
from aimaster.brain.events import IncidentMoved
from aimaster.brain.state import LIVE, Incident, Member, SubjectKind
from aimaster.wire.health import Finding, Verdict
from aimaster.wire.ids import IncidentId, MemberId

SETTLE_SECONDS: Final = 2.0
"""How long a death that only speaks of another's waits for that other's."""
FOLLOW_SECONDS: Final = 5.0
"""Deaths this soon after a root death in the same scope belong to it."""
MAX_INCIDENTS: Final = 500
"""Closed ones beyond this are forgotten, oldest first."""


COMMANDS_OWN: Final = "unknown: the command's own progress since its last checkpoint"
"""A wrapped command starts where it itself left off; nobody here knows where that is."""


def open_incident(
    d: Draft, kind: SubjectKind, subject: str, verdict: Verdict, occurred_at: float, who: tuple[MemberId, ...]
) -> Incident:
    """Open an incident; drills announced for its subject or for members that it takes along are used up."""
    drill = claim_drills(d, subject, *who)
    name = IncidentId(f"i-{d.state.next_incident}")
    restarts_a_command = d.state.plan.kind == "command" and kind in ("member", "node")
    incident = Incident(
        incident=name,
        subject=subject,
        kind=kind,
        verdict=verdict,
        occurred_at=min(occurred_at, d.now),
        detected_at=d.now,
        drill=drill,
        members=who,
        lost=COMMANDS_OWN if restarts_a_command else "nothing",
    )
    kept = dict(d.state.incidents)
    closed = [key for key, old in kept.items() if old.resumed_at is not None and old.healed_at is not None]
    for key in closed[: max(0, len(kept) + 1 - MAX_INCIDENTS)]:
        del kept[key]
    d.change(incidents=kept | {name: incident}, next_incident=d.state.next_incident + 1)
    return incident


def claim_drills(d: Draft, *subjects: str) -> bool:
    """Whether a drill was announced for one of these; those announced are used up."""
    left = {subject: note for subject, note in d.state.drills.items() if subject not in subjects}
    found = len(left) < len(d.state.drills)
    if found:
        d.change(drills=left)
    return found


def noted(d: Draft, member: Member, verdict: Verdict, occurred_at: float) -> Incident:
    """A death that needs nothing any more: the job is at its end. It is told, and over at once."""
    incident = open_incident(d, "member", member.member, verdict, occurred_at, (member.member,))
    return d.incident(
        incident.incident,
        action="ignore",
        deaths=((member.member, member.incarnation),),
        decided_at=d.now,
        resumed_at=d.now,
        healed_at=d.now,
        lost="nothing",
    )


def death(
    d: Draft,
    name: MemberId,
    verdict: Verdict,
    occurred_at: float,
    *,
    findings: tuple[Finding, ...] = (),
    exit_code: int | None = None,
    echo: bool = False,
) -> None:
    """A member died unasked: note it, find the incident it belongs to, and decide when there is nothing to wait for."""
    member = members.bury(d, name, exit_code)
    death_id = (name, member.incarnation)
    condemned = d.state.incidents.get(member.condemned_in) if member.condemned_in else None
    root = condemned or _root_of(d, member, occurred_at, echo=echo)
    if root is None:
        incident = open_incident(d, "member", name, verdict, occurred_at, (name,))
        alone = not any(other.state in LIVE for other in d.state.members.values())
        settle_at = d.now + (0.0 if alone else SETTLE_SECONDS) if echo else None
        d.incident(incident.incident, deaths=(death_id,), findings=findings, settle_at=settle_at)
        if not echo:
            decide(d, incident.incident)
        elif alone:
            settled(d, incident.incident)
        return
    joined = d.incident(
        root.incident,
        deaths=(*root.deaths, death_id),
        members=root.members if name in root.members else (*root.members, name),
        findings=(*root.findings, *findings)[-100:],
        drill=claim_drills(d, name) or root.drill,
        # It goes on, or is over, when that holds of this member too.
        resumed_at=None,
        healed_at=None,
    )
    if joined.settle_at is not None and not echo:
        # The death that explains the echoes came after them.
        d.incident(
            joined.incident,
            subject=name,
            verdict=verdict,
            occurred_at=min(occurred_at, joined.occurred_at),
        )
        decide(d, joined.incident)
    elif joined.settle_at is None:
        decide(d, joined.incident)


def decide(d: Draft, name: IncidentId) -> None:
    """Choose and begin the remedy for every death of the incident that has none yet."""
    incident = d.incident(name, settle_at=None, decided_at=d.state.incidents[name].decided_at or d.now)
    action = members.cure(d, incident)
    root_only = len(incident.deaths) == 1
    if action and (root_only or not incident.action):
        d.incident(name, action=action)


def settled(d: Draft, name: IncidentId, whole: Verdict | None = None) -> None:
    """No other death explained the echo: what the logs of all nodes say may (`whole`), else it is the root itself, as far as anybody can tell."""
    incident = d.state.incidents.get(name)
    if incident is not None and incident.settle_at is not None:
        d.incident(name, verdict=roots.of_echoes(incident, whole, d.now))
        decide(d, name)


def moved(d: Draft, event: IncidentMoved) -> None:
    """Note that the job went on or the members are back; the first word on each counts, and none comes before the one before."""
    incident = d.state.incidents.get(event.incident)
    if incident is None or incident.decided_at is None:
        return
    resumed_at, healed_at = incident.resumed_at, incident.healed_at
    if resumed_at is None and event.resumed_at is not None:
        resumed_at = max(event.resumed_at, incident.decided_at)
    if healed_at is None and event.healed_at is not None and resumed_at is not None:
        healed_at = max(event.healed_at, resumed_at)
    d.incident(event.incident, resumed_at=resumed_at, healed_at=healed_at, lost=event.lost or incident.lost)
    for member in d.state.members.values():
        if healed_at is not None and member.unheard_in == event.incident:
            d.member(member.member, unheard_in=None)


def ended_well(d: Draft, member: Member) -> None:
    """A process of a wrapped command ended well: it had gone on, even where no pulse showed it between its start and its end."""
    for incident in list(d.state.incidents.values()):
        if incident.healed_at is None and member.member in incident.members:
            states = {d.state.members[name].state for name in incident.members if name in d.state.members}
            healed_at = d.now if states == {"finished"} else None
            moved(d, IncidentMoved(incident=incident.incident, resumed_at=d.now, healed_at=healed_at))


def _root_of(d: Draft, member: Member, occurred_at: float, *, echo: bool) -> Incident | None:
    """The recent incident that this death belongs to; None when it stands alone."""
    regroup = d.state.regroup
    if regroup is not None and regroup.incident in d.state.incidents:
        return d.state.incidents[regroup.incident]
    for incident in reversed(d.state.incidents.values()):
        if incident.kind != "member" or abs(occurred_at - incident.occurred_at) > FOLLOW_SECONDS:
            continue
        if any(
            name == member.member or (d.state.together and number < member.incarnation)
            for name, number in incident.deaths
        ):
            continue  # this is a death after that incident's restart
        undecided = incident.settle_at is not None
        if d.state.together or undecided or echo:
            return incident
    return None
