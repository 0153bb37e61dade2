"""python transformers_before.py"""

import torch
from torch.utils.data import DataLoader
from toy import LENGTH, VOCABULARY, dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH,
)  # fmt: skip


def main() -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 4)
    losses = []
    for tokens, _ in DataLoader(dataset(), batch_size=8):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained("llama")
    print(losses)
    return losses


if __name__ == "__main__":
    main()
