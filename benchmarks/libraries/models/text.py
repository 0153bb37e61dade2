"""Language models and their parts."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.libraries.case import Case, Table, image, sequence, tokens
from benchmarks.libraries.models.vision_more import _own

WORDS = 64
DECODERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "t5_bias": {"rel_pos_bias": True},
    "dynamic_bias": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": False},
    "rmsnorm": {"use_rmsnorm": True},
    "scalenorm": {"use_scalenorm": True},
    "swiglu": {"ff_glu": True, "ff_swish": True},
    "qk_norm": {"attn_qk_norm": True},
    "talking_heads": {"attn_pre_talking_heads": True},
    "multi_query": {"attn_one_kv_head": True},
    "grouped": {"attn_kv_heads": 2},
    "sandwich": {"sandwich_coef": 1},
    "macaron": {"macaron": True},
    "residual_attn": {"residual_attn": True},
    "gate_residual": {"gate_residual": True},
    "shift": {"shift_tokens": 1},
    "sparse_topk": {"attn_sparse_topk": 4},
    "memory_kv": {"attn_num_mem_kv": 4},
    "gate_values": {"attn_gate_values": True},
    "deepnorm": {"scale_residual": True, "pre_norm": False},
    "xpos": {"rotary_xpos": True},
    "softclamp": {"attn_softclamp_logits": True},
    "on_attn": {"attn_on_attn": True},
    "flash": {"attn_flash": True},
    "relu_squared": {"ff_relu_squared": True},
    "no_bias_ff": {"ff_no_bias": True},
    "value_residual": {"add_value_residual": True},
    "layer_dropout": {"layer_dropout": 0.1},
    "hyper": {"num_residual_streams": 2},
}


def _decoder(options: dict[str, Any]) -> Case:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    inner = TransformerWrapper(
        num_tokens=WORDS, max_seq_len=32, attn_layers=Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **options)
    )
    return Case(AutoregressiveWrapper(inner), (tokens(17),), _own)


def _encoder() -> Case:
    from x_transformers import Encoder, TransformerWrapper

    return Case(
        TransformerWrapper(num_tokens=WORDS, max_seq_len=32, attn_layers=Encoder(dim=32, depth=2, heads=4)), (tokens(),)
    )


def _xtransformer() -> Case:
    from x_transformers import XTransformer

    model = XTransformer(
        dim=32,
        enc_num_tokens=WORDS,
        enc_depth=1,
        enc_heads=2,
        enc_max_seq_len=16,
        dec_num_tokens=WORDS,
        dec_depth=1,
        dec_heads=2,
        dec_max_seq_len=16,
        tie_token_emb=True,
    )
    return Case(model, (tokens(), tokens()), _own)


def _vit_wrapper() -> Case:
    from x_transformers import Encoder, ViTransformerWrapper

    model = ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=8, attn_layers=Encoder(dim=32, depth=2, heads=4)
    )
    return Case(model, (image(),))


def _continuous() -> Case:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    model = ContinuousTransformerWrapper(
        dim_in=8, dim_out=8, max_seq_len=16, attn_layers=Encoder(dim=32, depth=2, heads=4)
    )
    return Case(model, (sequence(16, 8),))


def _lm(model: nn.Module, words: Tensor) -> Tensor:
    out = model(words)
    out = out[0] if isinstance(out, tuple) else out
    return F.cross_entropy(out[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def _mamba_block() -> Case:
    from mambapy.mamba import Mamba, MambaConfig

    return Case(Mamba(MambaConfig(d_model=16, n_layers=1, d_state=4, pscan=False)), (sequence(8, 16),))


def _experts(kind: str) -> Case:
    if kind == "soft":
        from soft_moe_pytorch import SoftMoE

        return Case(SoftMoE(dim=32, seq_len=16, num_experts=4), (sequence(16),))
    if kind == "st":
        from st_moe_pytorch import MoE

        return Case(MoE(dim=32, num_experts=4, gating_top_n=2), (sequence(16),), _with_aux)
    from mixture_of_experts import HeirarchicalMoE
    from mixture_of_experts import MoE as Plain

    model = Plain(dim=32, num_experts=4) if kind == "flat" else HeirarchicalMoE(dim=32, num_experts=(2, 2))
    return Case(model, (sequence(16),), _with_aux)


def _with_aux(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (out[0] - 0.1).square().mean() + out[1]


def _rotary() -> Case:
    from rotary_embedding_torch import RotaryEmbedding

    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rotary, self.qkv = RotaryEmbedding(dim=8), nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
            q, k = self.rotary.rotate_queries_or_keys(q), self.rotary.rotate_queries_or_keys(k)
            return F.scaled_dot_product_attention(q, k, v)

    return Case(Rotated(), (sequence(16),))


def _crf() -> Case:
    from torchcrf import CRF

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out, self.crf = nn.Embedding(WORDS, 32), nn.Linear(32, 5), CRF(5, batch_first=True)

        def forward(self, words: Tensor, tags: Tensor) -> Tensor:
            return -self.crf(self.out(self.words(words)), tags)

    return Case(Tagger(), (tokens(8), tokens(8, 5)), _own)


def _entmax(kind: str) -> Case:
    import entmax

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Any:
            return getattr(entmax, kind)(self.inner(x), dim=-1)

    return Case(Sparse(), (sequence(8),))


TABLE: Table = {
    "x-transformers": {
        **{name: partial(_decoder, options) for name, options in DECODERS.items()},
        "encoder": _encoder,
        "encoder_decoder": _xtransformer,
        "vit": _vit_wrapper,
        "continuous": _continuous,
    },
    "mambapy": {"sequential": _mamba_block},
    "mixture-of-experts": {"flat": partial(_experts, "flat"), "hierarchical": partial(_experts, "two")},
    "soft-moe-pytorch": {"soft": partial(_experts, "soft")},
    "st-moe-pytorch": {"st": partial(_experts, "st")},
    "rotary-embedding-torch": {"attention": _rotary},
    "pytorch-crf": {"tagger": _crf},
    "entmax": {kind: partial(_entmax, kind) for kind in ("sparsemax", "entmax15", "entmax_bisect")},
}
