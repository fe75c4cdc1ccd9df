"""A healthy torchrun job: FSDP2 with a checkpoint written and read back by torch.distributed.checkpoint. Arguments: steps, folder."""

import logging
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    steps, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.DEBUG, format="%(asctime)s,%(msecs)03d %(levelname)s %(name)s: %(message)s")
    log = logging.getLogger("fsdp")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.info("iteration %d/%d loss %.5f", step, steps, loss.item())
        if step % 50 == 49:
            state = {"model": model.state_dict()}
            dcp.save(state, checkpoint_id=f"{folder}/step_{step}")
            dcp.load(state, checkpoint_id=f"{folder}/step_{step}")
            log.info("saved and loaded step %d", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
