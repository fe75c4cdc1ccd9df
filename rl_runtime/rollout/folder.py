"""Batched decoding of a transformers model with its key-value cache: own loop, so that every token has its log-prob and version.

Completions are decoded in waves: a wave is read at once (each different prompt once, what all begin with once for all) and decoded
together until its last row ends; rows that end early are taken out when they are a quarter of it. New requests form a wave of their
own beside those that run, as soon as there are enough. Weights may change between two tokens; cached keys and values stay.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from aimaster.wire.checkpoint import Version
from rl_runtime.models.base import Bundle
from rl_runtime.models.folder import FolderModel
from rl_runtime.rollout.engines import Ending, Generation, Request
from rl_runtime.rollout.sampling import sample, uniforms

READ_TOKENS = 128
"""Prompts are read so many tokens at a time, with a beat between: a long silence would look like a hang."""


class FolderEngine:
    """See the module; an `Engine`. Shares the bundle's model: loading changes it."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        slots: int,
        temperature: float,
        ending: Ending,
        beat: Callable[[], None],
        device: str = "cpu",
    ) -> None:
        assert isinstance(bundle.model, FolderModel)  # noqa: S101 - the settings tie the engine to a model folder
        self.slots = slots
        self.version: Version | None = None
        self._model = bundle.model
        self._ending = ending
        self._temperature = temperature
        self._beat = beat
        self._device = torch.device(device)
        self._model.module.to(self._device)
        self._waiting: list[Generation] = []
        self._waves: list[_Wave] = []

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], version: Version) -> None:
        for name, parameter in self._model.module.named_parameters():
            if parameter.data_ptr() != weights[name].data_ptr():
                parameter.copy_(weights[name])
        self.version = version

    def add(self, request: Request) -> None:
        self._waiting.append(Generation.begin(request, ending=self._ending))

    def drop(self, keys: Iterable[str]) -> None:
        gone = set(keys)
        self._waiting = [one for one in self._waiting if one.request.key not in gone]
        for wave in self._waves:
            wave.drop(gone)

    def in_work(self) -> list[Generation]:
        return [one for wave in self._waves for one in wave.living()] + self._waiting

    @torch.no_grad()
    def step(self) -> list[Generation]:
        finished = [one for one in self._waiting if one.finish]
        self._waiting = [one for one in self._waiting if not one.finish]
        if self.version is None:
            return finished
        for wave in self._waves:
            finished += self._extend(wave, wave.decode())
        self._waves = [wave for wave in self._waves if wave.living()]
        if self._waiting and (not self._waves or len(self._waiting) * 4 >= self.slots):
            wave = _Wave(self._model, self._waiting, self._device, self._beat)
            self._waiting = []
            finished += self._extend(wave, wave.read())
            if wave.living():
                self._waves.append(wave)
        return finished

    def _extend(self, wave: "_Wave", logits: Tensor) -> list[Generation]:
        """Sample one token for each row of a wave and return what is finished."""
        assert self.version is not None  # noqa: S101 - `step` returns before
        numbers = uniforms(
            [one.request.seed if one else 0 for one in wave.rows], [len(one.tokens) if one else 0 for one in wave.rows]
        )
        tokens, logprobs = sample(logits.cpu(), numbers, temperature=self._temperature)
        finished = []
        for place, (one, token, logprob) in enumerate(zip(wave.rows, tokens, logprobs, strict=True)):
            if one is None:
                continue
            one.append(token, logprob, self.version, ending=self._ending)
            if one.finish:
                finished.append(one)
                wave.rows[place] = None
        return finished


class _Wave:
    """Rows that are decoded together; None stands where one has ended."""

    def __init__(
        self, model: FolderModel, generations: list[Generation], device: torch.device, beat: Callable[[], None]
    ) -> None:
        self.rows: list[Generation | None] = list(generations)
        self._model = model
        self._device = device
        self._beat = beat
        self._cache: Any = None
        self._mask = torch.empty(0, 0, dtype=torch.long)
        """[rows, tokens in the cache]: 0 on padding."""

    def living(self) -> list[Generation]:
        return [one for one in self.rows if one is not None]

    def drop(self, keys: set[str]) -> None:
        self.rows = [one if one is None or one.request.key not in keys else None for one in self.rows]

    def read(self) -> Tensor:
        """Read the prompts, each different one once and their common opening once for all; return the logits after them."""
        texts = [one.request.prompt_tokens + tuple(one.tokens) for one in self.living()]
        places = {text: place for place, text in enumerate(dict.fromkeys(texts))}
        opening = _opening(list(places)) if len(places) > 1 else ()
        if opening:
            self._feed(torch.tensor([opening]), torch.ones(1, len(opening), dtype=torch.long))
            self._cache.batch_repeat_interleave(len(places))
            self._mask = self._mask.expand(len(places), -1)
        rests = [text[len(opening) :] for text in places]
        width = max(map(len, rests))
        # Padding stands on the left, behind the opening, so that all rows end together.
        hidden = self._feed(
            torch.tensor([(0,) * (width - len(rest)) + rest for rest in rests]),
            torch.tensor([[0] * (width - len(rest)) + [1] * len(rest) for rest in rests]),
        )
        row_of = torch.tensor([places[text] for text in texts], device=self._device)
        if len(places) < len(texts):
            self._cache.batch_select_indices(row_of)
        self._mask = self._mask[row_of]
        return self._model.logits(hidden)[row_of]

    def _feed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Run tokens behind what is in the cache, a part at a time, and return the last hidden states."""
        ids, mask = ids.to(self._device), mask.to(self._device)
        begun = self._mask.shape[1]
        self._mask = torch.cat([self._mask, mask], 1) if begun else mask
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, begun:]
        stride, width = max(1, READ_TOKENS // len(ids)), ids.shape[1]
        hidden = torch.empty(0)
        for begin in range(0, width, stride):
            end = min(begin + stride, width)
            self._beat()
            out = self._model.decode_step(
                input_ids=ids[:, begin:end],
                attention_mask=self._mask[:, : begun + end],
                position_ids=positions[:, begin:end],
                past_key_values=self._cache,
            )
            self._cache, hidden = out.past_key_values, out.last_hidden_state
        return hidden[:, -1]

    def decode(self) -> Tensor:
        """Run the newest token of every row and return the logits after it."""
        if self.rows.count(None) * 4 >= len(self.rows):
            self._compact()
        last = [[one.tokens[-1] if one else 0] for one in self.rows]
        places = self._mask.sum(1, keepdim=True)
        self._mask = torch.cat([self._mask, torch.ones_like(places)], 1)
        out = self._model.decode_step(
            input_ids=torch.tensor(last, device=self._device),
            attention_mask=self._mask,
            position_ids=places,
            past_key_values=self._cache,
        )
        self._cache = out.past_key_values
        return self._model.logits(out.last_hidden_state[:, -1])

    def _compact(self) -> None:
        """Take out the rows that have ended."""
        kept = [place for place, one in enumerate(self.rows) if one is not None]
        if len(kept) == len(self.rows) or not kept:
            return
        at = torch.tensor(kept, device=self._device)
        self._cache.batch_select_indices(at)
        self._mask = self._mask[at]
        self.rows = [self.rows[place] for place in kept]


def _opening(texts: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Return what all begin with, and at least one token less than the shortest."""
    low, high = min(texts), max(texts)  # in order of their tokens: what these two share, all share
    same = takewhile(lambda pair: pair[0] == pair[1], zip(low, high, strict=False))
    return tuple(token for token, _ in same)[: min(map(len, texts)) - 1]
