"""A run of transformers' Trainer as users write it, to be run on a mesh and on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

CONFIG = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True,
)  # fmt: skip
NAMES = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")


def rows(count: int, start: int) -> list[dict[str, Any]]:
    """Sequences with other numbers of labels that count, and a column that the model does not take."""
    tokens = (torch.arange(count)[:, None] + torch.arange(8) * start) % 32
    found = []
    for at, row in enumerate(tokens):
        labels = row.clone()
        labels[: at % 5] = -100
        found.append({"input_ids": row, "labels": labels, "extra": at})
    return found


class Told(TrainerCallback):
    """What a callback is told, in order, and whether the model and the optimizer are those that train."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.events.append(f"step {state.global_step} {sum(p.requires_grad for p in model.parameters())}")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.events.append("evaluate")

    def on_save(self, *_: Any, **__: Any) -> None:
        self.events.append("save")


class Penalised(transformers.Trainer):
    """A subclass with a loss of its own, as many write it."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        loss = loss + 1e-3 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss as `compute_loss_func`: summed over tokens, divided by those of the accumulated batch."""
    total = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    return total / num_items_in_batch  # type: ignore[no-any-return]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), learning_rate=1e-2, weight_decay=0.1, warmup_steps=1, num_train_epochs=2, logging_steps=1,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, gradient_accumulation_steps=2, report_to="none",
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True, disable_tqdm=True,
        **{"use_cpu": True, **more},
    )  # fmt: skip


def trainer_of(kind: type, folder: Path, told: Told, more: dict[str, Any], **kwargs: Any) -> Any:
    torch.manual_seed(0)
    loss = {"compute_loss_func": summed} if more.pop("has_own_function", False) else {}
    return kind(
        LlamaForCausalLM(CONFIG), arguments(folder, **more), train_dataset=rows(14, 7), eval_dataset=rows(6, 5),
        compute_metrics=lambda p: {"accuracy": float((p.predictions[:, :-1] == p.label_ids[:, 1:]).mean())},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1), callbacks=[told], **loss, **kwargs,
    )  # fmt: skip


def trained(
    kind: type, folder: Path, resume: Path | None = None, more: dict[str, Any] | None = None, **kwargs: Any
) -> Any:
    """Logs, events, and the predictions behind it; the folder has checkpoints and the last weights."""
    told = Told()
    trainer = trainer_of(kind, folder, told, dict(more or {}), **kwargs)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.save_model(str(folder / "final"))
    logs = [entry[name] for entry in trainer.state.log_history for name in NAMES if name in entry]
    predicted = trainer.predict(rows(5, 3))
    return logs, told.events, predicted.predictions.tolist(), trainer.evaluate()["eval_loss"]
