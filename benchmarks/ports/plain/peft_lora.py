"""Train adapters of a Llama by peft: trainable parameters counted, padded batches, adapters in a folder alone."""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup


def collate(lengths):
    ids, mask = torch.zeros(len(lengths), 10, dtype=torch.long), torch.zeros(len(lengths), 10, dtype=torch.long)
    for i, length in enumerate(lengths):
        ids[i, :length], mask[i, :length] = (torch.arange(length) * int(length) + 1) % 64, 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def main():
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )
    peft_config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(model, peft_config)
    trainable, everything = model.get_nb_trainable_parameters()
    train_dataloader = DataLoader([4, 7, 9, 5, 6, 8, 3, 10, 7, 4, 5], batch_size=4, shuffle=True, collate_fn=collate)
    eval_dataloader = DataLoader([6, 5, 9, 4, 8, 7], batch_size=4, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=1, num_training_steps=6)
    log = [trainable / everything]
    for _ in range(2):
        model.train()
        for batch in train_dataloader:
            outputs = model(**batch)
            loss = outputs.loss
            log.append(loss.detach().item())
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            log += [outputs.loss.item(), outputs.logits.argmax(-1).sum().item()]
    model.save_pretrained("adapter")
    return log


if __name__ == "__main__":
    main()
