"""The mean reward over held-out prompts at the sampling temperature: before (after the warm start) and after.

A function of the weights, the prompts and the seed alone. `python -m rl_runtime.evaluate RUN [SEGMENT]` evaluates a snapshot of a run,
the newest on storage by default.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from aimaster.settings import from_json
from aimaster.wire.checkpoint import Version
from aimaster.wire.places import RunPlaces
from rl_runtime.config import Evaluation, PolicySettings, chosen_device, policy_settings
from rl_runtime.data import load_heldout
from rl_runtime.models.base import Bundle, Tokenizer
from rl_runtime.models.load import load_model
from rl_runtime.rewards.desk import RewardDesk
from rl_runtime.rollout.engines import Engine, Generation, Request
from rl_runtime.rollout.make import make_engine

POLL_SECONDS = 0.01

Rows = Sequence[Mapping[str, str]]


def evaluate_weights(
    weights: Mapping[str, Tensor], bundle: Bundle, rows: Rows, settings: PolicySettings, *, beat: Callable[[], None]
) -> float:
    """Return the mean reward of these weights over the first `settings.evaluation.prompts` rows."""
    choice = settings.evaluation
    engine = make_engine(
        settings.engine,
        bundle,
        slots=choice.slots,
        temperature=choice.temperature,
        stop_texts=choice.stop_texts,
        device=chosen_device(settings.device),
        beat=beat,
    )
    engine.load(weights, Version(0, 0))
    desk = RewardDesk(
        settings.reward.weights, workers=settings.reward.workers, deadline_seconds=settings.reward.deadline_seconds
    )
    try:
        return mean_reward(engine, bundle.tokenizer, desk, rows[: choice.prompts], choice, beat=beat)
    finally:
        desk.close()


def mean_reward(
    engine: Engine, tokenizer: Tokenizer, desk: RewardDesk, rows: Rows, choice: Evaluation, *, beat: Callable[[], None]
) -> float:
    """Generate one completion for each row and return the mean of what they earn."""
    waiting = list(enumerate(rows))
    total, scored = 0.0, 0
    while scored < len(rows):
        beat()
        free = engine.slots - len(engine.in_work())
        for number, row in [waiting.pop() for _ in range(min(free, len(waiting)))]:
            prompt = tuple(tokenizer.encode(row["prompt"]))
            engine.add(
                Request(
                    key=str(number), prompt_tokens=prompt, seed=choice.seed + number, most_tokens=choice.most_tokens
                )
            )
        finished = engine.step()
        for generation in finished:
            _submit(desk, generation, tokenizer, rows)
        scores = desk.ready()
        total += sum(score.reward for score in scores)
        scored += len(scores)
        if not finished and not scores and not engine.in_work():
            time.sleep(POLL_SECONDS)
    return total / max(1, len(rows))


def _submit(desk: RewardDesk, generation: Generation, tokenizer: Tokenizer, rows: Rows) -> None:
    row = rows[int(generation.request.key)]
    text = tokenizer.decode(generation.tokens)
    desk.submit(generation.request.key, text, answer=row["answer"], prompt=row["prompt"])


def evaluate_run(run: Path, segment: Path | None = None) -> tuple[Version, float]:
    """Evaluate a snapshot of a run: a segment file, or the newest on its storage."""
    from easyckpt import read_weights

    places = RunPlaces(run)
    job = from_json(places.resolved.read_bytes())
    settings = policy_settings(job)
    segment = segment or _newest_flushed(Path(job.aimaster.snapshots.storage or places.storage))
    header, weights = read_weights(segment, prefix="model/")
    reward = evaluate_weights(weights, load_model(settings.model), load_heldout(job), settings, beat=lambda: None)
    return Version(header.lineage, header.step), reward


def _newest_flushed(storage: Path) -> Path:
    """Return the segment file of the newest checkpoint on storage."""
    from easyckpt.manifest import folder_name
    from easyckpt.storage import list_manifests

    newest = next(iter(list_manifests(storage, "policy")), None)
    if newest is None:
        raise FileNotFoundError(f"no checkpoint on {storage} yet")
    return storage / folder_name(newest) / newest.shards[0].file


def main() -> None:
    run, *rest = sys.argv[1:]
    version, reward = evaluate_run(Path(run), Path(rest[0]) if rest else None)
    print(f"step {version.step} (lineage {version.lineage}): mean reward {reward:.4f}")  # noqa: T201


if __name__ == "__main__":
    main()
