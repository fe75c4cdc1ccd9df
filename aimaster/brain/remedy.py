"""From a verdict to an action: yes/no questions first, then the ladder.

    ignore -> restart_process -> reform_without -> replace_node -> restart_job -> stop_job

A verdict names the first rung; a spent budget, a lost node or the scope of the job climbs from there.
"""

from collections.abc import Iterable

from aimaster.wire.health import Action

LADDER: tuple[Action, ...] = ("ignore", "restart_process", "reform_without", "replace_node", "restart_job", "stop_job")


def may_kill_hung(
    *, stopped_twice: bool, apart_twice: bool, same_frame_twice: bool, lease_learnt: bool, others_wait_for_it: bool
) -> bool:
    """Whether a broken progress lease has the evidence that a kill needs; silence alone never has."""
    return stopped_twice or apart_twice or (same_frame_twice and lease_learnt) or others_wait_for_it


def is_node_lost(*, agent_silent: bool, members_heard: bool, controller_heard: bool, waited_long: bool) -> bool:
    """Whether a silent node is lost. Members that are heard make it a fault of the agent; a silent controller makes us blind for a while."""
    return agent_silent and not members_heard and (controller_heard or waited_long)


def is_echo(*, roles: Iterable[str], is_victim: bool, was_killed: bool) -> bool:
    """Whether a death only speaks of somebody else's: its statements are all followers', or it gave way to a lost peer; a kill never does."""
    spoken = [role for role in roles if role != "benign"]
    follows = bool(spoken) and all(role == "follower" for role in spoken)
    return (follows or is_victim) and not was_killed


def may_restart_here(*, node_connected: bool, node_blamed: bool, other_node: bool) -> bool:
    """Whether the same node gets the member again; a blamed one only where there is no other."""
    return node_connected and not (node_blamed and other_node)


def may_go_on_without(*, role_is_elastic: bool, others_of_role: int) -> bool:
    """Whether the job makes progress without this member."""
    return role_is_elastic and others_of_role > 0


def choose(*, first: Action, budget_left: bool, together: bool, node_gone: bool, goes_on_without: bool) -> Action:
    """Climb from the verdict's first rung to the rung that can be taken.

    `together`: its death ends the whole group, so the group restarts. `node_gone`: it cannot come back where it was.
    """
    if first == "stop_job":
        return "stop_job"
    if not budget_left:
        return "reform_without" if goes_on_without and not together else "stop_job"
    if together:
        return "restart_job"
    if node_gone:
        return "replace_node"
    if first == "reform_without" and not goes_on_without:
        return "restart_process"
    # A dead member that is needed is started again even when its death was nobody's fault.
    return "restart_process" if first in ("ignore", "restart_job") else first
