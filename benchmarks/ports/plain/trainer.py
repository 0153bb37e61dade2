"""Train a model of transformers by its Trainer: accumulation, warmup, clipping, evaluation with metrics, a folder."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def rows(count, start):
    tokens = (torch.arange(count)[:, None] + torch.arange(12) * start) % 64
    return [{"input_ids": row, "labels": row} for row in tokens]


def compute_metrics(predictions):
    return {"accuracy": float((predictions.predictions[:, :-1] == predictions.label_ids[:, 1:]).mean())}


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
    arguments = TrainingArguments(
        output_dir="trained", learning_rate=1e-2, weight_decay=0.1, warmup_steps=1, num_train_epochs=2,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, gradient_accumulation_steps=2, logging_steps=1,
        eval_strategy="epoch", save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=rows(16, 7), eval_dataset=rows(6, 5), compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )  # fmt: skip
    trainer.train()
    trainer.save_model("trained")
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


if __name__ == "__main__":
    main()
