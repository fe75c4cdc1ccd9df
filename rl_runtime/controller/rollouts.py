"""What rollout workers are told: leases out, completions in. Pure: told the time, records through `write`.

Three guards against staleness: no lease is given that would fill more than the allowed batches, none for weights too old to be
trained on, and what comes back too old all the same is not admitted but generated anew. A completion is admitted once per key,
whoever brings it first; the loser is told `duplicate`. Whoever calls must not answer before the records are durable.
"""

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Literal, Protocol

import msgspec

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.rollout import (
    CompleteReply,
    CompleteRequest,
    Completion,
    LeaseReply,
    LeaseRequest,
    Offer,
    Piece,
    PromptLease,
    StreamReply,
    StreamRequest,
)
from rl_runtime.algo.staleness import is_stale, may_lease
from rl_runtime.controller.account import Account
from rl_runtime.controller.errors import MessageError
from rl_runtime.controller.leases import Key, Leases, key_of
from rl_runtime.controller.prompts import PromptOrder, sampling_seed
from rl_runtime.controller.settings import ControllerSettings
from rl_runtime.records import Admitted, Leased, Payload, Record, VersionRun

Result = Literal["admitted", "duplicate", "stale", "unknown"]

ADOPTION_SECONDS = 3.0
"""So long after a start, or until all have asked, workers may still show the leases they hold from an earlier controller."""


class RowSource(Protocol):
    """The data set as the controller sees it."""

    def __len__(self) -> int: ...

    def row(self, position: int) -> Mapping[str, str]: ...


