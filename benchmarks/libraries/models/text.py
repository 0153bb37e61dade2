"""Language models, attention of every kind, adapters and sentence embeddings."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.libraries.case import ROWS, Case, Table, image, sequence, tokens
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
    "talking_heads": {"attn_talking_heads": True},
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
    "value_residual": {"attn_add_value_residual": True},
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
    "poly": ("llama", "PolyConfig", {"r": 4, "target_modules": ["q_proj"], "n_tasks": 1, "n_skills": 2}),
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


def _lm(model: nn.Module, words: Tensor) -> Tensor:
    out = model(words)
    out = out[0] if isinstance(out, tuple) else out
    return F.cross_entropy(out[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def _mamba(kind: str) -> Case:
    from mambapy.lm import LM
    from mambapy.mamba import MambaConfig

    return Case(LM(MambaConfig(d_model=32, n_layers=2, d_state=4), vocab_size=WORDS), (tokens(16),), _lm)


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


def _attention(package: str) -> Case:
    """Attention for long sequences: each package's own README."""
    if package == "performer-pytorch":
        from performer_pytorch import PerformerLM

        return Case(
            PerformerLM(num_tokens=WORDS, max_seq_len=32, dim=32, depth=1, heads=4, causal=False), (tokens(32),), _lm
        )
    if package == "reformer-pytorch":
        from reformer_pytorch import ReformerLM

        return Case(
            ReformerLM(
                num_tokens=WORDS, dim=32, depth=1, max_seq_len=64, heads=2, bucket_size=16, n_hashes=2, causal=True
            ),
            (tokens(64),),
            _lm,
        )
    if package == "linear-attention-transformer":
        from linear_attention_transformer import LinearAttentionTransformerLM

        return Case(
            LinearAttentionTransformerLM(num_tokens=WORDS, dim=32, heads=2, depth=1, max_seq_len=32, causal=False),
            (tokens(32),),
            _lm,
        )
    if package == "linformer":
        from linformer import LinformerLM

        return Case(LinformerLM(num_tokens=WORDS, dim=32, seq_len=32, depth=1, heads=4, k=8), (tokens(32),), _lm)
    if package == "nystrom-attention":
        from nystrom_attention import Nystromformer

        return Case(Nystromformer(dim=32, depth=1, heads=4, num_landmarks=8), (sequence(16),))
    if package == "local-attention":
        from local_attention import LocalTransformer

        return Case(
            LocalTransformer(num_tokens=WORDS, dim=32, depth=1, max_seq_len=32, causal=True, local_attn_window_size=8),
            (tokens(32),),
            _lm,
        )
    if package == "routing-transformer":
        from routing_transformer import RoutingTransformerLM

        return Case(
            RoutingTransformerLM(
                num_tokens=WORDS, dim=32, heads=2, depth=1, max_seq_len=64, causal=True, window_size=16
            ),
            (tokens(64),),
            _lm,
        )
    if package == "sinkhorn-transformer":
        from sinkhorn_transformer import SinkhornTransformerLM

        return Case(
            SinkhornTransformerLM(num_tokens=WORDS, dim=32, heads=2, depth=1, bucket_size=8, max_seq_len=32),
            (tokens(32),),
            _lm,
        )
    if package == "h-transformer-1d":
        from h_transformer_1d import HTransformer1D

        return Case(
            HTransformer1D(num_tokens=WORDS, dim=32, depth=1, max_seq_len=32, heads=2, dim_head=16, block_size=8),
            (tokens(32),),
            _lm,
        )
    if package == "mega-pytorch":
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
    if package == "gateloop-transformer":
        from gateloop_transformer import Transformer

        return Case(Transformer(num_tokens=WORDS, dim=32, depth=1, use_gate_looped_attn=False), (tokens(16),), _lm)
    if package == "taylor-series-linear-attention":
        from taylor_series_linear_attention import TaylorSeriesLinearAttn

        return Case(TaylorSeriesLinearAttn(dim=32, dim_head=8, heads=2), (sequence(16),))
    if package == "minGRU-pytorch":
        from minGRU_pytorch import minGRULM

        return Case(minGRULM(num_tokens=WORDS, dim=32, depth=1), (tokens(16),), _lm)
    if package == "simple-hierarchical-transformer":
        from simple_hierarchical_transformer import HierarchicalTransformer

        return Case(
            HierarchicalTransformer(
                num_tokens=WORDS, dim=32, depth=1, seq_len=32, hierarchies=(1, 2), window_sizes=(16, None)
            ),
            (tokens(32),),
            _first,
        )
    if package == "palm-rlhf-pytorch":
        from palm_rlhf_pytorch import PaLM

        return Case(PaLM(num_tokens=WORDS, dim=32, depth=1, dim_head=16, heads=2), (tokens(16),), _returning_loss)
    if package == "block-recurrent-transformer-pytorch":
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
    if package == "CoLT5-attention":
        from colt5_attention import ConditionalRoutedFeedForward

        return Case(
            ConditionalRoutedFeedForward(dim=32, light_ff_mult=0.5, heavy_ff_mult=2, num_heavy_tokens=4),
            (sequence(16),),
        )
    if package == "hyper-connections":
        from hyper_connections import HyperConnections

        init, expand, reduce = HyperConnections.get_init_and_expand_reduce_stream_functions(2)
        return Case(_Streams(init(dim=32, branch=nn.Linear(32, 32)), expand, reduce), (sequence(16),))
    if package == "native-sparse-attention-pytorch":
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


SENTENCES = (
    "MultipleNegativesRankingLoss",
    "CosineSimilarityLoss",
    "CoSENTLoss",
    "ContrastiveLoss",
    "SoftmaxLoss",
    "MatryoshkaLoss",
)
ATTENTION = (
    "performer-pytorch",
    "reformer-pytorch",
    "linear-attention-transformer",
    "linformer",
    "nystrom-attention",
    "local-attention",
    "routing-transformer",
    "sinkhorn-transformer",
    "h-transformer-1d",
    "mega-pytorch",
    "gateloop-transformer",
    "taylor-series-linear-attention",
    "minGRU-pytorch",
    "simple-hierarchical-transformer",
    "palm-rlhf-pytorch",
    "block-recurrent-transformer-pytorch",
    "CoLT5-attention",
    "hyper-connections",
    "native-sparse-attention-pytorch",
    "perceiver-pytorch",
)

TABLE: Table = {
    "x-transformers": {
        **{name: partial(_decoder, options) for name, options in DECODERS.items()},
        "encoder": _encoder,
        "encoder_decoder": _xtransformer,
        "vit": _vit_wrapper,
        "continuous": _continuous,
    },
    "peft": {name: partial(_peft, *row) for name, row in PEFT.items()},
    "sentence-transformers": {name: partial(_sentence_loss, name) for name in SENTENCES},
    "mambapy": {"lm": partial(_mamba, "lm"), "sequential": _mamba_block},
    "mixture-of-experts": {"flat": partial(_experts, "flat"), "hierarchical": partial(_experts, "two")},
    "soft-moe-pytorch": {"soft": partial(_experts, "soft")},
    "st-moe-pytorch": {"st": partial(_experts, "st")},
    "rotary-embedding-torch": {"attention": _rotary},
    "pytorch-crf": {"tagger": _crf},
    "entmax": {kind: partial(_entmax, kind) for kind in ("sparsemax", "entmax15", "entmax_bisect")},
    **{package: {"model": partial(_attention, package)} for package in ATTENTION},
}
