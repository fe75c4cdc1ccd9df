"""Every yes/no question of the remedy, over its whole truth table, and the ladder over every rung."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimaster.brain import remedy
from aimaster.brain.budget import LONGEST_PAUSE_SECONDS, Budget, has_budget, pause_seconds
from aimaster.wire.health import ACTIONS

BOTH = (False, True)


@pytest.mark.parametrize(("stopped", "apart", "same", "learnt", "waited"), list(itertools.product(BOTH, repeat=5)))
def test_a_hang_is_killed_only_on_evidence(stopped, apart, same, learnt, waited):
    """State T in two looks, apart from its group in two, the same frame twice in a learnt phase, or all others waiting: any is enough."""
    answer = remedy.may_kill_hung(
        stopped_twice=stopped, apart_twice=apart, same_frame_twice=same, lease_learnt=learnt, others_wait_for_it=waited
    )
    assert answer is any((stopped, apart, same and learnt, waited))


LOST = {
    # agent silent, members heard, controller heard, waited long
    (True, False, True, False),
    (True, False, True, True),
    (True, False, False, True),
}


@pytest.mark.parametrize("case", list(itertools.product(BOTH, repeat=4)))
def test_a_node_is_lost_only_when_nobody_on_it_is_heard(case):
    """A heard member makes it an agent's fault; without the controller's ears it takes longer."""
    silent, heard, controller, long = case
    answer = remedy.is_node_lost(
        agent_silent=silent, members_heard=heard, controller_heard=controller, waited_long=long
    )
    assert answer is (case in LOST)


@pytest.mark.parametrize(
    ("roles", "echo"),
    [
        ([], False),
        (["benign"], False),
        (["follower"], True),
        (["follower", "benign"], True),
        (["follower", "self"], False),
        (["accusation"], False),
    ],
)
def test_an_echo_speaks_only_of_others(roles, echo):
    """A death with followers' statements only, or of a victim, is an echo; one that says nothing or speaks of itself is none, a kill never."""
    assert remedy.is_echo(roles=roles, is_victim=False, was_killed=False) is echo
    assert remedy.is_echo(roles=roles, is_victim=True, was_killed=False)
    assert not remedy.is_echo(roles=roles, is_victim=True, was_killed=True)


@pytest.mark.parametrize("case", list(itertools.product(BOTH, repeat=3)))
def test_the_same_node_is_taken_unless_it_is_gone_or_blamed_with_another_there(case):
    """A blamed node is better than none."""
    connected, blamed, other = case
    answer = remedy.may_restart_here(node_connected=connected, node_blamed=blamed, other_node=other)
    assert answer is (connected and (not blamed or not other))


@pytest.mark.parametrize(
    ("elastic", "others", "answer"), [(True, 1, True), (True, 0, False), (False, 1, False), (False, 0, False)]
)
def test_the_job_goes_on_without_a_member_only_with_others_of_its_role(elastic, others, answer):
    """A controller is never done without, the last policy member neither."""
    assert remedy.may_go_on_without(role_is_elastic=elastic, others_of_role=others) is answer


@pytest.mark.parametrize("first", ACTIONS)
@pytest.mark.parametrize("case", list(itertools.product(BOTH, repeat=4)))
def test_the_ladder_only_climbs(first, case):
    """stop_job stays; a spent budget stops or goes on without; a group restarts as one; a gone node is replaced; else the verdict's rung."""
    budget_left, together, node_gone, without = case
    taken = remedy.choose(
        first=first, budget_left=budget_left, together=together, node_gone=node_gone, goes_on_without=without
    )
    if first == "stop_job":
        expected = "stop_job"
    elif not budget_left:
        expected = "reform_without" if without and not together else "stop_job"
    elif together:
        expected = "restart_job"
    elif node_gone:
        expected = "replace_node"
    else:
        expected = {"ignore": "restart_process", "restart_job": "restart_process"}.get(first, first)
        if first == "reform_without" and not without:
            expected = "restart_process"
    assert taken == expected
    assert taken != "ignore"


@given(st.lists(st.floats(0, 10_000), max_size=30), st.integers(1, 5), st.floats(1, 5_000))
def test_a_budget_is_never_exceeded_in_any_window(times, allowed, window):
    """However the deaths fall, no window holds more restarts than are allowed; and a budget fills up again by waiting."""
    purse, spent = Budget(), []
    for now in sorted(times):
        if has_budget(used=purse.used(now=now, window_seconds=window), allowed=allowed):
            purse = purse.spend(now=now, window_seconds=window)
            spent.append(now)
    assert all(sum(start < at <= start + window for at in spent) <= allowed for start in [-1.0, *spent])
    assert purse.used(now=max([0.0, *times]) + 2 * window, window_seconds=window) == 0


def test_pauses_grow_with_deaths_in_a_row():
    """The first restart comes at once, then the pause doubles up to its bound."""
    pauses = [pause_seconds(quick_deaths=count) for count in range(12)]
    assert pauses[:5] == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
