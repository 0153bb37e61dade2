"""Diffusion, autoencoders, quantisation, flows."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.libraries.case import ROWS, Case, Table, image, of_all, sequence
from benchmarks.libraries.models.vision_more import _own

UNET: dict[str, Any] = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
DIFFUSERS: dict[str, tuple[str, dict[str, Any]]] = {
    "unet": (
        "UNet2DModel",
        {
            **UNET,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
        },
    ),
    "unet_condition": (
        "UNet2DConditionModel",
        {
            **UNET,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 4,
        },
    ),
    "dit": (
        "DiTTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "num_layers": 2,
            "sample_size": 8,
            "num_embeds_ada_norm": 1000,
            "norm_num_groups": 4,
        },
    ),
    "vae": (
        "AutoencoderKL",
        {
            "block_out_channels": (16, 32),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 4,
            "sample_size": 16,
        },
    ),
    "vq": (
        "VQModel",
        {
            "block_out_channels": (16, 32),
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "norm_num_groups": 4,
            "num_vq_embeddings": 16,
        },
    ),
    "tiny_vae": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (16, 16),
            "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "joint_attention_dim": 16,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 16,
            "out_channels": 4,
        },
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 2,
            "cross_attention_dim": 32,
            "sample_size": 8,
            "caption_channels": 16,
            "use_additional_conditions": False,
            "norm_num_groups": 4,
        },
    ),
    "prior": (
        "PriorTransformer",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "num_layers": 1,
            "embedding_dim": 16,
            "num_embeddings": 4,
            "additional_embeddings": 4,
        },
    ),
    "uvit": (
        "UVit2DModel",
        {
            "hidden_size": 32,
            "cond_embed_dim": 16,
            "micro_cond_encode_dim": 4,
            "micro_cond_embed_dim": 20,
            "encoder_hidden_size": 16,
            "vocab_size": 32,
            "codebook_size": 32,
            "in_channels": 32,
            "block_out_channels": 32,
            "num_res_blocks": 1,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "block_num_heads": 4,
            "intermediate_size": 64,
            "sample_size": 8,
        },
    ),
}


def _diffusers(kind: str) -> Case:
    import diffusers

    name, options = DIFFUSERS[kind]
    model = getattr(diffusers, name)(**options)
    time = torch.randint(0, 1000, (ROWS,))
    if kind == "unet":
        return Case(model, (image(16), time))
    if kind == "unet_condition":
        return Case(model, (image(16, 4), time, sequence(4, 16)))
    if kind == "dit":
        return Case(
            model, {"hidden_states": image(8, 4), "timestep": time, "class_labels": torch.randint(0, 1000, (ROWS,))}
        )
    if kind == "sd3":
        return Case(
            model,
            {
                "hidden_states": image(8, 4),
                "encoder_hidden_states": sequence(4, 16),
                "pooled_projections": torch.randn(ROWS, 16),
                "timestep": time,
            },
        )
    if kind == "pixart":
        return Case(
            model,
            {
                "hidden_states": image(8, 4),
                "encoder_hidden_states": sequence(4, 16),
                "timestep": time,
                "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            },
        )
    if kind == "prior":
        return Case(
            model,
            {
                "hidden_states": torch.randn(ROWS, 16),
                "timestep": time,
                "proj_embedding": torch.randn(ROWS, 16),
                "encoder_hidden_states": sequence(4, 16),
            },
        )
    if kind == "uvit":
        return Case(
            model,
            {
                "input_ids": torch.randint(0, 32, (ROWS, 8, 8)),
                "encoder_hidden_states": sequence(4, 16),
                "pooled_text_emb": torch.randn(ROWS, 16),
                "micro_conds": torch.rand(ROWS, 5),
            },
        )
    if kind == "vae":
        return Case(model, (image(16),), _sampled)
    return Case(model, (image(16),))


def _sampled(model: Any, x: Tensor) -> Tensor:
    found = model.encode(x).latent_dist
    return F.mse_loss(model.decode(found.sample()).sample, x) + 0.1 * found.kl().mean()


def _noised(scheduler: str) -> Case:
    import diffusers

    class Denoised(nn.Module):
        """A training step of the package's guide: noise is added by the scheduler."""

        def __init__(self) -> None:
            super().__init__()
            self.unet = diffusers.UNet2DModel(**DIFFUSERS["unet"][1])
            self.scheduler = getattr(diffusers, scheduler)(num_train_timesteps=1000)

        def forward(self, x: Tensor, time: Tensor) -> Tensor:
            noise = torch.randn_like(x)
            return F.mse_loss(self.unet(self.scheduler.add_noise(x, noise, time), time).sample, noise)

    return Case(Denoised(), (image(16), torch.randint(0, 1000, (ROWS,))), _own)


