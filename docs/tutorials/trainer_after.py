"""torchrun --nproc-per-node 2 trainer_after.py"""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from toy import LENGTH, VOCABULARY, dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import autopar

CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
)  # fmt: skip


def main() -> list[float]:
    dist.init_process_group()
    torch.manual_seed(0)
    model = autopar.parallelize(LlamaForCausalLM(CONFIG), "dp=2", microbatches=2)
    decayed = [p for name, p in model.named_parameters() if "norm" not in name and not name.endswith("bias")]
    others = [p for name, p in model.named_parameters() if "norm" in name or name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    loader = DataLoader(dataset(), batch_size=8)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, len(loader))
    losses = []
    for tokens, _ in loader:
        loss = model.forward_backward(input_ids=tokens, labels=tokens)
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
