"""A healthy DeepSpeed run, ZeRO of a given stage, gloo, bf16, with checkpoints. Arguments: steps, folder, stage."""

import sys

import deepspeed
import torch


def main() -> None:
    steps, folder, stage = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(steps):
        loss = engine(torch.randn(4, 32, dtype=torch.bfloat16)).float().square().mean()
        engine.backward(loss)
        engine.step()
        if step % 100 == 99:
            engine.save_checkpoint(folder, tag=f"step{step}")
            engine.load_checkpoint(folder, tag=f"step{step}")
    print("training finished", flush=True)


if __name__ == "__main__":
    main()