def _denoising(kind: str) -> Case:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    if kind == "unet":
        return Case(Unet(dim=16, dim_mults=(1, 2), flash_attn=False), (image(16), torch.randint(0, 100, (ROWS,))))
    return Case(
        GaussianDiffusion(Unet(dim=16, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=100),
        (image(16).sigmoid(),),
        _own,
    )


VQ: dict[str, tuple[str, dict[str, Any]]] = {
    "vq": ("VectorQuantize", {"dim": 32, "codebook_size": 16, "decay": 0.8, "commitment_weight": 1.0}),
    "learnable": ("VectorQuantize", {"dim": 32, "codebook_size": 16, "learnable_codebook": True, "ema_update": False}),
    "cosine": ("VectorQuantize", {"dim": 32, "codebook_size": 16, "use_cosine_sim": True}),
    "residual": ("ResidualVQ", {"dim": 32, "num_quantizers": 2, "codebook_size": 16}),
    "fsq": ("FSQ", {"levels": [4, 4, 4], "dim": 32}),
    "lfq": ("LFQ", {"codebook_size": 16, "dim": 32}),
    "sim": ("SimVQ", {"dim": 32, "codebook_size": 16}),
    "residual_fsq": ("ResidualFSQ", {"dim": 32, "levels": [4, 4], "num_quantizers": 2}),
}


def _quantized(kind: str) -> Case:
    import vector_quantize_pytorch

    name, options = VQ[kind]

    class Coded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(32, 32), nn.Linear(32, 32)
            self.code = getattr(vector_quantize_pytorch, name)(**options)

        def forward(self, x: Tensor) -> Tensor:
            found = self.code(self.encode(x))
            more = of_all(found[2:]) if len(found) > 2 else 0.0
            return F.mse_loss(self.decode(found[0]), x) + more

    return Case(Coded(), (sequence(8),), _own)


def _flow(kind: str) -> Case:
    from nflows.distributions.normal import StandardNormal
    from nflows.flows.base import Flow
    from nflows.nn.nets import ResidualNet
    from nflows.transforms.autoregressive import (
        MaskedAffineAutoregressiveTransform,
        MaskedPiecewiseRationalQuadraticAutoregressiveTransform,
    )
    from nflows.transforms.base import CompositeTransform
    from nflows.transforms.coupling import AffineCouplingTransform
    from nflows.transforms.permutations import ReversePermutation

    def one() -> nn.Module:
        if kind == "maf":
            return MaskedAffineAutoregressiveTransform(features=4, hidden_features=16)
        if kind == "spline":
            return MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
                features=4, hidden_features=16, num_bins=4, tails="linear", tail_bound=3.0
            )
        return AffineCouplingTransform(torch.tensor([1, 0, 1, 0]), lambda i, o: ResidualNet(i, o, hidden_features=16))

    parts = [part for _ in range(2) for part in (ReversePermutation(features=4), one())]
    return Case(Flow(CompositeTransform(parts), StandardNormal([4])), (torch.randn(ROWS, 4),), _likelihood)


def _likelihood(model: Any, x: Tensor) -> Tensor:
    return -model.log_prob(x).mean()


def _normflow(kind: str) -> Case:
    import normflows as nf

    flows: list[nn.Module] = []
    for _ in range(2):
        if kind == "real_nvp":
            flows += [
                nf.flows.AffineCouplingBlock(nf.nets.MLP([2, 16, 4], init_zeros=False)),
                nf.flows.Permute(4, mode="swap"),
            ]
        elif kind == "planar":
            flows += [nf.flows.Planar((4,))]
        elif kind == "spline":
            flows += [nf.flows.CoupledRationalQuadraticSpline(4, 1, 16), nf.flows.LULinearPermute(4)]
        else:
            flows += [nf.flows.MaskedAffineAutoregressive(4, 16, num_blocks=1), nf.flows.ActNorm(4)]
    model = nf.NormalizingFlow(nf.distributions.base.DiagGaussian(4), flows)
    return Case(model, (torch.randn(ROWS, 4),), _forward_kld if kind != "planar" else _reverse_kld)


def _forward_kld(model: Any, x: Tensor) -> Any:
    return model.forward_kld(x)


def _reverse_kld(model: Any, x: Tensor) -> Any:
    z, total = x, x.new_zeros(len(x))
    for flow in model.flows:
        z, logdet = flow(z)
        total = total + logdet
    return (z.square().sum(1) / 2 - total).mean()


def _vae() -> Case:
    """A variational autoencoder as PyTorch's examples have it, over torch.distributions."""
    from torch.distributions import Normal, kl_divergence

    class Vae(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = nn.Linear(32, 16), nn.Linear(8, 32)

        def forward(self, x: Tensor) -> Tensor:
            mean, scale = self.encode(x).chunk(2, -1)
            found = Normal(mean, F.softplus(scale) + 0.01)
            return F.mse_loss(self.decode(found.rsample()), x) + kl_divergence(found, Normal(0.0, 1.0)).mean()

    return Case(Vae(), (torch.randn(ROWS, 32),), _own)


TABLE: Table = {
    "diffusers": {
        **{kind: partial(_diffusers, kind) for kind in DIFFUSERS},
        **{
            f"training_{name}": partial(_noised, name)
            for name in ("DDPMScheduler", "DDIMScheduler", "EulerDiscreteScheduler")
        },
    },
    "denoising-diffusion-pytorch": {kind: partial(_denoising, kind) for kind in ("unet", "gaussian")},
    "vector-quantize-pytorch": {kind: partial(_quantized, kind) for kind in VQ},
    "nflows": {kind: partial(_flow, kind) for kind in ("maf", "spline", "coupling")},
    "normflows": {kind: partial(_normflow, kind) for kind in ("real_nvp", "planar", "spline", "maf")},
    "torch": {"vae": _vae},
}
