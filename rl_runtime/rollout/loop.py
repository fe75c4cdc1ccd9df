"""The loop of a rollout member.

    lease -> generate (stream when long) -> reward -> complete          and between two tokens: newer weights, when there are any

Every lease in hand is renewed by each question to the controller. A lease that is no longer its own is dropped wherever it stands.
A restarted controller is waited for by the link; then everything goes on, since it adopts the leases that are shown to it.
"""

import time
from collections.abc import Callable, Iterable

import structlog

from aimaster.wire.rollout import (
    CompleteRequest,
    Completion,
    LeaseRequest,
    Offer,
    Partial,
    PromptLease,
    StreamRequest,
)
from rl_runtime.config import RolloutSettings
from rl_runtime.drills import Drills
from rl_runtime.links.base import RolloutLink
from rl_runtime.member import Identity
from rl_runtime.models.base import Bundle
from rl_runtime.rewards.desk import RewardDesk, Score
from rl_runtime.rollout.engines import Engine, Generation, Request
from rl_runtime.rollout.weights import WeightSource

RENEW_SECONDS = 1.0
"""At least so often the controller is asked, which renews leases and shows newer weights."""
IDLE_SECONDS = 0.03
HOLD_BACK_SECONDS = 0.05
"""A completion waits so long for others: they share a question, and the controller's fsync."""

log = structlog.get_logger("rollout")


