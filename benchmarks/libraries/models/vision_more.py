"""Image models of smaller packages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.libraries.case import ROWS, Case, Table, image
from benchmarks.libraries.models.vision import classified

VIT: dict[str, Any] = {"num_classes": 8, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
SQUARE: dict[str, Any] = {**VIT, "image_size": 32, "patch_size": 8}
VIT_PYTORCH: dict[str, tuple[str, str, int, dict[str, Any]]] = {  # module, class, pixels, options
    "vit": ("vit", "ViT", 32, SQUARE),
    "simple_vit": ("simple_vit", "SimpleViT", 32, SQUARE),
    "vit_register": ("simple_vit_with_register_tokens", "SimpleViT", 32, SQUARE),
    "qk_norm": ("simple_vit_with_qk_norm", "SimpleViT", 32, SQUARE),
    "fft": ("simple_vit_with_fft", "SimpleViT", 32, {**SQUARE, "freq_patch_size": 8}),
    "patch_dropout": ("vit_with_patch_dropout", "ViT", 32, {**SQUARE, "patch_dropout": 0.25}),
    "simple_patch_dropout": ("simple_vit_with_patch_dropout", "SimpleViT", 32, {**SQUARE, "patch_dropout": 0.25}),
    "deepvit": ("deepvit", "DeepViT", 32, SQUARE),
    "cait": ("cait", "CaiT", 32, {**SQUARE, "cls_depth": 1, "layer_dropout": 0.05}),
    "t2t": (
        "t2t",
        "T2TViT",
        32,
        {
            "dim": 32,
            "image_size": 32,
            "depth": 2,
            "heads": 2,
            "mlp_dim": 64,
            "num_classes": 8,
            "t2t_layers": ((3, 2), (3, 2)),
        },
    ),
    "cct": (
        "cct",
        "CCT",
        32,
        {
            "img_size": 32,
            "embedding_dim": 32,
            "n_conv_layers": 1,
            "num_layers": 2,
            "num_heads": 4,
            "mlp_ratio": 2.0,
            "num_classes": 8,
            "positional_embedding": "learnable",
            "kernel_size": 3,
            "stride": 2,
            "padding": 1,
            "pooling_kernel_size": 3,
            "pooling_stride": 2,
            "pooling_padding": 1,
        },
    ),
    "cross_vit": (
        "cross_vit",
        "CrossViT",
        64,
        {
            "image_size": 64,
            "num_classes": 8,
            "depth": 1,
            "sm_dim": 32,
            "sm_patch_size": 16,
            "sm_enc_depth": 1,
            "sm_enc_heads": 2,
            "sm_enc_mlp_dim": 64,
            "lg_dim": 48,
            "lg_patch_size": 32,
            "lg_enc_depth": 1,
            "lg_enc_heads": 2,
            "lg_enc_mlp_dim": 64,
            "cross_attn_depth": 1,
            "cross_attn_heads": 2,
        },
    ),
    "pit": (
        "pit",
        "PiT",
        64,
        {"image_size": 64, "patch_size": 8, "dim": 32, "num_classes": 8, "depth": (1, 1), "heads": 4, "mlp_dim": 64},
    ),
    "levit": (
        "levit",
        "LeViT",
        64,
        {"image_size": 64, "num_classes": 8, "stages": 2, "dim": (32, 48), "depth": 1, "heads": (2, 4), "mlp_mult": 2},
    ),
    "cvt": (
        "cvt",
        "CvT",
        64,
        {
            "num_classes": 8,
            "s1_emb_dim": 16,
            "s1_depth": 1,
            "s2_emb_dim": 32,
            "s2_heads": 2,
            "s2_depth": 1,
            "s3_emb_dim": 48,
            "s3_heads": 3,
            "s3_depth": 1,
        },
    ),
    "twins_svt": (
        "twins_svt",
        "TwinsSVT",
        224,
        {
            "num_classes": 8,
            "s1_emb_dim": 16,
            "s2_emb_dim": 16,
            "s3_emb_dim": 16,
            "s4_emb_dim": 16,
            "s3_depth": 1,
            "s4_depth": 1,
        },
    ),
    "regionvit": ("regionvit", "RegionViT", 224, {"dim": (16, 16, 32, 32), "depth": (1, 1, 1, 1), "num_classes": 8}),
    "scalable_vit": (
        "scalable_vit",
        "ScalableViT",
        64,
        {
            "num_classes": 8,
            "dim": 16,
            "heads": (1, 1, 2, 2),
            "depth": (1, 1, 1, 1),
            "ssa_dim_key": (8, 8, 8, 8),
            "reduction_factor": (2, 2, 1, 1),
            "window_size": (16, 8, None, None),
        },
    ),
    "sep_vit": (
        "sep_vit",
        "SepViT",
        224,
        {"num_classes": 8, "dim": 8, "dim_head": 8, "heads": (1, 1, 2, 2), "depth": (1, 1, 1, 1), "window_size": 7},
    ),
    "max_vit": (
        "max_vit",
        "MaxViT",
        224,
        {"num_classes": 8, "dim_conv_stem": 16, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 7},
    ),
    "nest": (
        "nest",
        "NesT",
        32,
        {
            "image_size": 32,
            "patch_size": 4,
            "dim": 16,
            "heads": 2,
            "num_hierarchies": 2,
            "block_repeats": (1, 1),
            "num_classes": 8,
        },
    ),
    "mobile_vit": (
        "mobile_vit",
        "MobileViT",
        64,
        {
            "image_size": (64, 64),
            "dims": [24, 32, 40],
            "channels": [8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 48],
            "num_classes": 8,
        },
    ),
    "xcit": ("xcit", "XCiT", 32, {**SQUARE, "cls_depth": 1, "local_patch_kernel_size": 3}),
    "parallel_vit": ("parallel_vit", "ViT", 32, {**SQUARE, "num_parallel_branches": 2}),
    "learnable_memory": ("learnable_memory_vit", "ViT", 32, SQUARE),
    "small_dataset": ("vit_for_small_dataset", "ViT", 32, SQUARE),
    "normalized_vit": (
        "normalized_vit",
        "nViT",
        32,
        SQUARE,
    ),
    "jumbo_vit": ("jumbo_vit", "JumboViT", 32, {**SQUARE, "num_jumbo_cls": 1, "jumbo_cls_k": 2, "jumbo_ff_mult": 2}),
    "ats_vit": ("ats_vit", "ViT", 32, {**SQUARE, "max_tokens_per_depth": (8, 4)}),
    "rvt": ("rvt", "RvT", 32, SQUARE),
    "xvit_hyper": ("simple_vit_with_hyper_connections", "SimpleViT", 32, {**SQUARE, "num_residual_streams": 2}),
    "value_residual": ("simple_vit_with_value_residual", "SimpleViT", 32, SQUARE),
}


def _vit(module: str, name: str, size: int, options: dict[str, Any]) -> Case:
    import importlib

    return classified(getattr(importlib.import_module(f"vit_pytorch.{module}"), name)(**options), size)


def _distilled() -> Case:
    from torchvision.models import resnet18
    from vit_pytorch.distill import DistillableViT, DistillWrapper

    student = DistillableViT(**SQUARE)
    model = DistillWrapper(student=student, teacher=resnet18(num_classes=8), temperature=3, alpha=0.5, hard=False)
    return Case(model, (image(32), torch.randint(0, 8, (ROWS,))), _own)


def _own(model: nn.Module, *args: Any) -> Any:
    """The loss that a model gives itself."""
    found = model(*args)
    return found[0] if isinstance(found, tuple) else found


def _efficientnet() -> Case:
    from efficientnet_pytorch import EfficientNet

    return classified(EfficientNet.from_name("efficientnet-b0", override_params={"num_classes": 8}), 64)


def _pytorchcv(name: str) -> Case:
    from pytorchcv.model_provider import get_model

    return classified(get_model(name, num_classes=8), 224)


def _resnest() -> Case:
    from resnest.torch import resnest50

    return classified(resnest50(num_classes=8), 64)


def _mixer() -> Case:
    from mlp_mixer_pytorch import MLPMixer

    return classified(MLPMixer(image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=8), 32)


def _gmlp() -> Case:
    from g_mlp_pytorch import gMLPVision

    return classified(gMLPVision(image_size=32, patch_size=8, num_classes=8, dim=32, depth=2), 32)


def _lambda_net() -> Case:
    from lambda_networks import LambdaLayer

    return Case(LambdaLayer(dim=16, dim_out=16, r=7, dim_k=8, heads=4, dim_u=1), (image(16, 16),))


def _bottleneck() -> Case:
    from bottleneck_transformer_pytorch import BottleStack

    model = BottleStack(
        dim=16,
        fmap_size=16,
        dim_out=32,
        proj_factor=4,
        downsample=True,
        heads=2,
        dim_head=8,
        rel_pos_emb=True,
        num_layers=2,
    )
    return Case(model, (image(16, 16),))


def _axial() -> Case:
    from axial_attention import AxialImageTransformer

    return Case(AxialImageTransformer(dim=16, depth=2, reversible=False), (image(8, 16),))


def _halo() -> Case:
    from halonet_pytorch import HaloAttention

    return Case(HaloAttention(dim=16, block_size=4, halo_size=2, dim_head=8, heads=2), (image(16, 16),))


def _byol() -> Case:
    from byol_pytorch import BYOL
    from torchvision.models import resnet18

    model = BYOL(resnet18(), image_size=32, hidden_layer="avgpool", projection_size=16, projection_hidden_size=32)
    return Case(model, (image(32),), _own)


TABLE: Table = {
    "vit-pytorch": {
        **{name: partial(_vit, *row) for name, row in VIT_PYTORCH.items()},
        "distilled": _distilled,
    },
    "efficientnet-pytorch": {"b0": _efficientnet},
    "pytorchcv": {
        name: partial(_pytorchcv, name)
        for name in (
            "resnet10",
            "preresnet10",
            "sepreresnet10",
            "squeezenet_v1_1",
            "mobilenet_wd4",
            "menet108_8x1_g3",
            "diracnet18v2",
            "bninception",
            "airnet50_1x64d_r2",
            "peleenet",
        )
    },
    "resnest": {"resnest50": _resnest},
    "mlp-mixer-pytorch": {"mixer": _mixer},
    "g-mlp-pytorch": {"vision": _gmlp},
    "lambda-networks": {"layer": _lambda_net},
    "bottleneck-transformer-pytorch": {"stack": _bottleneck},
    "axial-attention": {"image": _axial},
    "halonet-pytorch": {"attention": _halo},
    "byol-pytorch": {"resnet": _byol},
}
