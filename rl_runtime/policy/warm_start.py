"""The supervised start of a fresh model: a few steps on rows with their answers, so that some completions earn a reward.

A function of the seed and the rows alone: whoever is told to begin, begins with the same weights.
"""

import random
from collections.abc import Callable, Sequence

import torch

from rl_runtime.algo.loss import token_logprobs
from rl_runtime.config import WarmStart
from rl_runtime.models.base import Bundle

BETAS = (0.9, 0.95)


def warm_start(
    bundle: Bundle, rows: Sequence[dict[str, str]], settings: WarmStart, *, device: str, beat: Callable[[], None]
) -> float | None:
    """Train in place; return the last loss, None where there were no steps. Leaves no optimizer state behind."""
    if not settings.steps:
        return None
    choose = random.Random(f"warm start {settings.seed}")  # noqa: S311 - repeatable, not secret
    parameters = [parameter for parameter in bundle.model.module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.0, betas=BETAS, weight_decay=0.0)
    loss = 0.0
    for step in range(settings.steps):
        beat()
        batch = [rows[choose.randrange(len(rows))] for _ in range(settings.rows)]
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) * 3 / settings.steps)
        loss = _step(bundle, batch, optimizer, parameters, device)
    optimizer.zero_grad(set_to_none=False)
    return loss


def _step(
    bundle: Bundle,
    batch: Sequence[dict[str, str]],
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    device: str,
) -> float:
    tokenizer = bundle.tokenizer
    prompts = [tokenizer.encode(row["prompt"]) for row in batch]
    answers = [[*tokenizer.encode(row["answer"], opening=False), tokenizer.eos] for row in batch]
    width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    taught = torch.zeros(len(batch), width - 1, dtype=torch.bool)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[number, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        taught[number, len(prompt) - 1 : len(prompt) + len(answer) - 1] = True
    ids, taught = ids.to(device), taught.to(device)
    logits = bundle.model.logits(bundle.model.hidden(ids)[:, :-1][taught])
    loss = -token_logprobs(logits, ids[:, 1:][taught]).mean()
    optimizer.zero_grad(set_to_none=False)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    return float(loss.detach())
