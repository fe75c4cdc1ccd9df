"""Sealed snapshots as the members report them: what rollouts are offered, and whether replicas agree. Pure."""

from aimaster.wire.ids import MemberId
from aimaster.wire.rollout import Offer
from rl_runtime.controller.account import Account
from rl_runtime.controller.roll import Roll


def newest_offer(account: Account, roll: Roll) -> Offer | None:
    """Return the newest committed version that has a sealed snapshot, and all that hold it; derived, never recorded."""
    live = {member: seal for member, seal in roll.seals.items() if account.is_live(seal.version)}
    if not live:
        return None
    newest = max(live.values(), key=lambda seal: (seal.version.step, seal.version.lineage))
    same = (newest.version, newest.state_digest)
    holders = {member: seal.node for member, seal in live.items() if (seal.version, seal.state_digest) == same}
    return Offer(version=newest.version, state_digest=newest.state_digest, holders=holders)


def differing_seals(account: Account, roll: Roll, member: MemberId) -> dict[MemberId, str]:
    """Return the digests of those in the epoch that sealed the same version as `member`, when they are not all equal."""
    seal = roll.seals.get(member)
    if seal is None or not account.is_live(seal.version):
        return {}
    digests = {
        other: its.state_digest
        for other in account.epoch.members
        if (its := roll.seals.get(other)) is not None and its.version == seal.version and its.state_digest
    }
    return digests if len(set(digests.values())) > 1 else {}
