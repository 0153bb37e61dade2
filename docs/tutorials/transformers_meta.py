"""torchrun --nproc-per-node 2 transformers_meta.py: goes on from the files that transformers_before.py wrote."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from toy import dataset
from transformers import AutoConfig, AutoModelForCausalLM

import autopar


def main() -> list[float]:
    dist.init_process_group()
    config = AutoConfig.from_pretrained("llama")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model = autopar.parallelize(model, "fsdp=2", zero=3, weights="llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for tokens, _ in DataLoader(dataset(), batch_size=8):
        losses.append(model.forward_backward(input_ids=tokens, labels=tokens, use_cache=False).item())
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
