"""Attention for long sequences, recurrences that stand in for it, and mixtures: a package each, by its README."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.libraries.case import ROWS, Case, Table, sequence, tokens

WORDS = 64


def _lm(model: nn.Module, words: Tensor) -> Tensor:
    out = model(words)
    out = out[0] if isinstance(out, tuple) else out
    return F.cross_entropy(out[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def _performer() -> Case:
    from performer_pytorch import PerformerLM

    return Case(
        PerformerLM(num_tokens=WORDS, max_seq_len=32, dim=32, depth=1, heads=4, causal=False), (tokens(32),), _lm
    )


def _reformer() -> Case:
    from reformer_pytorch import ReformerLM

    return Case(
        ReformerLM(num_tokens=WORDS, dim=32, depth=1, max_seq_len=64, heads=2, bucket_size=16, n_hashes=2, causal=True),
        (tokens(64),),
        _lm,
    )


def _linear_attention() -> Case:
    from linear_attention_transformer import LinearAttentionTransformerLM

    return Case(
        LinearAttentionTransformerLM(num_tokens=WORDS, dim=32, heads=2, depth=1, max_seq_len=32, causal=False),
        (tokens(32),),
        _lm,
    )


def _linformer() -> Case:
    from linformer import LinformerLM

    return Case(LinformerLM(num_tokens=WORDS, dim=32, seq_len=32, depth=1, heads=4, k=8), (tokens(32),), _lm)


def _nystrom_attention() -> Case:
    from nystrom_attention import Nystromformer

    return Case(Nystromformer(dim=32, depth=1, heads=4, num_landmarks=8), (sequence(16),))


def _local_attention() -> Case:
    from local_attention import LocalTransformer

    return Case(
        LocalTransformer(num_tokens=WORDS, dim=32, depth=1, max_seq_len=32, causal=True, local_attn_window_size=8),
        (tokens(32),),
        _lm,
    )


def _routing() -> Case:
    from routing_transformer import RoutingTransformerLM

    return Case(
        RoutingTransformerLM(num_tokens=WORDS, dim=32, heads=2, depth=1, max_seq_len=64, causal=True, window_size=16),
        (tokens(64),),
        _lm,
    )


def _sinkhorn() -> Case:
    from sinkhorn_transformer import SinkhornTransformerLM

    return Case(
        SinkhornTransformerLM(num_tokens=WORDS, dim=32, heads=2, depth=1, bucket_size=8, max_seq_len=32),
        (tokens(32),),
        _lm,
    )


def _h_1d() -> Case:
    from h_transformer_1d import HTransformer1D

    return Case(
        HTransformer1D(num_tokens=WORDS, dim=32, depth=1, max_seq_len=32, heads=2, dim_head=16, block_size=8),
        (tokens(32),),
        _lm,
    )


def _mega() -> Case:
    from mega_pytorch import Mega

    return Case(
        Mega(
            num_tokens=WORDS,
            dim=32,
            depth=1,
            ema_heads=4,
            attn_dim_qk=16,
            attn_dim_value=32,
            laplacian_attn_fn=True,
        ),
        (tokens(16),),
        _lm,
    )


def _gateloop() -> Case:
    from gateloop_transformer import Transformer

    return Case(Transformer(num_tokens=WORDS, dim=32, depth=1, use_gate_looped_attn=False), (tokens(16),), _lm)


def _taylor_series_linear_attention() -> Case:
    from taylor_series_linear_attention import TaylorSeriesLinearAttn

    return Case(TaylorSeriesLinearAttn(dim=32, dim_head=8, heads=2), (sequence(16),))


def _simple_hierarchical() -> Case:
    from simple_hierarchical_transformer import HierarchicalTransformer

    return Case(
        HierarchicalTransformer(
            num_tokens=WORDS, dim=32, depth=1, seq_len=32, hierarchies=(1, 2), window_sizes=(16, None)
        ),
        (tokens(32),),
        _first,
    )


def _palm_rlhf() -> Case:
    from palm_rlhf_pytorch import PaLM

    return Case(PaLM(num_tokens=WORDS, dim=32, depth=1, dim_head=16, heads=2), (tokens(16),), _returning_loss)


def _block_recurrent() -> Case:
    from block_recurrent_transformer_pytorch import BlockRecurrentTransformer

    return Case(
        BlockRecurrentTransformer(
            num_tokens=WORDS,
            dim=32,
            depth=2,
            dim_head=16,
            heads=2,
            max_seq_len=32,
            block_width=8,
            num_state_vectors=8,
            recurrent_layers=(2,),
        ),
        (tokens(16),),
        _lm,
    )


def _colt5_attention() -> Case:
    from colt5_attention import ConditionalRoutedFeedForward

    return Case(
        ConditionalRoutedFeedForward(dim=32, light_ff_mult=0.5, heavy_ff_mult=2, num_heavy_tokens=4),
        (sequence(16),),
    )


def _hyper_connections() -> Case:
    from hyper_connections import HyperConnections

    init, expand, reduce = HyperConnections.get_init_and_expand_reduce_stream_functions(2)
    return Case(_Streams(init(dim=32, branch=nn.Linear(32, 32)), expand, reduce), (sequence(16),))


def _native_sparse_attention() -> Case:
    from native_sparse_attention_pytorch import SparseAttention

    return Case(
        SparseAttention(
            dim=32,
            dim_head=8,
            heads=2,
            sliding_window_size=4,
            compress_block_size=4,
            compress_block_sliding_stride=2,
            selection_block_size=4,
            num_selected_blocks=2,
        ),
        (sequence(16),),
    )


def _perceiver() -> Case:
    from perceiver_pytorch import Perceiver

    model = Perceiver(
        input_channels=3,
        input_axis=2,
        num_freq_bands=4,
        max_freq=10.0,
        depth=1,
        num_latents=8,
        latent_dim=32,
        latent_heads=2,
        latent_dim_head=8,
        cross_dim_head=8,
        num_classes=8,
    )
    return Case(model, (torch.randn(ROWS, 8, 8, 3),))


class _Streams(nn.Module):
    def __init__(self, inner: nn.Module, expand: nn.Module, reduce: nn.Module) -> None:
        super().__init__()
        self.inner, self.expand, self.reduce = inner, expand, reduce

    def forward(self, x: Tensor) -> Any:
        return self.reduce(self.inner(self.expand(x)))


def _first(model: nn.Module, words: Tensor) -> Any:
    return model(words, return_loss=True)[0]


def _returning_loss(model: nn.Module, words: Tensor) -> Any:
    return model(words, return_loss=True)


TABLE: Table = {
    "performer-pytorch": {"model": _performer},
    "reformer-pytorch": {"model": _reformer},
    "linear-attention-transformer": {"model": _linear_attention},
    "linformer": {"model": _linformer},
    "nystrom-attention": {"model": _nystrom_attention},
    "local-attention": {"model": _local_attention},
    "routing-transformer": {"model": _routing},
    "sinkhorn-transformer": {"model": _sinkhorn},
    "h-transformer-1d": {"model": _h_1d},
    "mega-pytorch": {"model": _mega},
    "gateloop-transformer": {"model": _gateloop},
    "taylor-series-linear-attention": {"model": _taylor_series_linear_attention},
    "simple-hierarchical-transformer": {"model": _simple_hierarchical},
    "palm-rlhf-pytorch": {"model": _palm_rlhf},
    "block-recurrent-transformer-pytorch": {"model": _block_recurrent},
    "CoLT5-attention": {"model": _colt5_attention},
    "hyper-connections": {"model": _hyper_connections},
    "native-sparse-attention-pytorch": {"model": _native_sparse_attention},
    "perceiver-pytorch": {"model": _perceiver},
}
