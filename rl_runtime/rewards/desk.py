"""Hands completions to reward functions and gives back their weighted sum.

Functions are named in `train.train_policy.reward_function` with weights: a built-in, a user's `module:function`, or an entry point of
the group `aimaster.rewards`. A user's function is called in the training thread as `function(text, answer, prompt=...)`, as
Cosmos-RL calls them, and returns a number or (number, figures); what it raises is the user's and ends the member with its traceback.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from rl_runtime.rewards import functions
from rl_runtime.rewards.pool import MathsPool

ENTRY_POINTS = "aimaster.rewards"
MATHS = ("math_verify", "direct_math", "boxed_math")
"""Judged by math-verify, in worker processes."""
QUICK: dict[str, Callable[[str, str], float]] = {
    "exact": functions.exact,
    "gsm8k": functions.gsm8k,
    "gsm8k_lenient": functions.gsm8k_lenient,
    "format": functions.format_hashes,
    "single_choice": functions.single_choice,
}


class UnknownRewardError(Exception):
    """A name in `reward_function` that stands for nothing; a message for the user."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """What one completion earned."""

    key: str
    reward: float
    """The weighted sum."""
    rewards: dict[str, float]
    """By function, before weighting."""


class RewardDesk:
    """One member's rewards: `submit`, then `ready` again and again."""

    def __init__(self, weights: Mapping[str, float], *, workers: int, deadline_seconds: float) -> None:
        self._weights = dict(weights)
        self._quick = {name: find_function(name) for name in weights if name not in MATHS}
        self._slow = [name for name in weights if name in MATHS]
        self._pool = MathsPool(workers=workers, deadline_seconds=deadline_seconds) if self._slow else None
        self._pending: dict[str, dict[str, float]] = {}
        """Rewards already known, of completions that wait for the pool."""
        self._done: list[Score] = []

    @property
    def waiting(self) -> int:
        """Completions submitted and not given back yet."""
        return len(self._pending) + len(self._done)

    @property
    def given_up(self) -> int:
        """Completions that earned nothing because no worker could judge them in time."""
        return self._pool.given_up if self._pool else 0

    def submit(self, key: str, text: str, *, answer: str, prompt: str) -> None:
        rewards = {name: function(text, answer, prompt) for name, function in self._quick.items()}
        if self._pool is None:
            self._done.append(self._score(key, rewards))
        else:
            self._pending[key] = rewards
            self._pool.submit(key, text, answer)

    def ready(self) -> list[Score]:
        """Return what is scored; never blocks."""
        done, self._done = self._done, []
        if self._pool is not None:
            for key, score in self._pool.poll():
                rewards = self._pending.pop(key)
                done.append(self._score(key, rewards | dict.fromkeys(self._slow, score)))
        return done

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _score(self, key: str, rewards: dict[str, float]) -> Score:
        total = sum(self._weights[name] * reward for name, reward in rewards.items())
        return Score(key=key, reward=total, rewards=rewards)


def find_function(name: str) -> Callable[[str, str, str], float]:
    """Return the named function as one of (text, answer, prompt)."""
    if name in QUICK:
        return _plain(QUICK[name], takes_prompt=False)
    if ":" in name:
        module, _, attribute = name.partition(":")
        # What the module raises while it is imported is the user's, and is not hidden here.
        function = getattr(importlib.import_module(module), attribute, None)
        if not callable(function):
            raise UnknownRewardError(f"reward_function: module {module!r} has no function {attribute!r}")
        return _plain(function, takes_prompt=_takes_prompt(function))
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
        function = entry.load()
        return _plain(function, takes_prompt=_takes_prompt(function))
    known = ", ".join([*QUICK, *MATHS])
    raise UnknownRewardError(
        f"reward_function {name!r} is not known. Built in: {known}. Your own: `module:function`, or an entry point of {ENTRY_POINTS}"
    )


def _takes_prompt(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(one.name == "prompt" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)


def _plain(function: Callable[..., Any], *, takes_prompt: bool) -> Callable[[str, str, str], float]:
    def scored(text: str, answer: str, prompt: str) -> float:
        value = function(text, answer, prompt=prompt) if takes_prompt else function(text, answer)
        return float(value[0] if isinstance(value, tuple) else value)

    return scored
