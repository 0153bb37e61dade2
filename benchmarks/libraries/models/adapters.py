"""Adapters of transformers models, and losses of sentence embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.libraries.case import ROWS, Case, Table, tokens

WORDS = 64


def _hugging(kind: str) -> nn.Module:
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    if kind == "bert":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_labels=3, **sizes))
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    if kind == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=WORDS,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )
    return T5ForConditionalGeneration(
        T5Config(vocab_size=WORDS, d_model=32, d_ff=64, num_layers=2, num_heads=4, d_kv=8, decoder_start_token_id=0)
    )


PEFT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lora": ("llama", "LoraConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1}),
    "dora": ("llama", "LoraConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    "rslora": ("llama", "LoraConfig", {"r": 4, "target_modules": "all-linear", "use_rslora": True}),
    "adalora": (
        "llama",
        "AdaLoraConfig",
        {"target_modules": ["q_proj", "v_proj"], "init_r": 4, "target_r": 2, "total_step": 10},
    ),
    "ia3": (
        "llama",
        "IA3Config",
        {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "loha": ("llama", "LoHaConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "lokr": ("llama", "LoKrConfig", {"r": 4, "target_modules": ["q_proj", "v_proj"]}),
    "oft": ("llama", "OFTConfig", {"oft_block_size": 4, "r": 0, "target_modules": ["q_proj", "v_proj"]}),
    "boft": ("llama", "BOFTConfig", {"boft_block_size": 4, "target_modules": ["q_proj"]}),
    "vera": ("llama", "VeraConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "fourierft": ("llama", "FourierFTConfig", {"n_frequency": 20, "target_modules": ["q_proj"]}),
    "ln": ("llama", "LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "hra": ("llama", "HRAConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "bone": ("llama", "MissConfig", {"r": 4, "target_modules": ["q_proj"]}),
    "prompt": ("gpt2", "PromptTuningConfig", {"num_virtual_tokens": 4}),
    "p_tuning": ("gpt2", "PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "prefix": ("gpt2", "PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "bert_lora": ("bert", "LoraConfig", {"r": 4, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"}),
    "t5_lora": ("t5", "LoraConfig", {"r": 4, "target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"}),
}


def _peft(kind: str, config: str, options: dict[str, Any]) -> Case:
    import peft

    model = peft.get_peft_model(_hugging(kind), getattr(peft, config)(**{"task_type": "CAUSAL_LM", **options}))
    batch = {"input_ids": tokens(), "attention_mask": torch.ones(ROWS, 16, dtype=torch.long)}
    batch["labels"] = torch.randint(0, 3, (ROWS,)) if kind == "bert" else tokens()
    return Case(model, batch, of_loss)


def of_loss(model: nn.Module, **batch: Tensor) -> Any:
    return model(**batch).loss


def _sentences() -> nn.Module:
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    class Tiny(nn.Module):
        """A Transformer module of the package without its tokenizer."""

        def __init__(self) -> None:
            super().__init__()
            self.auto_model = BertModel(
                BertConfig(
                    vocab_size=WORDS, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
                )
            )

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            out = self.auto_model(**features).last_hidden_state
            return {**features, "token_embeddings": out}

    return SentenceTransformer(modules=[Tiny(), models.Pooling(32), models.Normalize()])


def _sentence_loss(name: str) -> Case:
    from sentence_transformers import losses

    inner = _sentences()
    options: dict[str, Any] = {
        "SoftmaxLoss": {"sentence_embedding_dimension": 32, "num_labels": 3},
        "MatryoshkaLoss": {"loss": losses.MultipleNegativesRankingLoss(inner), "matryoshka_dims": [32, 16]},  # type: ignore[arg-type]
    }.get(name, {})
    loss = getattr(losses, name)(inner, **options)
    labels = (
        torch.randint(0, 2, (ROWS,)).float()
        if name in ("CosineSimilarityLoss", "CoSENTLoss", "ContrastiveLoss")
        else torch.randint(0, 3, (ROWS,))
    )
    return Case(loss, (tokens(8), tokens(8), labels), _sentence_pairs)


def _sentence_pairs(model: Any, a: Tensor, b: Tensor, labels: Tensor) -> Any:
    return model([{"input_ids": t, "attention_mask": torch.ones_like(t)} for t in (a, b)], labels)


SENTENCES = (
    "MultipleNegativesRankingLoss",
    "CosineSimilarityLoss",
    "CoSENTLoss",
    "ContrastiveLoss",
    "SoftmaxLoss",
    "MatryoshkaLoss",
)

TABLE: Table = {
    "peft": {name: partial(_peft, *row) for name, row in PEFT.items()},
    "sentence-transformers": {name: partial(_sentence_loss, name) for name in SENTENCES},
}
