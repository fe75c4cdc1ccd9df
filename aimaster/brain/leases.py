"""What follows from a broken progress lease: a suspicion, its end by progress, or a kill, which needs evidence.

The incident of a hang opens when the kill is ordered, and takes in the death that the kill brings about.
"""

from typing import Final

from aimaster.brain import incidents, members, verdicts
from aimaster.brain.draft import Draft
from aimaster.brain.remedy import may_kill_hung
from aimaster.brain.state import LIVE, Member, State
from aimaster.wire import actions as orders
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.messages import HangSuspected

FRESH_SECONDS: Final = 40.0
"""Words on where ranks stand are said again every fifteen seconds; older ones are of another silence."""
TOGETHER_SECONDS: Final = 5.0
"""For so long all must have been seen standing at one time: one node's evaluation may end after another's."""


def suspected(d: Draft, member: Member, event: HangSuspected) -> None:
    """Its agent suspects a hang: it may be killed at once, where the two looks found evidence."""
    if member.state not in LIVE or member.condemned_in is not None:
        return
    member = d.member(event.member, state="suspected", suspicion=event)
    if d.state.ending is not None:
        end_silent(d)
        return
    stopped, apart, same_frame = (
        word in event.evidence for word in ("state-T-twice", "apart-from-group-twice", "same-frame-twice")
    )
    learnt = event.progress.lease_seconds is not None
    if may_kill_hung(
        stopped_twice=stopped,
        apart_twice=apart,
        same_frame_twice=same_frame,
        lease_learnt=learnt,
        others_wait_for_it=False,
    ):
        who = "it" if event.rank is None else f"rank {event.rank}"
        condemn(d, member, event, _why(who, stopped=stopped, apart=apart))
        return
    for name in waited_for(d.state, d.now):
        guilty = d.state.members[name]
        if guilty.suspicion is not None and guilty.condemned_in is None:
            condemn(
                d, guilty, guilty.suspicion, "it stands elsewhere than the ranks of all other nodes, who wait for it"
            )


def waited_for(state: State, now: float) -> tuple[MemberId, ...]:
    """Members of a wrapped command that stood elsewhere while all others already waited in a collective, by fresh words of all of them."""
    living = [member for member in state.members.values() if member.state in LIVE]
    words = [one.suspicion for one in living if one.suspicion is not None and now - one.suspicion.at <= FRESH_SECONDS]
    waiting = [said for said in words if "waits-twice" in said.evidence]
    apart = [said for said in words if "elsewhere-twice" in said.evidence]
    if len(waiting) + len(apart) < len(living) or not 0 < len(apart) <= len(waiting):
        return ()
    begun = max(said.at - said.seen_seconds for said in (*waiting, *apart))
    together = min(said.at for said in (*waiting, *apart)) - begun
    return tuple(said.member for said in apart) if together >= TOGETHER_SECONDS else ()


def _why(who: str, *, stopped: bool, apart: bool) -> str:
    if stopped:
        return f"{who} was stopped (state T) in two looks"
    if apart:
        return f"{who} stands elsewhere than the others, who wait for it, in two dumps"
    return f"{who} was in the same frame in two dumps"


def hang_confirmed(d: Draft, name: MemberId, incarnation: Incarnation, why: str) -> None:
    member = d.state.members.get(name)
    if (
        member is not None
        and member.incarnation == incarnation
        and member.suspicion is not None
        and member.condemned_in is None
    ):
        condemn(d, member, member.suspicion, why)


def withdrawn(d: Draft, name: MemberId, incarnation: Incarnation) -> None:
    member = d.state.members.get(name)
    if (
        member is not None
        and member.incarnation == incarnation
        and member.state == "suspected"
        and member.condemned_in is None
    ):
        d.member(name, state="running", suspicion=None)


def hung_since(event: HangSuspected) -> float:
    """Its last beat."""
    return event.at - event.progress.age_seconds


def condemn(d: Draft, member: Member, event: HangSuspected, why: str) -> None:
    """A verdict on a hang: kill; its death is part of the incident that opens here."""
    if d.state.ending is not None or d.state.regroup is not None:
        return
    verdict = verdicts.hang(member, event, why)
    occurred_at = hung_since(event)
    incident = incidents.open_incident(d, "member", member.member, verdict, occurred_at, (member.member,))
    d.incident(incident.incident, decided_at=d.now, action=members.choose(d, incident, member))
    d.member(member.member, condemned_in=incident.incident)
    kill = orders.KillMember(member=member.member, incarnation=member.incarnation, reason=verdict.summary)
    d.order(member.node, kill, f"incident {incident.incident}")


def end_silent(d: Draft) -> None:
    """Kill suspected members of a finished job: nobody needs them any more, and they would leave only by force."""
    ending = d.state.ending
    if ending is None or ending.outcome != "finished" or ending.nodes_ordered:
        return  # else the order to their node ends them
    for member in list(d.state.members.values()):
        event = member.suspicion
        if member.state != "suspected" or event is None or member.condemned_in is not None:
            continue
        why = "the job is finished: it is not waited for"
        verdict = verdicts.hang(member, event, why)
        incident = incidents.noted(d, member, verdict, hung_since(event))
        d.member(member.member, condemned_in=incident.incident)
        kill = orders.KillMember(member=member.member, incarnation=member.incarnation, reason=verdict.summary)
        d.order(member.node, kill, f"incident {incident.incident}")
