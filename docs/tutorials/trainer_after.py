"""torchrun --nproc-per-node 2 trainer_after.py"""

import torch
from toy import LENGTH, VOCABULARY, dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from autopar.integrations.transformers import Trainer

CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False,
)  # fmt: skip


def main() -> list[float]:
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    arguments = TrainingArguments(
        output_dir="trained",
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=1,
        num_train_epochs=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"input_ids": tokens, "labels": tokens} for tokens, _ in dataset()]
    trainer = Trainer(model, arguments, train_dataset=data, mesh="dp=2")
    trainer.train()
    trainer.save_model("llama")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(losses)
    return losses


if __name__ == "__main__":
    main()
