"""When an incident is over: resumed by the first commit that it had held up, healed when everybody of it is back in. Pure.

A commit that was under way is none of those: what follows a death is committed in an epoch without the dead, after the decision.
Nothing of training is held up by a rollout member, an agent or a master: there the first sign of life counts. For wrapped commands too.
The moments of an incident never go back: occurred, detected, decided, resumed, healed.
"""

from collections.abc import Iterator

from aimaster.brain.events import IncidentMoved
from aimaster.brain.state import Commit, Incident, Member, NodeView, State, View
from aimaster.wire.ids import MemberId
from aimaster.wire.messages import MemberPicture


def moves(state: State, view: View, incident: Incident) -> Iterator[IncidentMoved]:
    """The next moment of a decided incident, if it has come."""
    decided_at = incident.decided_at
    if decided_at is None or (state.regroup is not None and state.regroup.incident == incident.incident):
        return  # while the ranks regroup nobody is back before all are started together
    back = _back(state, view, incident)
    resumed_at = incident.resumed_at
    if resumed_at is None and _holds_up_commits(state, incident):
        resumed_at = next((one.at for one in view.commits if _was_held_up(state, view, incident, one)), None)
    elif resumed_at is None:
        resumed_at = min(back.values(), default=None)
    if resumed_at is None:
        return
    resumed_at = max(resumed_at, decided_at)
    healed_at = None
    if incident.healed_at is None and len(back) == len(_awaited(state, incident)):
        healed_at = max(resumed_at, *back.values()) if back else resumed_at
    if incident.resumed_at is None or healed_at is not None:
        yield IncidentMoved(
            incident=incident.incident,
            resumed_at=resumed_at if incident.resumed_at is None else None,
            healed_at=healed_at,
            lost=_lost(view, incident) if incident.resumed_at is None else "",
        )


# -- commits ------------------------------------------------------------------------------------------------------------


def _holds_up_commits(state: State, incident: Incident) -> bool:
    if not state.heard_by_controller or incident.kind in ("agent", "master"):
        return False
    return any(state.members[name].role != "rollout" for name in _members(state, incident))


def _was_held_up(state: State, view: View, incident: Incident, commit: Commit) -> bool:
    """Whether this commit shows that training goes on without those of the incident, or with their next start."""
    if incident.decided_at is None or commit.at < incident.decided_at:
        return False
    dead = dict(incident.deaths)
    for name in _members(state, incident):
        member = state.members[name]
        if member.role == "controller" and name in dead and commit.controller <= dead[name]:
            return False
        if member.role == "policy" and not _goes_on(view, incident, member, commit, dead.get(name)):
            return False
    return True


def _goes_on(view: View, incident: Incident, member: Member, commit: Commit, dead: int | None) -> bool:
    if commit.members is None:
        return False
    present = commit.members.get(member.member)
    if dead is not None:
        return present is None or present > dead
    if member.condemned_in == incident.incident:
        return False  # it is to be killed, and is not dead yet
    return present is None or view.heard.get(member.member, 0.0) > (incident.decided_at or 0.0)


def _lost(view: View, incident: Incident) -> str:
    """Steps that were committed and had to be computed again from their batches."""
    rewind = view.rewind
    if rewind is None or rewind.at < incident.occurred_at or rewind.from_step == rewind.to_step:
        return ""
    count = rewind.from_step - rewind.to_step
    return f"the compute of {count} step{'s' if count > 1 else ''}"


# -- who is back --------------------------------------------------------------------------------------------------------


def _members(state: State, incident: Incident) -> list[MemberId]:
    return [name for name in incident.members if name in state.members]


def _awaited(state: State, incident: Incident) -> list[str]:
    """Who or what is to come back."""
    return ["the line to every agent"] if incident.kind in ("agent", "master") else list(_members(state, incident))


def _back(state: State, view: View, incident: Incident) -> dict[str, float]:
    """Who is back, and when that was seen."""
    if incident.kind in ("agent", "master"):
        nodes = state.nodes.values()
        around = all(node.state != "silent" for node in nodes)
        return {"the line to every agent": max(node.seen_at for node in nodes)} if around else {}
    seen = {name: _back_at(state, view, state.members[name], incident) for name in _members(state, incident)}
    return {name: at for name, at in seen.items() if at is not None}


def _back_at(state: State, view: View, member: Member, incident: Incident) -> float | None:
    """When the member was seen to be back in; None when it is not."""
    if member.state not in ("running", "finished") or member.condemned_in == incident.incident:
        return None
    pulse, name = view.controller, member.member
    if member.role == "controller":
        back = pulse is not None and pulse.incarnation == member.incarnation
        return view.controller_at if back else None
    if member.role == "policy":
        is_in = pulse is not None and name in pulse.in_epoch and pulse.incarnations.get(name) == member.incarnation
        return view.controller_at if is_in and view.heard.get(name, 0.0) > (incident.decided_at or 0.0) else None
    seen = view.nodes.get(member.node)
    shown = picture_of(view, member)
    if seen is None or shown is None or not shown.alive:
        return None
    speaks = shown.progress.beats > 0 or not state.plan.members[name].reports_progress
    return _last_sign(seen, shown) if speaks else None


def _last_sign(seen: NodeView, shown: MemberPicture) -> float:
    """When it last gave a sign of life, on the master's clock."""
    return seen.at - shown.progress.age_seconds


def picture_of(view: View, member: Member) -> MemberPicture | None:
    """The member's present incarnation as its node's agent last showed it."""
    seen = view.nodes.get(member.node)
    shown = seen.pulse.members if seen is not None else ()
    return next((p for p in shown if (p.member, p.incarnation) == (member.member, member.incarnation)), None)
