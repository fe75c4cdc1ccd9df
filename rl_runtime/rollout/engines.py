"""The seam between a rollout member and whatever generates tokens.

    add -> (step -> step -> ...) -> finished          drop ends one early; load swaps the weights between two tokens

An engine generates many completions at once and may be given new weights at any time: the tokens already made stay, with the
version that made each; those that follow come from the new weights. Sampling depends on a completion's seed and on the place of
the token alone, never on its neighbours: a completion continued from a streamed prefix is the one that was interrupted.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
from torch import Tensor

from aimaster.wire.checkpoint import Version
from aimaster.wire.rollout import Piece
from rl_runtime.models.base import Tokenizer


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to make."""

    key: str
    prompt_tokens: tuple[int, ...]
    prefix: Piece = Piece()
    """Tokens that are already made."""
    seed: int
    most_tokens: int
    """Of the whole completion, prefix included."""


class Ending:
    """Where a completion ends: at the model's end token, or as soon as its text holds a stop text."""

    def __init__(self, tokenizer: Tokenizer, stop_texts: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop_texts = tuple(stop_texts)
        # A token holds at least one byte of text.
        self._look_back = max((len(text.encode()) for text in stop_texts), default=0)

    def is_reached(self, tokens: Sequence[int]) -> bool:
        """Whether the last token ended the completion."""
        if tokens[-1] == self._tokenizer.eos:
            return True
        if not self._stop_texts:
            return False
        tail = self._tokenizer.decode(tokens[-self._look_back :])
        return any(text in tail for text in self._stop_texts)


class Generation(msgspec.Struct, kw_only=True):
    """A completion in the making; grows by one token a step."""

    request: Request
    tokens: list[int]
    logprobs: list[float]
    versions: list[Version]
    finish: Literal["", "stop", "length"] = ""

    @classmethod
    def begin(cls, request: Request, *, ending: Ending) -> "Generation":
        """Start from the prefix, which may be all there is to make."""
        prefix = request.prefix
        generation = cls(
            request=request,
            tokens=list(prefix.tokens),
            logprobs=list(prefix.logprobs),
            versions=list(prefix.versions),
        )
        if prefix.tokens and ending.is_reached(prefix.tokens):
            generation.finish = "stop"
        elif len(prefix.tokens) >= request.most_tokens:
            generation.finish = "length"
        return generation

    def append(self, token: int, logprob: float, version: Version, *, ending: Ending) -> None:
        """Take one more token; `finish` says whether it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if ending.is_reached(self.tokens):
            self.finish = "stop"
        elif len(self.tokens) >= self.request.most_tokens:
            self.finish = "length"

    def piece(self, start: int = 0) -> Piece:
        """Return the tokens from `start` on, as they are sent."""
        return Piece(
            tokens=tuple(self.tokens[start:]),
            logprobs=tuple(self.logprobs[start:]),
            versions=tuple(self.versions[start:]),
        )


class Engine(Protocol):
    """What generates."""

    slots: int
    """Completions made at once."""
    version: Version | None
    """Of the weights loaded; None before the first load."""

    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        """Take new weights, by their checkpoint names; the tensors may be changed by the caller afterwards."""
        ...

    def add(self, request: Request) -> None:
        """Begin a completion at the next step; never more than `slots` at once."""
        ...

    def drop(self, keys: Iterable[str]) -> None:
        """Forget completions; unknown keys are no error."""
        ...

    def step(self) -> list[Generation]:
        """Make one token for each completion in work and return those that are finished."""
        ...

    def in_work(self) -> list[Generation]:
        """Return the completions in work, oldest first."""
        ...
