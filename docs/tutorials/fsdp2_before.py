"""torchrun --nproc-per-node 2 fsdp2_before.py"""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from toy import Model, dataset, loss_fn


def main() -> list[float]:
    dist.init_process_group()
    torch.manual_seed(0)
    model = Model()
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = dataset()
    sampler = DistributedSampler(data, shuffle=False)
    losses = []
    for x, y in DataLoader(data, batch_size=4, sampler=sampler):
        loss = loss_fn(model, x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    dcp.save({"model": model.state_dict()}, checkpoint_id="checkpoint")
    if dist.get_rank() == 0:
        print(losses)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
