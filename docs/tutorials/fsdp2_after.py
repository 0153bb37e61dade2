"""torchrun --nproc-per-node 2 fsdp2_after.py"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, DistributedSampler
from toy import Model, dataset, loss_fn

import autopar


def main() -> list[float]:
    dist.init_process_group()
    torch.manual_seed(0)
    model = autopar.parallelize(Model(), "fsdp=-1", loss_fn=loss_fn, batch="local")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = dataset()
    sampler = DistributedSampler(data, shuffle=False)
    losses = []
    for x, y in DataLoader(data, batch_size=4, sampler=sampler):
        loss = model.forward_backward(x, y)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dcp.save({"model": model.state_dict()}, checkpoint_id="checkpoint")
    if dist.get_rank() == 0:
        print(losses)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
