"""One member's model, gradient and optimizer. It knows nothing of peers, the controller or files.

    begin(step, batch) -> add(share) ... -> gradient -> (reduced elsewhere) -> apply(reduced, learning rate)

Parameters, gradient and both moments are four flat float32 tensors; what model and snapshot see are views of them. So the reduction
is of one bucket, the digest is of its bytes, and nothing moves in `apply` but the optimizer's own arithmetic. The gradient of a
share depends on (seed, step, share) and the weights alone, never on the member, nor on what else is in hand.
"""

from collections.abc import Callable, Iterator

import msgspec
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aimaster.wire.training import Share
from rl_runtime.algo.loss import LossSettings, Normaliser, policy_loss, token_logprobs
from rl_runtime.algo.packing import Layout, MicroBatch, micro_batches
from rl_runtime.config import OptimizerChoice
from rl_runtime.models.base import CausalModel

Beat = Callable[[], None]

LOGITS_AT_ONCE = 512
"""Tokens. Of more, the logits (one number for each word) are made part by part, and again in the backward pass, instead of kept."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The dealt batch that the gradient in hand belongs to."""

    step: int
    digest: str


class Figures(msgspec.Struct, kw_only=True):
    """Sums over what this member has computed of a batch."""

    loss: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    tokens: float = 0.0

    def means(self) -> dict[str, float]:
        tokens = max(1.0, self.tokens)
        return {"loss": self.loss, "kl": self.kl / tokens, "clipped_ratio": self.clipped / tokens}


