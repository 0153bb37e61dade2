"""Models of packages that hold one paper each: recurrences over segments, slots, points, videos, memories."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.libraries.case import ROWS, Build, Case, Table, anything, image, sequence, tokens

WORDS = {"num_tokens": 64, "dim": 32}
HEADS = {"heads": 2, "dim_head": 16}


def _points(width: int) -> tuple[Any, Any, Any]:
    return sequence(8, width), torch.randn(ROWS, 8, 3), torch.ones(ROWS, 8, dtype=torch.bool)


def _of(module: str, name: str, options: dict[str, Any], batch: Any, **keywords: Any) -> Build:
    """A class of a module with these options, and what makes its batch. keywords: of the call, beside the batch."""

    def build() -> Case:
        return Case(getattr(import_module(module), name)(**options), batch(), partial(anything, **keywords))

    return build


def _words(length: int = 16) -> tuple[Any]:
    return (tokens(length),)


def _masked() -> tuple[Any, Any]:
    return tokens(16), torch.ones(ROWS, 16, dtype=torch.bool)


def _mogrified() -> tuple[Any, Any]:
    return sequence(8, 32), sequence(8, 32)


def _clip() -> tuple[Any, Any]:
    return tokens(16), image(32)


def _vector(length: int = 8) -> tuple[Any]:
    return (sequence(length),)


def _video() -> tuple[Any]:
    return (torch.randn(ROWS, 4, 3, 16, 16),)


def _frames() -> dict[str, Any]:
    frames = {"rotations": torch.linalg.qr(torch.randn(ROWS, 8, 3, 3)).Q, "translations": torch.randn(ROWS, 8, 3)}
    return {"x": sequence(8), "pairwise_repr": torch.randn(ROWS, 8, 8, 16), **frames}


SEGFORMER = {
    "dims": (16, 16, 32, 32),
    "heads": (1, 2, 2, 2),
    "ff_expansion": (2, 2, 2, 2),
    "num_layers": 1,
    "decoder_dim": 16,
}
STAM = {"dim": 32, "image_size": 16, "patch_size": 8, "num_frames": 4, "num_classes": 8, "space_depth": 1,
        "space_heads": 2, "space_mlp_dim": 32, "time_depth": 1, "time_heads": 2, "time_mlp_dim": 32}  # fmt: skip
CLIP = {"dim_text": 32, "dim_image": 32, "dim_latent": 32, "num_text_tokens": 64, "text_enc_depth": 1,
        "text_seq_len": 16, "text_heads": 2, "visual_enc_depth": 1, "visual_image_size": 32, "visual_patch_size": 8,
        "visual_heads": 2}  # fmt: skip
MEGABYTE = {"num_tokens": 64, "dim": (32, 16), "depth": (1, 1), "max_seq_len": (4, 4), **HEADS}
RECURRENT_MEMORY = {**WORDS, "depth": 1, "num_memory_tokens": 4, "seq_len": 16, **HEADS}
SPLIT = {"dim": 32, "depth": 2, "heads": 2}
CHARFORMER = {"max_block_size": 4, "downsample_factor": 4, **WORDS}
POINTS = {"dim": 16, "pos_mlp_hidden_dim": 16, "attn_mlp_hidden_mult": 2, "num_neighbors": 4}
TITANS = {**WORDS, "depth": 2, "segment_len": 8, "num_persist_mem_tokens": 2, "num_longterm_mem_tokens": 2, **HEADS}
SE3 = {"dim": 8, "heads": 2, "depth": 1, "dim_head": 8, "num_degrees": 2, "num_neighbors": 4}

TABLE: Table = {
    "agent-attention-pytorch": {
        "model": _of("agent_attention_pytorch", "AgentTransformer", {**SPLIT, "num_agent_tokens": 4}, _vector)
    },
    "charformer-pytorch": {"gbst": _of("charformer_pytorch", "GBST", CHARFORMER, _words)},
    "compressive-transformer-pytorch": {
        "model": _of("compressive_transformer_pytorch", "CompressiveTransformer",
                     {**WORDS, **SPLIT, "seq_len": 16, "mem_len": 16, "cmem_len": 4}, _words),
    },
    "fast-transformer-pytorch": {
        "model": _of("fast_transformer_pytorch", "FastTransformer",
                     {**WORDS, **HEADS, "depth": 2, "max_seq_len": 16, "absolute_pos_emb": True}, _masked),
    },
    "feedback-transformer-pytorch": {
        "model": _of("feedback_transformer_pytorch", "FeedbackTransformer",
                     {**WORDS, **HEADS, "depth": 2, "seq_len": 2, "mem_len": 8}, lambda: _words(8)),
    },
    "gated-state-spaces-pytorch": {
        "model": _of("gated_state_spaces_pytorch", "GatedStateSpacesLM",
                     {**WORDS, "depth": 2, "dss_kernel_N": 16, "dss_kernel_H": 16}, _words),
    },
    "glom-pytorch": {
        "model": _of("glom_pytorch", "Glom", {"dim": 32, "levels": 3, "image_size": 16, "patch_size": 4},
                     lambda: (image(16),), iters=4),
    },
    "infini-transformer-pytorch": {
        "model": _of("infini_transformer_pytorch", "InfiniTransformer", {**WORDS, **HEADS, "depth": 2}, _words),
    },
    "invariant-point-attention": {
        "block": _of("invariant_point_attention", "IPABlock",
                     {"dim": 32, "heads": 2, "require_pairwise_repr": True, "pairwise_repr_dim": 16}, _frames),
    },
    "MEGABYTE-pytorch": {"model": _of("MEGABYTE_pytorch", "MEGABYTE", MEGABYTE, _words, return_loss=True)},
    "memory-efficient-attention-pytorch": {
        "model": _of("memory_efficient_attention_pytorch.transformer", "Transformer",
                     {**WORDS, **HEADS, "depth": 2, "max_seq_len": 16, "causal": True, "use_flash_attn": False,
                      "q_bucket_size": 8, "k_bucket_size": 8}, _words),
    },
    "metaformer-gpt": {"model": _of("metaformer_gpt", "MetaformerGPT", {**WORDS, **HEADS, "depth": 2}, _words)},
    "mogrifier": {"model": _of("mogrifier", "Mogrifier", {"dim": 32, "factorize_k": 8}, _mogrified)},
    "PaLM-pytorch": {"model": _of("palm_pytorch", "PaLM", {**WORDS, **HEADS, "depth": 2}, _words)},
    "point-transformer-pytorch": {
        "layer": _of("point_transformer_pytorch", "PointTransformerLayer", POINTS, lambda: _points(16)),
        "multihead": _of("point_transformer_pytorch", "MultiheadPointTransformerLayer", {**POINTS, **HEADS},
                         lambda: _points(16)),
    },
    "recurrent-memory-transformer-pytorch": {
        "model": _of("recurrent_memory_transformer_pytorch", "RecurrentMemoryTransformer", RECURRENT_MEMORY, _words),
    },
    "rela-transformer": {
        "model": _of("rela_transformer", "ReLATransformer", {**WORDS, **HEADS, "depth": 2, "max_seq_len": 16}, _words),
    },
    "se3-transformer-pytorch": {"model": _of("se3_transformer_pytorch", "SE3Transformer", SE3, lambda: _points(8))},
    "segformer-pytorch": {"model": _of("segformer_pytorch", "Segformer", SEGFORMER, lambda: (image(32),))},
    "slot-attention": {
        "model": _of("slot_attention", "SlotAttention", {"num_slots": 4, "dim": 32, "hidden_dim": 32}, _vector),
        "multihead": _of("slot_attention", "MultiHeadSlotAttention",
                         {"num_slots": 4, "dim": 32, "hidden_dim": 32, **HEADS}, _vector),
    },
    "STAM-pytorch": {"model": _of("stam_pytorch", "STAM", STAM, _video)},
    "timesformer-pytorch": {
        "model": _of("timesformer_pytorch", "TimeSformer",
                     {"dim": 32, "num_frames": 4, "num_classes": 8, "image_size": 16, "patch_size": 8, "depth": 2,
                      **HEADS}, _video),
    },
    "titans-pytorch": {
        "model": _of("titans_pytorch", "MemoryAsContextTransformer", TITANS, _words, return_loss=True),
    },
    "uformer-pytorch": {
        "model": _of("uformer_pytorch", "Uformer",
                     {"dim": 16, "stages": 2, "num_blocks": 1, "window_size": 8, **HEADS}, lambda: (image(32),)),
    },
    "x-clip": {"model": _of("x_clip", "CLIP", CLIP, _clip, return_loss=True)},
}  # fmt: skip
