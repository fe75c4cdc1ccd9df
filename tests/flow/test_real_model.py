"""SmolLM2-135M on GSM8K's rows: the user's own model folder and data set through two flags, trained, accounted for, kept."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from easyckpt import read_weights
from rl_runtime.policy.origin import find_segment
from tests.fakes.smollm2 import real_model
from tests.flow.jobs import audit, job

pytestmark = pytest.mark.timeout(900)

TWO_STEPS = (
    *("--train.max_num_steps", "2", "--train.train_batch_per_replica", "4", "--train.train_policy.mini_batch", "4"),
    *("--rollout.n_generation", "2", "--rollout.batch_size", "2", "--rollout.max_response_length", "16"),
    *("--aimaster.heldout_prompts", "2", "--train.optm_warmup_steps", "0"),
)
"""Two prompts with two answers of at most 16 tokens each."""


def test_two_steps_of_the_real_model_on_the_real_rows(tmp_path: Path, gsm8k_folder: Path, root: Path) -> None:
    """Both steps are committed without an incident, 0 lost, 0 duplicate; the checkpoint is the model, moved by two small steps."""
    model = real_model()
    rewards = '{math_verify = 1.0, "tests.fakes.rewards:brevity" = 1.0}'
    with job(
        tmp_path / "run",
        *("examples/smollm2.toml", *TWO_STEPS, "--aimaster.task", ""),
        *("--policy.model_name_or_path", str(model), "--train.train_policy.dataset.name", str(gsm8k_folder)),
        *("--aimaster.prompt_template", "Question: {prompt}\nAnswer:", "--train.train_policy.reward_function", rewards),
        environment={"PYTHONPATH": str(root)},
    ) as one:
        assert one.wait(420) == 0, one.story()
        summary = json.loads(one.places.summary.read_bytes())
        assert summary["steps"] == 2
        assert summary["incidents"] == [], "a slow phase is no hang"
        report = audit(one.run)
        assert (report["lost"], report["duplicate"], report["trained"]) == (0, 0, 8)
        before = load_file(model / "model.safetensors")
        header, after = read_weights(find_segment(one.run), prefix="model/")
        assert header.step == 2
        assert before.keys() == after.keys()
        moved = [float((after[name] - tensor).abs().max()) for name, tensor in before.items()]
        assert 0 < max(moved) < 1e-4
        assert all(torch.isfinite(tensor).all() for tensor in after.values())