class RolloutLoop:
    """See the module."""

    def __init__(
        self,
        identity: Identity,
        settings: RolloutSettings,
        link: RolloutLink,
        weights: WeightSource,
        bundle: Bundle,
        engine: Engine,
        desk: RewardDesk,
        drills: Drills,
        *,
        beat: Callable[[str], None],
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._link = link
        self._weights = weights
        self._bundle = bundle
        self._engine = engine
        self._desk = desk
        self._drills = drills
        self._beat = beat
        self._leases: dict[str, PromptLease] = {}
        """All in hand: being generated, rewarded, or waiting to be handed in."""
        self._streamed: dict[str, int] = {}
        self._generated: dict[str, tuple[Generation, str]] = {}
        """With its text, waiting for its reward."""
        self._done: list[Completion] = []
        self._asked_at = float("-inf")
        self._done_since = float("inf")
        self._results: dict[str, float] = {}
        self._tokens = 0
        self._tokens_since = time.monotonic()

    def run(self) -> None:
        """Work until the controller says stop."""
        while True:
            if self._should_ask() and self._ask():
                return
            finished = []
            if self._engine.in_work():
                self._beat("generate")
                finished = self._engine.step()
            for generation in finished:
                self._hand_to_desk(generation)
            scores = self._desk.ready()
            for score in scores:
                self._finish(score)
            self._hand_in()
            self._stream()
            if not finished and not scores and not self._engine.in_work():
                self._beat("reward" if self._generated else "idle")
                time.sleep(IDLE_SECONDS / (10 if self._generated else 1))

    # -- questions -----------------------------------------------------------------------------------------------------

    def _should_ask(self) -> bool:
        quiet = time.monotonic() - self._asked_at
        free = self._free()
        if free == self._engine.slots:
            return quiet >= IDLE_SECONDS or not self._leases
        return quiet >= RENEW_SECONDS or (free >= max(1, self._engine.slots // 4) and quiet >= IDLE_SECONDS)

    def _free(self) -> int:
        return self._engine.slots - len(self._engine.in_work())

    def _ask(self) -> bool:
        """Renew what is in hand, take what there is room for, look for newer weights; True: stop."""
        reply = self._link.lease(
            LeaseRequest(
                member=self._identity.member,
                incarnation=self._identity.incarnation,
                node=self._identity.node,
                version=self._engine.version,
                capacity=self._free(),
                holding=tuple(self._leases),
                figures=self._figures(),
            )
        )
        self._asked_at = time.monotonic()
        if reply.stop:
            return True
        self._drop(reply.dropped)
        if reply.offer is not None:
            self._take_weights(reply.offer)
        for lease in reply.leases:
            self._begin(lease)
        return False

    def _hand_in(self) -> None:
        """Hand in what is done, together with what is done soon after."""
        if not self._done:
            return
        due = time.monotonic() >= self._done_since + HOLD_BACK_SECONDS
        if not due and self._engine.in_work():
            return
        completions, self._done, self._done_since = tuple(self._done), [], float("inf")
        reply = self._link.complete(
            CompleteRequest(
                member=self._identity.member, incarnation=self._identity.incarnation, completions=completions
            )
        )
        for completion, result in zip(completions, reply.results, strict=True):
            self._leases.pop(completion.lease_id, None)
            self._results[result] = self._results.get(result, 0.0) + 1.0

    def _stream(self) -> None:
        """Send the new tokens of long completions, so that a death here costs only what came since."""
        partials = []
        for generation in self._engine.in_work():
            key = generation.request.key
            start = self._streamed.get(key, 0)
            if len(generation.tokens) - start >= self._settings.stream_tokens:
                partials.append(
                    Partial(
                        lease_id=key,
                        start=start,
                        prompt_tokens=generation.request.prompt_tokens,
                        piece=generation.piece(start),
                    )
                )
                self._streamed[key] = len(generation.tokens)
        if not partials:
            return
        reply = self._link.stream(
            StreamRequest(
                member=self._identity.member, incarnation=self._identity.incarnation, partials=tuple(partials)
            )
        )
        self._drop(reply.dropped)
        if reply.offer is not None:
            self._take_weights(reply.offer)

    # -- a completion's way --------------------------------------------------------------------------------------------

    def _begin(self, lease: PromptLease) -> None:
        prompt = lease.prefix_prompt_tokens or tuple(self._bundle.tokenizer.encode(lease.row["prompt"]))
        longest = self._bundle.model.max_length
        most = min(self._settings.most_tokens, longest - 1)
        if len(prompt) + most > longest:
            room = longest - len(prompt)
            if room < 1:
                log.warning("prompt is too long; its beginning is cut off", tokens=len(prompt), longest=longest)
                prompt, room = prompt[-(longest - most) :], most
            most = min(most, room)
        self._leases[lease.lease_id] = lease
        self._streamed[lease.lease_id] = len(lease.prefix.tokens)
        self._engine.add(
            Request(key=lease.lease_id, prompt_tokens=prompt, prefix=lease.prefix, seed=lease.seed, most_tokens=most)
        )

    def _hand_to_desk(self, generation: Generation) -> None:
        key = generation.request.key
        lease = self._leases[key]
        text = self._bundle.tokenizer.decode(generation.tokens)
        self._generated[key] = (generation, text)
        self._tokens += len(generation.tokens) - len(lease.prefix.tokens)
        self._beat("reward")
        self._desk.submit(key, text, answer=lease.row["answer"], prompt=lease.row["prompt"])

    def _finish(self, score: Score) -> None:
        """A completion has its reward: it can be handed in, unless its lease was lost meanwhile."""
        generation, text = self._generated.pop(score.key)
        self._streamed.pop(score.key, None)
        lease = self._leases.get(score.key)
        if lease is None:
            return
        self._done.append(
            Completion(
                lease_id=lease.lease_id,
                prompt_id=lease.prompt_id,
                index=lease.index,
                prompt_tokens=generation.request.prompt_tokens,
                piece=generation.piece(),
                text=text,
                reward=score.reward,
                rewards=score.rewards,
                finish="stop" if generation.finish == "stop" else "length",
            )
        )
        self._done_since = min(self._done_since, time.monotonic())

    def _drop(self, keys: Iterable[str]) -> None:
        gone = set(keys)
        if not gone:
            return
        self._engine.drop(gone)
        for key in gone:
            self._leases.pop(key, None)
            self._streamed.pop(key, None)
        self._done = [completion for completion in self._done if completion.lease_id not in gone]

    def _take_weights(self, offer: Offer) -> None:
        found = self._weights.newer(offer, self._engine.version)
        if found is not None:
            version, weights = found
            self._beat("weights")
            self._engine.load(weights, version)
        if self._engine.version is not None:
            self._drills.at(self._engine.version.step)

    def _figures(self) -> dict[str, float]:
        now = time.monotonic()
        rate = self._tokens / max(1e-3, now - self._tokens_since)
        if now - self._tokens_since > 5.0:
            self._tokens, self._tokens_since = 0, now
        figures = {"tokens_per_second": rate, "rewards_given_up": float(self._desk.given_up)}
        return figures | {f"handed_in_{result}": count for result, count in self._results.items()}
