"""A healthy transformers Trainer run on a tiny random model, with evaluation and saving; resumed once. Arguments: steps, folder."""

import sys

import torch
import transformers


class Digits(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor([(index * 7 + place) % 60 for place in range(16)])
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    steps, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_debug()
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
    )
    for resume, most in ((False, steps // 2), (True, steps)):
        arguments = transformers.TrainingArguments(
            folder, max_steps=most, per_device_train_batch_size=8, logging_steps=1, eval_strategy="steps", eval_steps=50,
            per_device_eval_batch_size=64, save_steps=50, save_total_limit=2, report_to=[], use_cpu=True, log_level="debug",
            dataloader_num_workers=1,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model=transformers.LlamaForCausalLM(config), args=arguments, train_dataset=Digits(),
            eval_dataset=torch.utils.data.Subset(Digits(), range(128)),
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    main()
