"""Reductions that fail and digests that differ: who is left out, and when.

    aborted, a death known      -> the epoch without the dead (group.py)
    aborted, no death known     -> the same members again, twice; then without the one that evidence names
    digests differ              -> the same members again, once; then without the minority; without a majority nobody stays

Pure. Whoever is left out is only told to drop its state and come back; nobody is killed on such evidence.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from aimaster.wire.ids import MemberId

SAME_MEMBERS_TRIES = 2
SAME_DIGEST_TRIES = 1


def named_by_evidence(
    members: Sequence[MemberId], silent: Sequence[MemberId], reasons: Mapping[MemberId, str]
) -> MemberId:
    """Return the member that the next epoch does without.

    Evidence, best first: the one that says nothing while the others do; the one that most others name in their reasons. Without
    any, the one that came last: somebody must go for the others to go on, and it may join again.
    """
    if silent and len(silent) < len(members):
        return silent[-1]
    votes = Counter(
        accused
        for member, reason in reasons.items()
        for accused in members
        if accused != member and _names(reason, accused)
    )
    if votes:
        most = max(votes.values())
        accused = [member for member in members if votes[member] == most]
        if len(accused) == 1:
            return accused[0]
    return members[-1]


def minority(digests: Mapping[MemberId, str]) -> tuple[MemberId, ...]:
    """Return those whose digest is not the majority's; all of them when there is no majority."""
    digest, count = Counter(digests.values()).most_common(1)[0]
    if 2 * count <= len(digests):
        return tuple(digests)
    return tuple(member for member in digests if digests[member] != digest)


def all_but_one(leave: Sequence[MemberId], members: Iterable[MemberId]) -> tuple[MemberId, ...]:
    """Spare the first where everybody would have to leave: one state is as good as the other, and the rest take it over."""
    return tuple(leave) if set(leave) != set(members) else tuple(leave)[1:]


def _names(reason: str, member: MemberId) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(member)}(?![\w-])", reason) is not None
