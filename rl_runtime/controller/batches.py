"""From complete groups to a batch that can be dealt: filter, advantages, shares, digest.

    waiting groups -> (groups without spread are filtered) -> batch of whole groups -> rewards (permuted, in the control)
    -> advantages -> samples in order -> shares by tokens -> digest

Pure, and repeatable from the ledger: after a restart the same groups give the same batch, digest included.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import msgspec
import xxhash

from aimaster.wire.checkpoint import Version
from aimaster.wire.training import Sample, Share
from rl_runtime.algo.advantage import group_advantages, has_spread, overlong_penalty
from rl_runtime.algo.prefixes import untrained_prefixes
from rl_runtime.controller.account import Account
from rl_runtime.controller.settings import ControllerSettings
from rl_runtime.controller.shares import cut
from rl_runtime.records import Admitted, Dealt, Filtered, Payload

FILTER_BATCHES = 10
"""After so many batches' worth of filtered groups in a row, a group is dealt whatever its spread: else a perfect policy never ends."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A dealt batch with its samples."""

    dealt: Dealt
    samples: tuple[Sample, ...]
    loss_tokens: int
    reward_mean: float
    staleness_mean: float
    """Mean over tokens of the steps between the weights that made them and those they train."""

    def shares(self, numbers: Sequence[int]) -> tuple[Share, ...]:
        """Return these shares with their samples."""
        return tuple(
            Share(number=number, samples=tuple(self.samples[position] for position in self.dealt.shares[number]))
            for number in numbers
        )


def to_filter(account: Account, settings: ControllerSettings) -> Iterator[Filtered]:
    """Yield the waiting groups that teach nothing, as long as the policy is not perfect anyway."""
    if not settings.filter_groups:
        return
    room = FILTER_BATCHES * settings.groups - account.filtered_in_a_row
    for prompt_id in account.waiting:
        if room > 0 and not _teaches(account.groups[prompt_id], settings.filter_metrics):
            room -= 1
            yield Filtered(prompt_id=prompt_id)


def next_prompts(account: Account, settings: ControllerSettings) -> tuple[int, ...] | None:
    """Return the groups of the next batch in order of completion (after a rewind: those of the batch due again), None when too few wait."""
    due = account.due_again
    if due is not None:
        return due.prompts
    if len(account.waiting) < settings.groups:
        return None
    return tuple(prompt_id for prompt_id, _ in zip(account.waiting, range(settings.groups), strict=False))


def make_batch(account: Account, settings: ControllerSettings, prompts: tuple[int, ...], now: float) -> Batch:
    """Return the batch of these groups for the step after the head: the same however often it is asked for."""
    step, due = account.head.step + 1, account.batches.get(account.head.step + 1)
    admitted = [account.groups[prompt_id][index] for prompt_id in prompts for index in range(settings.n_generation)]
    samples = tuple(
        _sample(one, advantage) for one, advantage in zip(admitted, _advantages(admitted, settings, step), strict=True)
    )
    samples = _without_contradictions(samples, settings)
    tokens = [one.prompt_length + one.tokens for one in admitted]
    shares = due.shares if due is not None else cut(tokens, per_share=settings.mini_batch, at_least=settings.n_init)
    dealt = Dealt(
        step=step,
        lineage=account.head.lineage,
        batch_digest=batch_digest(samples),
        prompts=prompts,
        shares=shares,
        share_tokens=tuple(sum(tokens[position] for position in share) for share in shares),
        at=now,
    )
    loss_tokens = sum(len(sample.tokens) - sample.untrained for sample in samples)
    return Batch(
        dealt=dealt,
        samples=samples,
        loss_tokens=loss_tokens,
        reward_mean=sum(one.reward for one in admitted) / len(admitted),
        staleness_mean=step - 1 - sum(map(_steps_of, samples)) / max(1, sum(one.tokens for one in admitted)),
    )


def batch_digest(samples: Sequence[Sample]) -> str:
    """Hash the samples as they are trained: tokens, log-probs, versions, rewards and advantages."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(samples))


def _steps_of(sample: Sample) -> int:
    """Sum over the sample's tokens of the steps of their versions."""
    return sum(version.step * len(list(run)) for version, run in groupby(sample.versions))


def _teaches(group: Mapping[int, Admitted], metrics: Sequence[str]) -> bool:
    if not metrics:
        return has_spread([one.reward for one in group.values()])
    return any(has_spread([one.rewards.get(metric, 0.0) for one in group.values()]) for metric in metrics)


def _advantages(admitted: Sequence[Admitted], settings: ControllerSettings, step: int) -> Iterator[float]:
    rewards = [one.reward + _length_penalty(one.tokens, settings) for one in admitted]
    if settings.shuffle_rewards:
        # No secret is at stake: the permutation must only be the same at each replay.
        random.Random(f"{settings.seed},{step}").shuffle(rewards)  # noqa: S311
    for start in range(0, len(rewards), settings.n_generation):
        yield from group_advantages(
            rewards[start : start + settings.n_generation],
            unbiased=settings.unbiased_advantage,
            lowest=settings.advantage_low,
            highest=settings.advantage_high,
        )


def _without_contradictions(samples: tuple[Sample, ...], settings: ControllerSettings) -> tuple[Sample, ...]:
    """Mark the beginnings that are not to be trained, group by group."""
    if settings.min_prefix_tokens is None:
        return samples
    marked: list[Sample] = []
    for start in range(0, len(samples), settings.n_generation):
        group = samples[start : start + settings.n_generation]
        lengths = untrained_prefixes(
            [one.tokens for one in group], [one.advantage for one in group], at_least=settings.min_prefix_tokens
        )
        marked += [msgspec.structs.replace(one, untrained=length) for one, length in zip(group, lengths, strict=True)]
    return tuple(marked)


def _length_penalty(tokens: int, settings: ControllerSettings) -> float:
    if not settings.overlong_buffer:
        return 0.0
    return overlong_penalty(
        tokens, longest=settings.max_response_length, buffer=settings.overlong_buffer, factor=settings.overlong_factor
    )


def _sample(one: Admitted, advantage: float) -> Sample:
    payload = msgspec.msgpack.decode(one.payload, type=Payload)
    return Sample(
        prompt_id=one.prompt_id,
        index=one.index,
        prompt_tokens=payload.prompt_tokens,
        tokens=payload.tokens,
        logprobs=payload.logprobs,
        versions=tuple(
            version for run in payload.versions for version in (Version(run.lineage, run.step),) * run.tokens
        ),
        reward=one.reward,
        advantage=advantage,
    )
