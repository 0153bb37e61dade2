"""More models of the parity tests: Hugging Face, frozen and unused parameters, sizes that nothing divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from models import BATCH, TIME, VOCABULARY, Case, labels, padding_mask, square_loss, token_loss, tokens, uneven
from torch import Tensor, nn


def keyword_loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return model(**inputs).loss


def _language(model: nn.Module) -> Case:
    """Padded rows; labels are ignored there and, unevenly, elsewhere."""
    padding = padding_mask()
    inputs = {
        "input_ids": tokens().masked_fill(padding, 0),
        "attention_mask": (~padding).long(),
        "labels": labels().masked_fill(padding, -100),
    }
    return uneven(model).train(), keyword_loss, (inputs,)


def hf_llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(8)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2 * TIME, use_cache=False,
    )  # fmt: skip
    return _language(LlamaForCausalLM(config))


def hf_gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(9)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=2 * TIME, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return _language(GPT2LMHeadModel(config))


def hf_bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(10)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=2 * TIME, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return _language(BertForMaskedLM(config))


class HFLoss(nn.Module):
    """A module that returns its loss in an object, for `loss_fn=None`."""

    def __init__(self) -> None:
        super().__init__()
        self.model, _, _ = hf_llama()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def hf_llama_own_loss() -> Case:
    _, _, (inputs,) = hf_llama()
    return HFLoss(), None, (inputs["input_ids"], inputs["attention_mask"], inputs["labels"])


def frozen() -> Case:
    """Frozen embeddings, one frozen bias, one frozen matrix in the middle."""
    model, loss_fn, batch = models.gpt()
    for name, parameter in model.named_parameters():
        if name in ("positions.weight", "blocks.0.attn.q.bias", "blocks.1.mlp.up.weight"):
            parameter.requires_grad_(False)
    return model, loss_fn, batch


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.last = nn.Linear(16, 32), nn.Linear(16, 5), nn.Linear(32, 8)
        self.register_buffer("never_read", torch.randn(7))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale * torch.relu(self.used(x)))


def unused() -> Case:
    torch.manual_seed(11)
    return Unused(), square_loss, (torch.randn(BATCH, 16), torch.randn(BATCH, 8) + 1)


def odd_mlp() -> Case:
    """Widths that neither 2, 3 nor 4 divides."""
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 11), nn.LayerNorm(11), nn.Linear(11, 5))
    return uneven(model), square_loss, (torch.randn(BATCH, 7), torch.randn(BATCH, 5) + 1)


def odd_gpt() -> Case:
    """Five heads, a vocabulary of 37, a context of 7: only the batch divides."""
    torch.manual_seed(13)
    model = uneven(GPT(GPTConfig(37, 7, layers=2, heads=5, width=35)))
    return model, token_loss, (tokens(BATCH, 7, 37), labels(BATCH, 7, 37))


def odd_batch() -> Case:
    """Seven rows, which dp=2 and dp=3 cannot split evenly."""
    torch.manual_seed(14)
    model, loss_fn, _ = models.mlp()
    return model, loss_fn, (torch.randn(7, 16), torch.randn(7, 8) + 1)


class Mixer(nn.Module):
    """As hybrid language models are: a token shift, a causal convolution, a running sum, and attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.convolution = nn.Conv1d(width, width, 4, groups=width, padding=3)
        self.qkv, self.norm = nn.Linear(width, 3 * width), nn.LayerNorm(width)
        self.shift, self.mix = nn.ZeroPad2d((0, 0, 1, -1)), nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.into(self.norm(x)).chunk(2, -1)
        h = h + self.mix * (self.shift(h) - h)
        h = self.convolution(h.transpose(1, 2))[..., : h.shape[1]].transpose(1, 2)
        h = h + h.cumsum(1) / h.shape[1]
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(F.silu(h) * gate).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Hybrid(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers, self.head = nn.ModuleList(Mixer(width) for _ in range(2)), nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def hybrid(rows: int = 4, time: int = 24) -> Case:
    """Labels are ignored unevenly along the sequence, too."""
    torch.manual_seed(15)
    y = labels(rows, time)
    y[0, 3:9] = -100
    return uneven(Hybrid()), token_loss, (tokens(rows, time), y)


PLAIN: tuple[Callable[[], Case], ...] = (
    models.mlp, models.gpt, models.llama, models.nanogpt, models.transformer_encoder, models.resnet, models.vit,
    frozen, unused,
)  # fmt: skip
HUGGING_FACE: tuple[Callable[[], Case], ...] = (hf_llama, hf_gpt2, hf_bert, hf_llama_own_loss)
ODD: tuple[Callable[[], Case], ...] = (models.few_kv_heads, odd_mlp, odd_gpt)
ZOO: dict[str, Callable[[], Case]] = {make.__name__: make for make in (*PLAIN, *HUGGING_FACE, *ODD, odd_batch)}
