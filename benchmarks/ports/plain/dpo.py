"""Train a language model on preferences by DPO: a policy, a frozen reference, log-probabilities of whole answers."""

import copy

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

beta, vocab_size = 0.1, 64


def rows(count):
    found = []
    for i in range(count):
        prompt, chosen, rejected = torch.arange(3) + i, torch.arange(5) * i + 1, torch.arange(4) * (i + 3) + 2
        found.append({"prompt": prompt % vocab_size, "chosen": chosen % vocab_size, "rejected": rejected % vocab_size})
    return found


def collate(examples):
    """Chosen answers in the first half of the batch, rejected ones in the second; answers count in the labels."""
    sequences = [(e["prompt"], e[side]) for side in ("chosen", "rejected") for e in examples]
    ids, labels = torch.zeros(len(sequences), 9, dtype=torch.long), torch.full((len(sequences), 9), -100)
    mask = torch.zeros_like(ids)
    for i, (prompt, answer) in enumerate(sequences):
        length = len(prompt) + len(answer)
        ids[i, :length], mask[i, :length] = torch.cat([prompt, answer]), 1
        labels[i, len(prompt) : length] = answer
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def get_batch_logps(logits, labels):
    labels = labels[:, 1:].clone()
    loss_mask = labels != -100
    labels[labels == -100] = 0
    per_token = torch.gather(logits[:, :-1].log_softmax(-1), 2, labels.unsqueeze(2)).squeeze(2)
    return (per_token * loss_mask).sum(-1)


def concatenated_forward(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return get_batch_logps(logits, batch["labels"]).chunk(2)


def dpo_loss(policy, reference, batch):
    policy_chosen, policy_rejected = concatenated_forward(policy, batch)
    with torch.no_grad():
        reference_chosen, reference_rejected = concatenated_forward(reference, batch)
    chosen_rewards = beta * (policy_chosen - reference_chosen)
    rejected_rewards = beta * (policy_rejected - reference_rejected)
    losses = -F.logsigmoid(chosen_rewards - rejected_rewards)
    accuracies = (chosen_rewards > rejected_rewards).float()
    return losses.mean(), {
        "rewards/accuracies": accuracies.mean(),
        "rewards/margins": (chosen_rewards - rejected_rewards).mean().detach(),
    }


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    policy = LlamaForCausalLM(config)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    loader = DataLoader(rows(12), batch_size=4, collate_fn=collate)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    log = []
    policy.train()
    for batch in loader:
        loss, metrics = dpo_loss(policy, reference, batch)
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0).item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        log += [loss.item(), grad_norm, *(value.item() for value in metrics.values())]
    policy.eval()
    with torch.no_grad():
        loss, metrics = dpo_loss(policy, reference, collate(rows(6)[3:]))
        log += [loss.item(), *(value.item() for value in metrics.values())]
    torch.save(policy.state_dict(), "ckpt.pt")
    return log


if __name__ == "__main__":
    main()
