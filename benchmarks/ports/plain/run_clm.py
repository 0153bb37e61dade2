"""Train a causal language model of transformers by a loop: two groups, a schedule, accumulation, perplexity."""

import math

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

gradient_accumulation_steps, block_size = 2, 16


def grouped(rows, start):
    tokens = torch.arange(rows * block_size) * start % 64
    return [{"input_ids": block, "labels": block} for block in tokens.view(rows, block_size)]


def main():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=block_size, embd_pdrop=0.0,
                        attn_pdrop=0.0, resid_pdrop=0.0)  # fmt: skip
    model = GPT2LMHeadModel(config)
    train_dataloader = DataLoader(grouped(16, 7), shuffle=True, collate_fn=default_data_collator, batch_size=4)
    eval_dataloader = DataLoader(grouped(6, 5), collate_fn=default_data_collator, batch_size=4)
    no_decay = ["bias", "ln_1.weight", "ln_2.weight", "ln_f.weight"]
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.1},
            {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
        ],
        lr=5e-3,
    )
    lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=4)
    log = []
    for epoch in range(2):
        model.train()
        total_loss = 0
        for step, batch in enumerate(train_dataloader):
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            loss = loss / gradient_accumulation_steps
            loss.backward()
            if step % gradient_accumulation_steps == gradient_accumulation_steps - 1:
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(outputs.loss.repeat(len(batch["input_ids"])))
        eval_loss = torch.mean(torch.cat(losses))
        log += [epoch, total_loss.item() / len(train_dataloader), eval_loss.item(), math.exp(eval_loss)]
    model.save_pretrained("clm")
    return log


if __name__ == "__main__":
    main()
