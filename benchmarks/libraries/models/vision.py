"""Image models of the large collections: timm, torchvision, segmentation-models-pytorch, open_clip."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.libraries.case import ROWS, Build, Case, Table, image

SMALL_TIMM = {  # sizes in pixels; what a model needs to be small
    "resnet10t": 32,
    "resnet18": 32,
    "resnext26ts": 64,
    "regnetx_002": 32,
    "regnety_002": 32,
    "efficientnet_b0": 64,
    "mobilenetv2_050": 32,
    "mobilenetv3_small_050": 64,
    "mobilenetv4_conv_small": 64,
    "mnasnet_050": 32,
    "densenet121": 64,
    "dpn48b": 64,
    "vgg11_bn": 32,
    "convnext_atto": 32,
    "convnextv2_atto": 32,
    "ghostnet_050": 64,
    "hardcorenas_a": 64,
    "lcnet_035": 32,
    "tinynet_e": 64,
    "repvgg_a0": 32,
    "mobileone_s0": 64,
    "fastvit_t8": 64,
    "edgenext_xx_small": 64,
    "cspresnet50": 64,
    "darknet17": 64,
    "dla34": 64,
    "hrnet_w18_small": 64,
    "selecsls42": 64,
    "res2net50_14w_8s": 64,
    "resnest14d": 64,
    "skresnet18": 64,
    "seresnet18": 64,
    "ecaresnet26t": 64,
    "nf_resnet26": 64,
    "inception_v3": 96,
    "xception41": 64,
    "rexnet_100": 64,
    "semnasnet_050": 32,
    "spnasnet_100": 32,
    "fbnetc_100": 32,
    "botnet26t_256": 256,
    "halonet26t": 256,
    "lambda_resnet26t": 256,
    "efficientformer_l1": 224,
    "efficientformerv2_s0": 224,
}
TRANSFORMERS_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "depth": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": 32, "depth": 2},
    "deit3_small_patch16_224": {"img_size": 32, "depth": 2},
    "beit_base_patch16_224": {"img_size": 32, "depth": 2, "embed_dim": 96, "num_heads": 4},
    "eva02_tiny_patch14_224": {"img_size": 28, "depth": 2},
    "cait_xxs24_224": {"img_size": 32, "depth": 2},
    "xcit_nano_12_p16_224": {"img_size": 32, "depth": 2},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)},
    "swinv2_cr_tiny_224": {"img_size": 56, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 7},
    "swinv2_tiny_window8_256": {"img_size": 64, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)},
    "maxvit_nano_rw_256": {"img_size": 256},
    "coatnet_0_rw_224": {"img_size": 224},
    "crossvit_9_240": {"img_size": 240},
    "pit_ti_224": {},
    "levit_128s": {},
    "mixer_s32_224": {},
    "resmlp_12_224": {},
    "gmlp_s16_224": {},
    "poolformer_s12": {},
    "poolformerv2_s12": {},
    "convmixer_768_32": {},
    "twins_pcpvt_small": {"img_size": 64},
    "twins_svt_small": {"img_size": 64},
    "pvt_v2_b0": {},
    "volo_d1_224": {"img_size": 224},
    "visformer_tiny": {"img_size": 64},
    "tnt_s_legacy_patch16_224": {"img_size": 32, "depth": 2},
    "sequencer2d_s": {"img_size": 64},
    "focalnet_tiny_srf": {},
    "davit_tiny": {},
    "gcvit_xxtiny": {},
    "mvitv2_tiny": {},
    "nest_tiny": {"img_size": 64},
    "repvit_m0_9": {},
    "tiny_vit_5m_224": {},
    "hiera_tiny_224": {},
    "vit_relpos_small_patch16_224": {"img_size": 32, "depth": 2},
    "vit_srelpos_small_patch16_224": {"img_size": 32, "depth": 2},
    "naflexvit_base_patch16_gap": {"depth": 2, "embed_dim": 96, "num_heads": 4},
    "vit_tiny_r_s16_p8_224": {"img_size": 32, "depth": 2},
    "samvit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 96, "num_heads": 4},
    "mambaout_femto": {},
    "starnet_s1": {},
    "efficientvit_b0": {},
    "efficientvit_m0": {},
    "inception_next_atto": {},
    "metaformer:caformer_s18": {},
    "shvit_s1": {},
    "swiftformer_xs": {},
    "csatv2": {},
    "patch_dropout": {"name": "vit_tiny_patch16_224", "img_size": 32, "depth": 2, "patch_drop_rate": 0.5},
}
SIZES = {
    "levit_128s": 224,
    "tiny_vit_5m_224": 224,
    "hiera_tiny_224": 224,
    "gcvit_xxtiny": 224,
    "mvitv2_tiny": 224,
    "pit_ti_224": 224,
    "efficientvit_m0": 224,
    "csatv2": 512,
    "mixer_s32_224": 224,
    "resmlp_12_224": 224,
    "gmlp_s16_224": 224,
}


def with_classes(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    out = model(x)
    if isinstance(out, (tuple, list)):
        return torch.stack([F.cross_entropy(one, labels) for one in out]).sum()
    return F.cross_entropy(getattr(out, "logits", out), labels)


def classified(model: nn.Module, size: int) -> Case:
    return Case(model, (image(size), torch.randint(0, 8, (ROWS,))), with_classes)


def _timm(name: str, size: int, options: dict[str, Any]) -> Case:
    import timm

    known = {key: value for key, value in options.items() if key != "name"}
    model = timm.create_model(options.get("name", name.partition(":")[2] or name), num_classes=8, **known)
    return classified(model, size)


def _timm_table() -> dict[str, Build]:
    found: dict[str, Build] = {name: partial(_timm, name, size, {}) for name, size in SMALL_TIMM.items()}
    for name, options in TRANSFORMERS_TIMM.items():
        found[name] = partial(_timm, name, options.get("img_size", SIZES.get(name, 64)), options)
    return found


TORCHVISION = {
    "alexnet": 64,
    "googlenet": 64,
    "squeezenet1_1": 64,
    "shufflenet_v2_x0_5": 32,
    "mobilenet_v3_small": 32,
    "mnasnet0_5": 32,
    "regnet_y_400mf": 32,
    "efficientnet_v2_s": 32,
    "wide_resnet50_2": 32,
    "convnext_tiny": 32,
}


def _torchvision(name: str, size: int) -> Case:
    from torchvision import models

    options = {"init_weights": True} if name == "googlenet" else {}
    return classified(models.get_model(name, num_classes=8, **options), size)


def _vision_transformer() -> Case:
    from torchvision.models import VisionTransformer

    return classified(VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=8), 32)


def _swin(version: int) -> Case:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    more: Any = {"block": SwinTransformerBlockV2, "downsample_layer": PatchMergingV2} if version == 2 else {}
    return classified(SwinTransformer([4, 4], 24, [2, 2], [2, 4], [4, 4], num_classes=8, **more), 32)


def _video(name: str) -> Case:
    from torchvision.models import video

    model = getattr(video, name)(num_classes=8)
    return Case(model, (torch.randn(ROWS, 3, 8, 32, 32), torch.randint(0, 8, (ROWS,))), with_classes)


def _segmented(name: str) -> Case:
    from torchvision.models import segmentation

    model = getattr(segmentation, name)(num_classes=4, weights_backbone=None)
    return Case(model, (image(64), torch.randint(0, 4, (ROWS, 64, 64))), _of_out)


def _of_out(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x)["out"], labels)


SMP = (
    "Unet",
    "UnetPlusPlus",
    "MAnet",
    "Linknet",
    "FPN",
    "PSPNet",
    "DeepLabV3",
    "DeepLabV3Plus",
    "UPerNet",
    "Segformer",
    "DPT",
)
SMP_LOSSES = ("DiceLoss", "JaccardLoss", "FocalLoss", "LovaszLoss", "TverskyLoss", "MCCLoss", "SoftBCEWithLogitsLoss")


def _smp(name: str) -> Case:
    import segmentation_models_pytorch as smp

    encoder = "tu-vit_tiny_patch16_224" if name == "DPT" else "resnet18"
    more = {"dynamic_img_size": True} if name == "DPT" else {}
    model = getattr(smp, name)(encoder, encoder_weights=None, classes=4, **more)
    return Case(model, (image(64), torch.randint(0, 4, (ROWS, 64, 64))), _pixels)


def _pixels(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def _smp_loss(name: str) -> Case:
    import segmentation_models_pytorch as smp

    model = smp.Unet("resnet18", encoder_weights=None, classes=1, encoder_depth=3, decoder_channels=(32, 16, 8))
    options = {} if name in ("MCCLoss", "SoftBCEWithLogitsLoss") else {"mode": "binary"}
    loss = getattr(smp.losses, name)(**options)
    return Case(model, (image(32), torch.randint(0, 2, (ROWS, 1, 32, 32)).float()), partial(_with, loss))


def _with(loss: Any, model: nn.Module, x: Tensor, labels: Tensor) -> Any:
    return loss(model(x), labels)


def _clip(kind: str) -> Case:
    import open_clip

    vision = {"image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 8}
    words = {"context_length": 16, "vocab_size": 64, "width": 64, "heads": 4, "layers": 2}
    loss: Any = open_clip.ClipLoss()
    model: nn.Module
    if kind == "siglip":
        model, loss = open_clip.CustomTextCLIP(32, vision, words, init_logit_bias=-10.0), open_clip.loss.SigLipLoss()
    elif kind == "resnet":
        vision = {"image_size": 64, "layers": (1, 1, 1, 1), "width": 16, "head_width": 16}
        model = open_clip.CLIP(32, vision, words)
    else:
        model = open_clip.CLIP(32, {**vision, "patch_dropout": 0.5 if kind == "patch_dropout" else 0.0}, words)
    size = 64 if kind == "resnet" else 32
    text = torch.randint(1, 63, (ROWS, 16))
    return Case(model, (image(size), text), partial(_pairs, loss))


def _pairs(loss: Any, model: nn.Module, x: Tensor, text: Tensor) -> Any:
    out = model(x, text)
    if isinstance(out, dict):
        return loss(*out.values())
    return loss(*out)


TABLE: Table = {
    "timm": _timm_table(),
    "torchvision": {
        **{name: partial(_torchvision, name, size) for name, size in TORCHVISION.items()},
        "vision_transformer": _vision_transformer,
        "swin": partial(_swin, 1),
        "swin_v2": partial(_swin, 2),
        **{name: partial(_video, name) for name in ("r3d_18", "mc3_18", "r2plus1d_18")},
        **{name: partial(_segmented, name) for name in ("fcn_resnet50", "lraspp_mobilenet_v3_large")},
    },
    "segmentation-models-pytorch": {
        **{name: partial(_smp, name) for name in SMP},
        **{name: partial(_smp_loss, name) for name in SMP_LOSSES},
    },
    "open_clip_torch": {kind: partial(_clip, kind) for kind in ("vit", "resnet", "siglip", "patch_dropout")},
}
