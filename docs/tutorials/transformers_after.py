"""torchrun --nproc-per-node 2 transformers_after.py"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from toy import LENGTH, VOCABULARY, dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import autopar

CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH,
)  # fmt: skip


def main() -> list[float]:
    dist.init_process_group()
    torch.manual_seed(0)
    model = autopar.parallelize(LlamaForCausalLM(CONFIG), "tp=2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 4)
    losses = []
    for tokens, _ in DataLoader(dataset(), batch_size=8):
        loss = model.forward_backward(input_ids=tokens, labels=tokens, use_cache=False)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = model.full_state_dict()
    if dist.get_rank() == 0:
        model.original.save_pretrained("llama", state_dict=weights)
        print(losses)
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
