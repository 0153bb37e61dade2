"""Runs of TRL's trainers as users write them, to be run on a mesh and on one device."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trained import CONFIG
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n", "o", "p", "q", "r", "s", "t"]


def tokenizer() -> Any:
    made = Tokenizer(
        models.WordLevel({word: at for at, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}, "<unk>")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=16
    )


def _text(at: int, step: int, count: int) -> str:
    return " " + " ".join(WORDS[(at + step * each) % 20] for each in range(count))


def _rows(count: int, kind: str) -> Dataset:
    """Sequences, or pairs of answers, of other lengths in each row."""
    if kind == "sft":
        return Dataset.from_list([
            {"prompt": _text(at, 1, 2 + at % 3), "completion": _text(at, 3, 2 + at % 5)} for at in range(count)
        ])  # fmt: skip
    return Dataset.from_list([
        {"prompt": _text(at, 1, 2 + at % 3), "chosen": _text(at, 3, 2 + at % 4), "rejected": _text(at, 7, 1 + at % 5)}
        for at in range(count)
    ])  # fmt: skip


PLAIN: dict[str, Any] = {"sft": (SFTTrainer, SFTConfig, {}), "dpo": (DPOTrainer, DPOConfig, {"beta": 0.5})}


def tuned(
    kind: str,
    made: type,
    folder: Path,
    resume: Path | None = None,
    peft: Any = None,
    checkpointing: bool = False,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Logs of all steps; the folder has checkpoints and the last weights."""
    warnings.filterwarnings("ignore")
    _, config, more = PLAIN[kind]
    arguments = config(
        str(folder), learning_rate=1e-2, num_train_epochs=2, logging_steps=1, per_device_train_batch_size=4,
        per_device_eval_batch_size=4, gradient_accumulation_steps=2, report_to="none", eval_strategy="epoch",
        save_strategy="epoch", disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=checkpointing,
        pad_to_multiple_of=16, max_length=16, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    if kind == "dpo" and peft is None:
        kwargs["ref_model"] = LlamaForCausalLM(copy.deepcopy(CONFIG))
    if peft is not None:
        kwargs["peft_config"] = peft
    trainer: Any = made(
        model=LlamaForCausalLM(copy.deepcopy(CONFIG)), args=arguments, train_dataset=_rows(14, kind),
        eval_dataset=_rows(6, kind), processing_class=tokenizer(), **kwargs,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.save_model(str(folder / "final"))
    return [
        {name: value for name, value in entry.items() if not name.endswith(("_runtime", "_second"))}
        for entry in trainer.state.log_history
        if "train_loss" not in entry
    ]
