"""Policy-gradient losses of one micro-batch, from real importance ratios.

`logprobs` are of the weights being trained, `behaviour` those the engine reported when it sampled, so the ratio
r = exp(logprobs - behaviour) is what the papers mean by it, however old the sample is. All are [rows, tokens]; `mask` is 1 on
completion tokens; `advantages` [rows]. The normalisers come from the whole dealt batch, so that parts of it add up.

GRPO, DAPO   min(r A, clip(r, 1 - low, 1 + high) A), for A < 0 not below c A (dual clip, Ye et al. 2020)
GSPO         as GRPO with the sequence's ratio (exp of the mean log-ratio), gradients by token (Zheng et al. 2025, section 4.3)
AIPO         sg(min(r, rho)) A log p (LlamaRL, Wu et al. 2025)
CISPO        sg(clip(r, 1 - low, 1 + high)) A log p (MiniMax-M1, 2025)
"""

from typing import Literal

import msgspec
import torch
from torch import Tensor

LARGEST_LOG_RATIO = 20.0
"""exp beyond it would only overflow; every form clips far below."""

Variant = Literal["grpo", "dapo", "gspo", "cispo"]
LossType = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"]


class LossSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Names and meaning as in [train.train_policy]."""

    variant: Variant = "grpo"
    loss_type: LossType = "token-mean"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    lower_bound_ratio: float = 3.0
    """Dual clip constant c."""
    aipo_rho: float | None = None
    """Given, the loss is AIPO's with this cap."""
    unbiased_loss_max_tokens: int | None = None
    """Dr.GRPO: this constant in place of each sequence's own length."""
    temperature: float = 1.0
    """Divides the logits, as at sampling."""


class Normaliser(msgspec.Struct, frozen=True, kw_only=True):
    """Of the whole dealt batch, whatever part of it is at hand."""

    tokens: int
    sequences: int


class LossParts(msgspec.Struct, frozen=True, kw_only=True):
    """What one micro-batch adds."""

    loss: Tensor
    """Scalar; the sum over all micro-batches of a dealt batch is the loss."""
    kl_sum: Tensor
    """Sum over tokens of behaviour - current log-prob (k1), for figures."""
    clipped_sum: Tensor
    """Tokens whose ratio lies outside the clip range, for figures."""


def policy_loss(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, mask: Tensor, *, norm: Normaliser, settings: LossSettings
) -> LossParts:
    """Return the loss of a micro-batch and what figures need of it."""
    log_ratio = (logprobs - behaviour) * mask
    if settings.variant == "gspo":
        log_ratio = sequence_log_ratio(log_ratio, mask)
    ratio = torch.exp(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
    advantage = advantages[:, None]
    low, high = 1.0 - settings.epsilon_low, 1.0 + settings.epsilon_high
    if settings.aipo_rho is not None:
        objective = ratio.detach().clamp(max=settings.aipo_rho) * advantage * logprobs
    elif settings.variant == "cispo":
        objective = ratio.detach().clamp(low, high) * advantage * logprobs
    else:
        objective = torch.min(ratio * advantage, ratio.clamp(low, high) * advantage)
        floor = settings.lower_bound_ratio * advantage
        objective = torch.where(advantage < 0, torch.max(objective, floor), objective)
    loss = -aggregate(objective, mask, norm=norm, settings=settings)
    with torch.no_grad():
        kl_sum = ((behaviour - logprobs) * mask).sum()
        clipped_sum = (((ratio < low) | (ratio > high)) * mask).sum()
    return LossParts(loss=loss, kl_sum=kl_sum, clipped_sum=clipped_sum)


def sequence_log_ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return GSPO's log-ratio: the sequence's mean in value, the token's own in gradient."""
    mean = (log_ratio * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1.0)
    return mean.detach() + log_ratio - log_ratio.detach()


def aggregate(objective: Tensor, mask: Tensor, *, norm: Normaliser, settings: LossSettings) -> Tensor:
    """Return the share of a micro-batch in the mean that `loss_type` names."""
    objective = objective * mask
    if settings.loss_type == "token-mean":
        return objective.sum() / norm.tokens
    if settings.loss_type == "token-sum":
        return objective.sum()
    if settings.loss_type == "seq-mean-token-sum":
        return objective.sum() / norm.sequences
    if settings.unbiased_loss_max_tokens is not None:
        return objective.sum() / (settings.unbiased_loss_max_tokens * norm.sequences)
    return (objective.sum(1) / mask.sum(1).clamp(min=1.0)).sum() / norm.sequences


def token_logprobs(logits: Tensor, tokens: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return log p of `tokens` [...] under `logits` [..., vocabulary] at a sampling temperature."""
    scaled = logits.float() / temperature if temperature != 1.0 else logits.float()
    return scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(scaled, -1)
