"""Fine-tune a T5 to reverse its input: Adafactor, padded pairs, answers generated and scored after each epoch."""

import torch
from torch.utils.data import DataLoader
from transformers import Adafactor, T5Config, T5ForConditionalGeneration


def collate(numbers):
    source, target = torch.zeros(len(numbers), 8, dtype=torch.long), torch.full((len(numbers), 7), -100)
    for i, number in enumerate(numbers):
        words = (torch.arange(3 + number % 4) * (number + 1)) % 30 + 2
        source[i, : len(words) + 1] = torch.cat([words, torch.ones(1, dtype=torch.long)])
        target[i, : len(words)] = words.flip(0)
    return {"input_ids": source, "attention_mask": (source > 0).long(), "labels": target}


def main():
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=32,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
    train_loader = DataLoader(range(10), batch_size=4, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(range(10, 13), batch_size=3, collate_fn=collate)
    optimizer = Adafactor(model.parameters(), lr=1e-2, relative_step=False, scale_parameter=False, warmup_init=False)
    log = []
    for _ in range(2):
        model.train()
        for data in train_loader:
            outputs = model(input_ids=data["input_ids"], attention_mask=data["attention_mask"], labels=data["labels"])
            loss = outputs[0]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log.append(loss.item())
        model.eval()
        with torch.no_grad():
            for data in val_loader:
                generated = model.generate(input_ids=data["input_ids"], attention_mask=data["attention_mask"],
                                           max_new_tokens=2, num_beams=2)  # fmt: skip
                log.append(generated.sum().item())
    torch.save(model.state_dict(), "ckpt.pt")
    return log


if __name__ == "__main__":
    main()
