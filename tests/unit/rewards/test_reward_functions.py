"""Built-in rewards on real-looking texts, and the weighted sum."""

import sys

import pytest

from rl_runtime.rewards import functions
from rl_runtime.rewards.desk import RewardDesk, UnknownRewardError


@pytest.mark.parametrize(
    ("function", "text", "answer", "reward"),
    [
        (functions.exact, "123", "123", 1.0),
        (functions.exact, "123 ", "123", 0.0),
        (functions.gsm8k, "5 + 4 = 9\n#### 9", "5 + 4 = 9\n#### 9", 1.0),
        (functions.gsm8k, "#### 1,234", "so it is\n#### 1234", 1.0),
        (functions.gsm8k, "#### $18.", "#### 18", 1.0),
        (functions.gsm8k, "#### -3", "#### -3", 1.0),
        (functions.gsm8k, "the answer is 9", "#### 9", 0.0),
        (functions.gsm8k, "#### 8\n\nQuestion: ...\n#### 9", "#### 9", 0.0),  # the first one counts
        (functions.gsm8k_lenient, "the answer is 9.", "#### 9", 1.0),
        (functions.gsm8k_lenient, "no number", "#### 9", 0.0),
        (functions.format_hashes, "#### 3", "#### 9", 1.0),
        (functions.format_hashes, "3", "3", 0.0),
        (functions.single_choice, "hm <answer> (b) </answer>", "B", 1.0),
        (functions.single_choice, r"\boxed{A} no \boxed{C}", "<answer>C</answer>", 1.0),
        (functions.single_choice, "B", "B", 0.0),
    ],
)
def test_built_in_rewards(function, text, answer, reward):
    """Strict where they say strict."""
    assert function(text, answer) == reward


def test_rewards_are_summed_by_weight():
    """Each function's own value is told beside the sum."""
    desk = RewardDesk({"gsm8k": 1.0, "format": 0.25}, workers=1, deadline_seconds=1)
    desk.submit("a", "#### 3", answer="#### 9", prompt="")
    (score,) = desk.ready()
    assert (score.key, score.reward, score.rewards) == ("a", 0.25, {"gsm8k": 0.0, "format": 1.0})
    assert desk.ready() == []


def test_a_users_own_function_is_found_and_called(tmp_path, monkeypatch):
    """`module:function`, called as Cosmos-RL calls them; it may return (value, figures)."""
    (tmp_path / "own_reward.py").write_text(
        "def short(text, answer, **more):\n    return (1.0 / len(text), {'prompt': more['prompt']})\n\ndef plain(text, answer):\n    return len(answer)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    desk = RewardDesk({"own_reward:short": 1.0, "own_reward:plain": 2.0}, workers=1, deadline_seconds=1)
    desk.submit("a", "four", answer="x", prompt="p")
    assert desk.ready()[0].reward == 2.25
    sys.modules.pop("own_reward")


def test_an_exception_of_the_users_function_is_not_caught(tmp_path, monkeypatch):
    """It is the user's, with the user's traceback."""
    (tmp_path / "bad_reward.py").write_text("def oops(text, answer):\n    raise ZeroDivisionError('mine')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    desk = RewardDesk({"bad_reward:oops": 1.0}, workers=1, deadline_seconds=1)
    with pytest.raises(ZeroDivisionError, match="mine"):
        desk.submit("a", "x", answer="x", prompt="p")
    sys.modules.pop("bad_reward")


@pytest.mark.parametrize("name", ["gms8k", "own_missing_function_module_of_rewards", "json:no_such"])
def test_an_unknown_reward_is_one_clear_error(name):
    """The message lists what there is."""
    with pytest.raises(UnknownRewardError, match="reward_function"):
        RewardDesk({name: 1.0}, workers=1, deadline_seconds=1)
