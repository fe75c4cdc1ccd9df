"""A healthy vLLM engine: batches of prompts, a weight reload between them. Arguments: batches, model folder."""

import sys

from vllm import LLM, SamplingParams


def main() -> None:
    batches, model = int(sys.argv[1]), sys.argv[2]
    engine = LLM(
        model, enforce_eager=True, max_model_len=512, max_num_seqs=16, dtype="float32", disable_log_stats=False
    )
    for number in range(batches):
        prompts = [f"{number}-{place}: the capital of country {place} is" for place in range(16)]
        for answer in engine.generate(prompts, SamplingParams(max_tokens=24, temperature=1.0)):
            print(answer.outputs[0].text.replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