class Trainer:
    """See the module."""

    def __init__(
        self,
        model: CausalModel,
        *,
        loss: LossSettings,
        optimizer: OptimizerChoice,
        micro_rows: int,
        seed: int,
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.figures = Figures()
        self.batch: Batch | None = None
        self.shares: set[int] = set()
        """Of the batch, those whose gradients are in hand."""
        self._loss = loss
        self._micro_rows = micro_rows
        self._seed = seed
        self._device = torch.device(device)
        self._beat: Beat = _nothing
        model.module.to(self._device)
        self._parameters = nn.Parameter(_flatten(model.module, self._device))
        self.gradient = torch.zeros_like(self._parameters, requires_grad=False)
        _attach_gradients(model.module, self.gradient)
        if self._device.type == "cpu":
            self._beat_in_blocks()
        self._first_moment = torch.zeros_like(self.gradient)
        self._second_moment = torch.zeros_like(self.gradient)
        self._largest_norm = optimizer.largest_norm
        # A fused kernel wants its counter beside the parameters.
        self._optimizer_step = torch.tensor(0.0, device=device if optimizer.kernel == "fused" else "cpu")
        self._optimizer = _make_optimizer(self._parameters, optimizer)
        self._optimizer.state[self._parameters] = {
            "step": self._optimizer_step,
            "exp_avg": self._first_moment,
            "exp_avg_sq": self._second_moment,
        }

    def begin(self, batch: Batch) -> None:
        """Start on a batch; what is in hand of another is dropped, of this one kept."""
        if batch != self.batch:
            self.drop()
            self.batch = batch

    def drop(self) -> None:
        """Forget the gradient in hand."""
        self.batch = None
        self.shares.clear()
        self.figures = Figures()
        self.gradient.zero_()

    def add(self, share: Share, *, norm: Normaliser, beat: Beat) -> None:
        """Add the gradient of a share, unless it is in hand already."""
        assert self.batch is not None  # noqa: S101 - `begin` comes first
        if share.number in self.shares:
            return
        torch.manual_seed(share_seed(self._seed, self.batch.step, share.number))
        self._beat = beat
        for micro in micro_batches(share.samples, rows=self._micro_rows, packed=self.model.lays_out):
            beat()
            mask = micro.mask.to(self._device)
            logprobs = self._logprobs(micro, mask)
            beat()
            parts = policy_loss(
                logprobs,
                micro.behaviour.to(self._device),
                micro.advantages.to(self._device),
                mask,
                norm=norm,
                settings=self._loss,
            )
            parts.loss.backward()  # type: ignore[no-untyped-call]
            self.figures.loss += float(parts.loss.detach())
            self.figures.kl += float(parts.kl_sum)
            self.figures.clipped += float(parts.clipped_sum)
            self.figures.tokens += float(mask.sum())
        self._beat = _nothing
        self.shares.add(share.number)

    def apply(self, reduced: Tensor, *, learning_rate: float) -> float:
        """Clip the reduced gradient, step the optimizer, drop what is in hand; return the norm before clipping."""
        gradient = reduced.to(self._device)
        norm = float(torch.linalg.vector_norm(gradient))
        if self._largest_norm and norm > self._largest_norm:
            gradient = gradient * (self._largest_norm / (norm + 1e-6))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._parameters.grad = gradient
        self._optimizer.step()
        self._parameters.grad = None
        self.drop()
        return norm

    def reset_optimizer(self) -> None:
        """Forget all moments, as at step 0."""
        for state in (self._first_moment, self._second_moment, self._optimizer_step):
            state.zero_()

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters by their checkpoint names: views, good until the next `apply`."""
        return dict(self.views(self._parameters.detach()))

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the parts of a flat tensor under the names of the parameters they belong to."""
        yield from _views(self.model.module, flat)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return all tensors a replica needs, as views: what is restored into them is in place."""
        return {
            "model": self.weights(),
            "exp_avg": dict(self.views(self._first_moment)),
            "exp_avg_sq": dict(self.views(self._second_moment)),
            "optimizer": {"step": self._optimizer_step},
        }

    def _beat_in_blocks(self) -> None:
        """Beat at each block of the model, there and back: on a CPU one pass takes seconds, and a silence of seconds looks like a hang."""

        def passed(_block: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._beat()
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(lambda _gradient: self._beat())  # type: ignore[no-untyped-call]

        lists = [part for part in self.model.module.modules() if isinstance(part, nn.ModuleList)]
        for block in max(lists, key=len, default=()):
            block.register_forward_hook(passed)

    def _logprobs(self, micro: MicroBatch, mask: Tensor) -> Tensor:
        """Return log-probs of the completion tokens; logits are made at those only."""
        layout = micro.layout
        if layout is not None:
            layout = Layout(positions=layout.positions.to(self._device), visible=layout.visible.to(self._device))
        wanted = mask.bool()
        hidden = self.model.hidden(micro.ids.to(self._device), layout).flatten(0, 1)
        sources, targets = micro.sources.to(self._device)[wanted], micro.targets.to(self._device)[wanted]
        if len(targets) <= LOGITS_AT_ONCE:
            flat = self._token_logprobs(hidden[sources], targets)
        else:
            pieces = zip(*(torch.split(part, LOGITS_AT_ONCE) for part in (hidden[sources], targets)), strict=True)
            flat = torch.cat([checkpoint(self._token_logprobs, *piece, use_reentrant=False) for piece in pieces])
        return torch.zeros_like(mask).masked_scatter(wanted, flat)

    def _token_logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return token_logprobs(self.model.logits(hidden), targets, temperature=self._loss.temperature)


def _nothing() -> None:
    """Stand for a beat while no share is computed."""


def share_seed(seed: int, step: int, share: int) -> int:
    """Return the seed of a share's randomness: the same whoever computes it."""
    return xxhash.xxh3_64_intdigest(f"{seed},{step},{share}".encode()) >> 1


def digest(reduced: Tensor) -> str:
    """Return the hash of a reduced gradient's bytes, by which members compare."""
    return xxhash.xxh3_128_hexdigest(reduced.detach().cpu().contiguous().numpy().data)


def _flatten(module: nn.Module, device: torch.device) -> Tensor:
    """Move all parameters into one tensor and make them views of it. A tied parameter appears once."""
    parameters = list(module.parameters())
    flat = torch.cat([parameter.detach().float().reshape(-1) for parameter in parameters]).to(device)
    for (_, view), parameter in zip(_views(module, flat), parameters, strict=True):
        parameter.data = view
    return flat


def _attach_gradients(module: nn.Module, gradient: Tensor) -> None:
    """Make every parameter's gradient a view of one tensor, into which backward adds."""
    for (_, view), parameter in zip(_views(module, gradient), module.parameters(), strict=True):
        parameter.grad = view


def _views(module: nn.Module, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    at = 0
    for name, parameter in module.named_parameters():
        yield name, flat[at : at + parameter.numel()].view(parameter.shape)
        at += parameter.numel()


def _make_optimizer(parameters: nn.Parameter, choice: OptimizerChoice) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if choice.name == "AdamW" else torch.optim.Adam
    return kind(
        [parameters],
        lr=0.0,
        betas=choice.betas,
        eps=choice.epsilon,
        weight_decay=choice.weight_decay,
        fused=choice.kernel == "fused",
        foreach=choice.kernel == "foreach",
    )
