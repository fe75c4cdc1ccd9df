"""A healthy Accelerate loop under torchrun, with tracking and a saved state. Arguments: steps, folder."""

import logging
import sys

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger


def main() -> None:
    steps, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s - %(levelname)s - %(name)s - %(message)s")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    log = get_logger(__name__, log_level="DEBUG")
    log.info(accelerator.state, main_process_only=False)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(steps * 8, 16)), batch_size=4)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    for step, (row,) in enumerate(rows):
        with accelerator.accumulate(model):
            loss = model(row).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        log.info("step %d loss %.5f", step, loss.item(), main_process_only=False)
        if step % 200 == 199:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()
            accelerator.load_state(folder)
    accelerator.end_training()


if __name__ == "__main__":
    main()
