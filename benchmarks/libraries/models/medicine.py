"""Images in medicine, and losses and filters of images."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.libraries.case import ROWS, Case, Table, convolutions, image
from benchmarks.libraries.models.vision_more import _own

MONAI_NETS: dict[str, dict[str, Any]] = {
    "UNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 3, "channels": (8, 16, 32), "strides": (2, 2)},
    "BasicUNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 3, "features": (8, 8, 16, 16, 32, 8)},
    "AttentionUnet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 3, "channels": (8, 16), "strides": (2,)},
    "DynUNet": {
        "spatial_dims": 2,
        "in_channels": 1,
        "out_channels": 3,
        "kernel_size": [3, 3, 3],
        "strides": [1, 2, 2],
        "upsample_kernel_size": [2, 2],
        "filters": [8, 16, 32],
    },
    "SegResNet": {"spatial_dims": 2, "init_filters": 8, "in_channels": 1, "out_channels": 3},
    "VNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 3},
    "UNETR": {
        "in_channels": 1,
        "out_channels": 3,
        "img_size": 32,
        "feature_size": 8,
        "hidden_size": 48,
        "mlp_dim": 64,
        "num_heads": 4,
        "spatial_dims": 2,
    },
    "SwinUNETR": {
        "in_channels": 1,
        "out_channels": 3,
        "feature_size": 12,
        "spatial_dims": 2,
        "depths": (1, 1, 1, 1),
        "num_heads": (2, 2, 2, 2),
    },
    "HighResNet": {"spatial_dims": 2, "in_channels": 1, "out_channels": 3},
    "FlexibleUNet": {"in_channels": 3, "out_channels": 3, "backbone": "efficientnet-b0", "spatial_dims": 2},
}
MONAI_LOSSES = (
    "DiceLoss",
    "DiceCELoss",
    "GeneralizedDiceLoss",
    "FocalLoss",
    "TverskyLoss",
    "DiceFocalLoss",
    "GeneralizedDiceFocalLoss",
)


def _monai_net(name: str) -> Case:
    from monai.networks import nets

    options = MONAI_NETS[name]
    channels = options["in_channels"]
    return Case(getattr(nets, name)(**options), (image(64 if name != "UNETR" else 32, channels),))


def _monai_loss(name: str) -> Case:
    from monai import losses
    from monai.networks.nets import UNet

    model = UNet(2, 1, 3, channels=(8, 16), strides=(2,))
    loss = getattr(losses, name)(to_onehot_y=True, **({} if "Focal" in name else {"softmax": True}))
    return Case(model, (image(32, 1), torch.randint(0, 3, (ROWS, 1, 32, 32))), partial(_with, loss))


def _with(loss: Any, model: nn.Module, x: Tensor, labels: Tensor) -> Any:
    return loss(model(x), labels)


KORNIA = (
    "SSIMLoss",
    "PSNRLoss",
    "TotalVariation",
    "MS_SSIMLoss",
    "CharbonnierLoss",
    "CauchyLoss",
    "HausdorffERLoss",
    "DiceLoss",
    "LovaszSoftmaxLoss",
    "FocalLoss",
)


def _kornia_loss(name: str) -> Case:
    from kornia import losses

    options: dict[str, Any] = {
        "SSIMLoss": {"window_size": 5},
        "PSNRLoss": {"max_val": 1.0},
        "FocalLoss": {"alpha": 0.5, "reduction": "mean"},
        "CharbonnierLoss": {"reduction": "mean"},
        "CauchyLoss": {"reduction": "mean"},
    }.get(name, {})
    loss = getattr(losses, name)(**options)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1), nn.Sigmoid())
    if name in ("DiceLoss", "LovaszSoftmaxLoss", "FocalLoss", "HausdorffERLoss"):
        labels = torch.randint(0, 3, (ROWS, 1, 32, 32) if name == "HausdorffERLoss" else (ROWS, 32, 32))
        return Case(model, (image(32), labels), partial(_with, loss))
    if name == "TotalVariation":
        return Case(model, (image(32), image(32)), partial(_variation, loss))
    return Case(model, (image(32), image(32).sigmoid()), partial(_with, loss))


def _variation(loss: Any, model: nn.Module, x: Tensor, y: Tensor) -> Any:
    out = model(x)
    return loss(out).mean() + F.mse_loss(out, y)


def _kornia_filter(name: str) -> Case:
    from kornia import filters, geometry

    class Filtered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = convolutions(nn.Conv2d, 3)
            self.turn = nn.Linear(3 * 32 * 32, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            if name == "gaussian":
                return filters.gaussian_blur2d(y, (5, 5), (1.5, 1.5))
            if name == "sobel":
                return filters.sobel(y)
            if name == "median":
                return filters.median_blur(y, (3, 3))
            return geometry.transform.rotate(y, self.turn(x.flatten(1)).squeeze(1))

    return Case(Filtered(), (image(32),))


def _perceptual(name: str) -> Case:
    model = convolutions(nn.Conv2d, 3)
    x, y = image(48).sigmoid(), image(48).sigmoid()
    loss: Any
    if name == "lpips":
        import lpips

        loss = lpips.LPIPS(pretrained=False, net="squeeze", verbose=False).requires_grad_(False)
        return Case(_Beside(model, loss), (x, y), _own)
    import pytorch_msssim

    loss = pytorch_msssim.SSIM(data_range=1.0, win_size=5, channel=3)
    return Case(_Beside(model, loss), (x, y), _own)


class _Beside(nn.Module):
    """A model with the loss as a module beside it."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.model(x), y).mean()


TABLE: Table = {
    "monai": {
        **{name: partial(_monai_net, name) for name in MONAI_NETS},
        **{name: partial(_monai_loss, name) for name in MONAI_LOSSES},
    },
    "kornia": {
        **{name: partial(_kornia_loss, name) for name in KORNIA},
        **{name: partial(_kornia_filter, name) for name in ("gaussian", "sobel", "median", "rotate")},
    },
    "lpips": {"squeeze": partial(_perceptual, "lpips")},
    "pytorch-msssim": {"ssim": partial(_perceptual, "ssim")},
}
