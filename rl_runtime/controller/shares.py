"""Shares: a dealt batch cut into numbered parts, and who computes which. Pure, and a function of what it is given alone.

A batch is cut once, when it is dealt, by tokens. A share is computed by one member; when that member leaves, its shares go to
the others while they keep what they have, so nothing is computed twice and nothing is left out.
"""

from collections.abc import Mapping, Sequence

from aimaster.wire.ids import MemberId


def cut(tokens: Sequence[int], *, per_share: int, at_least: int) -> tuple[tuple[int, ...], ...]:
    """Cut positions 0..n-1 into shares of at most `per_share` positions, at least `at_least` shares, of about equal tokens."""
    count = min(len(tokens), max(at_least, -(-len(tokens) // per_share)))
    room = -(-len(tokens) // count)
    loads = [0] * count
    shares: list[list[int]] = [[] for _ in range(count)]
    for position in sorted(range(len(tokens)), key=lambda p: (-tokens[p], p)):
        open_shares = (number for number in range(count) if len(shares[number]) < room)
        lightest = min(open_shares, key=lambda number: (loads[number], len(shares[number]), number))
        shares[lightest].append(position)
        loads[lightest] += tokens[position]
    return tuple(tuple(sorted(share)) for share in shares if share)


def assign(
    share_tokens: Sequence[int], members: Sequence[MemberId], kept: Mapping[MemberId, Sequence[int]]
) -> dict[MemberId, tuple[int, ...]]:
    """Give every share that nobody in `kept` has to the member with the least work."""
    if not members:
        return {}
    mine: dict[MemberId, list[int]] = {member: list(kept.get(member, ())) for member in members}
    taken = {share for shares in mine.values() for share in shares}
    missing = [share for share in range(len(share_tokens)) if share not in taken]
    loads = {member: sum(share_tokens[share] for share in shares) for member, shares in mine.items()}
    for share in sorted(missing, key=lambda s: (-share_tokens[s], s)):
        lightest = min(members, key=lambda member: (loads[member], len(mine[member])))
        mine[lightest].append(share)
        loads[lightest] += share_tokens[share]
    return {member: tuple(sorted(shares)) for member, shares in mine.items()}
