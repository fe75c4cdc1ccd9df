"""Members that live and ask while the controller does not hear them: the network between them is cut.

Silence alone proves nothing: who computes a long share takes no turns. Here the member's own agent shows it beating in phase
`wait`, pulse after pulse, and a controller that speaks has not heard it all that time. A policy member is then left out of the
epoch while others are heard; nobody is killed, and it joins again by itself. For a rollout member nothing is done: its leases expire.
"""

from collections.abc import Iterator
from typing import Final

from aimaster.brain import incidents, verdicts
from aimaster.brain.draft import Draft
from aimaster.brain.events import MemberUnheard, Propose
from aimaster.brain.state import State, View
from aimaster.wire.ids import MemberId
from aimaster.wire.messages import MemberPicture

FRESH_SECONDS: Final = 5.0
"""Pulses of agent and controller come every second; older ones tell nothing of now."""
ASKING: Final = "wait"
"""Phase of a member that asks the controller, or asks again."""


def is_asking(picture: MemberPicture) -> bool:
    """Whether the member waits for the controller's word, and beats."""
    return picture.alive and picture.progress.phase == ASKING and picture.progress.age_seconds < FRESH_SECONDS


def unheard(state: State, view: View, now: float) -> dict[MemberId, float]:
    """Members that have asked in vain for `node_silent_seconds`, and since when."""
    if not state.heard_by_controller or now - view.controller_at >= FRESH_SECONDS:
        return {}
    began = max(view.controller_since, view.since, state.term_started_at)
    found: dict[MemberId, float] = {}
    for member in state.members.values():
        node = view.nodes.get(member.node)
        if node is None or state.nodes[member.node].state != "connected" or now - node.at >= FRESH_SECONDS:
            continue
        asking_since = node.asking_since.get(member.member)
        if member.state != "running" or member.role == "controller" or asking_since is None:
            continue
        since = max(asking_since, view.heard.get(member.member, 0.0), began)
        if now - since >= state.plan.node_silent_seconds:
            found[member.member] = since
    return found


def conclusions(state: State, view: View, now: float) -> Iterator[MemberUnheard]:
    """Policy members that the group is to go on without; none where nobody of it would be left."""
    silent = unheard(state, view, now)
    pulse = view.controller
    if not silent or pulse is None or all(name in silent for name in pulse.in_epoch):
        return
    for name, since in silent.items():
        member = state.members[name]
        is_in = name in pulse.in_epoch and pulse.incarnations.get(name) == member.incarnation
        asked_lately = member.unheard_in is not None and now - member.unheard_at < state.plan.node_silent_seconds
        if member.role == "policy" and is_in and not asked_lately:
            yield MemberUnheard(member=name, incarnation=member.incarnation, silent_since=since)


def go_on_without(d: Draft, event: MemberUnheard) -> None:
    """Propose the epoch without it, in an incident of its own; the same again where an earlier proposal did not get through."""
    member = d.state.members.get(event.member)
    if member is None or member.incarnation != event.incarnation or member.state != "running" or d.state.ending:
        return
    name = member.unheard_in
    if name is None or name not in d.state.incidents:
        verdict = verdicts.unheard(member, event.silent_since, d.now)
        opened = incidents.open_incident(d, "member", member.member, verdict, event.silent_since, (member.member,))
        name = d.incident(opened.incident, decided_at=d.now, action="reform_without").incident
    d.member(member.member, unheard_in=name, unheard_at=d.now)
    d.actions.append(Propose(leave=(member.member,), cause=f"incident {name}"))