class Rollouts:
    """See the module."""

    def __init__(
        self,
        settings: ControllerSettings,
        account: Account,
        write: Callable[[Record], None],
        rows: RowSource,
        *,
        boot: str,
        now: float,
    ) -> None:
        self.settings = settings
        self.account = account
        self.leases = Leases(settings.prompt_lease_seconds, boot)
        self.results: dict[Result, int] = {"admitted": 0, "duplicate": 0, "stale": 0, "unknown": 0}
        self._write = write
        self._rows = rows
        self._order = PromptOrder(rows=len(rows), seed=settings.seed, shuffle=settings.shuffle)
        self._inherited = set(account.open)
        """Prompts that an earlier controller leased."""
        self._adopt_until = now + ADOPTION_SECONDS
        self._awaited = {one.member for group in account.groups.values() for one in group.values()}
        """Workers of late, that have not shown yet what they hold."""
        for prompt_id in account.open:
            self.leases.want(prompt_id, (i for i in range(settings.n_generation) if not account.holds(prompt_id, i)))

    # -- requests ------------------------------------------------------------------------------------------------------

    def lease(self, request: LeaseRequest, offer: Offer | None, now: float) -> LeaseReply:
        """Renew what the worker holds and give it what it has room for."""
        if request.incarnation > 0:
            # Nobody may have told of its earlier death: that of a whole node takes along the agent who would.
            self.leases.died(request.member, Incarnation(request.incarnation - 1))
        dropped = self.leases.renew(request.holding, request.member, request.incarnation, now)
        self._awaited.discard(request.member)
        leases: list[PromptLease] = []
        reason = ""
        if request.capacity > 0:
            leases, reason = self._grant(request, now)
        return LeaseReply(
            leases=tuple(leases), dropped=dropped, offer=offer, wait_reason=reason, stop=self.account.finished
        )

    def stream(self, request: StreamRequest, offer: Offer | None, now: float) -> StreamReply:
        """Keep the tokens made so far, which renews the leases."""
        for partial in request.partials:
            _check_piece(partial.piece)
        lease_ids = [partial.lease_id for partial in request.partials]
        dropped = self.leases.renew(lease_ids, request.member, request.incarnation, now)
        for partial in request.partials:
            if partial.lease_id not in dropped:
                self.leases.stream(partial.lease_id, partial.start, partial.piece, partial.prompt_tokens)
        return StreamReply(dropped=dropped, offer=offer)

    def complete(self, request: CompleteRequest) -> CompleteReply:
        """Admit what is new and fresh enough."""
        for completion in request.completions:
            self._check(completion)
        return CompleteReply(
            results=tuple(self._complete_one(request.member, completion) for completion in request.completions)
        )

    def died(self, member: MemberId, incarnation: Incarnation) -> None:
        """Free the samples of a dead worker."""
        self.leases.died(member, incarnation)

    def tick(self, now: float) -> None:
        """Free what passed its deadline."""
        self.leases.expire(now)

    # -- numbers -------------------------------------------------------------------------------------------------------

    @property
    def trained_at(self) -> int:
        """Step at which a group that completes now is trained."""
        return self.account.next_new_step + len(self.account.waiting) // self.settings.groups

    @property
    def ahead(self) -> int:
        """Samples admitted that no commit covers yet: waiting, open, dealt, or due again after a rewind."""
        account = self.account
        steps_in_front = account.next_new_step - 1 - account.head.step
        return account.samples_waiting + steps_in_front * self.settings.batch_samples

    # -- leases --------------------------------------------------------------------------------------------------------

    def _unfit(self, version: Version | None, trained_at: int) -> str:
        """Say why these weights cannot serve for a sample of that step; empty when they can."""
        if version is None:
            return "no weights yet"
        # What comes back would be refused as stale. Newer weights come: training goes on, or the head's snapshot is forced.
        too_old = is_stale(
            trained_at_step=trained_at,
            oldest_step=version.step,
            allowed_outdated_steps=self.settings.allowed_outdated_steps,
        )
        return "weights too old" if too_old else ""

    def _grant(self, request: LeaseRequest, now: float) -> tuple[list[PromptLease], str]:
        reason = self._unfit(request.version, self.account.next_new_step)
        if reason:
            return [], reason
        self.leases.forget_old_prefixes(self.trained_at - 1 - self.settings.allowed_outdated_steps)
        adopted = not self._awaited or now >= self._adopt_until
        keys = [key for key in self.leases.free() if adopted or key[0] not in self._inherited]
        keys = keys[: request.capacity]
        while len(keys) < request.capacity:
            reason = self._full() or self._unfit(request.version, self._trained_at_next())
            if reason:
                break
            prompt_id = self.account.cursor
            self._write(Leased(first=prompt_id, last=prompt_id))
            self.leases.want(prompt_id, range(self.settings.n_generation))
            keys += [(prompt_id, index) for index in range(self.settings.n_generation)][: request.capacity - len(keys)]
        return [self._lease_one(key, request, now) for key in keys], reason

    def _trained_at_next(self) -> int:
        """Step at which a group that is begun now is trained, when all before it are."""
        before = self.account.samples_waiting + len(self.leases)
        return self.account.next_new_step + before // self.settings.batch_samples

    def _full(self) -> str:
        """Say why no other group may be begun; empty when one may."""
        settings = self.settings
        under_way = self.ahead + len(self.leases)
        if under_way >= (settings.steps - self.account.head.step) * settings.batch_samples:
            return "enough for the steps that are left"
        allowed = may_lease(
            admitted_not_dealt=self.ahead,
            leased=len(self.leases),
            dealt_batch=settings.batch_samples,
            allowed_outdated_steps=settings.allowed_outdated_steps,
        )
        return "" if allowed else "staleness bound"

    def _lease_one(self, key: Key, request: LeaseRequest, now: float) -> PromptLease:
        return self.leases.grant(
            key,
            request.member,
            request.incarnation,
            now,
            row=self._rows.row(self._order.row(key[0])),
            seed=sampling_seed(self.settings.sampling_seed, *key),
        )

    # -- completions ---------------------------------------------------------------------------------------------------

    def _complete_one(self, member: MemberId, completion: Completion) -> Result:
        result = self._judge(completion)
        self.results[result] += 1
        key = (completion.prompt_id, completion.index)
        if result == "stale":
            self.leases.give_up(key, completion.lease_id)
        if result != "admitted":
            return result
        self._write(
            Admitted(
                prompt_id=completion.prompt_id,
                index=completion.index,
                reward=completion.reward,
                rewards=completion.rewards,
                tokens=len(completion.piece.tokens),
                prompt_length=len(completion.prompt_tokens),
                oldest_step=_oldest(completion.piece),
                member=member,
                payload=_pack(completion),
            )
        )
        self.leases.settle(key)
        return result

    def _judge(self, completion: Completion) -> Result:
        account = self.account
        if completion.prompt_id >= account.cursor:
            return "unknown"
        if account.holds(completion.prompt_id, completion.index):
            return "duplicate"
        too_old = is_stale(
            trained_at_step=self.trained_at,
            oldest_step=_oldest(completion.piece),
            allowed_outdated_steps=self.settings.allowed_outdated_steps,
        )
        return "stale" if too_old else "admitted"

    def _check(self, completion: Completion) -> None:
        key = (completion.prompt_id, completion.index)
        if key_of(completion.lease_id) != key:
            raise MessageError(
                f"lease {completion.lease_id} is not for sample {key}; nothing of the request was admitted"
            )
        if not 0 <= completion.index < self.settings.n_generation:
            raise MessageError(
                f"index {completion.index} is outside a group of {self.settings.n_generation}; nothing of the request was admitted"
            )
        if not completion.reward - completion.reward == 0.0:
            raise MessageError(f"sample {key} has the reward {completion.reward}; nothing of the request was admitted")
        if not completion.prompt_tokens or not completion.piece.tokens:
            raise MessageError(f"sample {key} has no tokens; nothing of the request was admitted")
        _check_piece(completion.piece)


def _check_piece(piece: Piece) -> None:
    if not len(piece.tokens) == len(piece.logprobs) == len(piece.versions):
        raise MessageError(
            f"{len(piece.tokens)} tokens with {len(piece.logprobs)} log-probs and {len(piece.versions)} versions; there must be one of each a token"
        )


def _oldest(piece: Piece) -> int:
    return min(version.step for version, _ in groupby(piece.versions))


def _pack(completion: Completion) -> bytes:
    piece = completion.piece
    runs = tuple(VersionRun(version.lineage, version.step, len(list(run))) for version, run in groupby(piece.versions))
    return msgspec.msgpack.encode(Payload(completion.prompt_tokens, piece.tokens, piece.logprobs, runs))
