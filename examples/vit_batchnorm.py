"""Train a vision transformer with a stem of convolutions and BatchNorm, in micro-batches.

    torchrun --nproc-per-node 2 examples/vit_batchnorm.py

Gradient accumulation changes a model with BatchNorm: each norm sees a micro-batch of a rank. So does every loop that
accumulates, and `batch_statistics="microbatch"` says just that. At the end the same is done on one device, as an
ordinary loop over the same parts of the batch: losses and running statistics agree. (Leave `--microbatches` at 1 and
take `--statistics batch`, and the norms see the whole batch, on any mesh.)
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from show import beside, curve
from torch import Tensor, nn

import autopar

ROWS, SIDE, CLASSES, WIDTH = 64, 32, 4, 64


class ViT(nn.Module):
    """Convolutions to 8 x 8 patches ("early convolutions", arXiv 2106.14881), a transformer, a mean over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, WIDTH // 2, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(WIDTH // 2), nn.ReLU(),
            nn.Conv2d(WIDTH // 2, WIDTH, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(),
        )  # fmt: skip
        self.places = nn.Parameter(torch.zeros(1, (SIDE // 4) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        x_BTD = self.stem(image_BCHW).flatten(2).transpose(1, 2) + self.places
        return self.head(self.blocks(x_BTD).mean(1))


def loss_fn(model: nn.Module, image: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(model(image), label)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Squares, discs, crosses and stripes, somewhere in noise."""
    random = torch.Generator().manual_seed(step)
    label = torch.randint(CLASSES, (ROWS,), generator=random)
    centre = torch.randint(10, SIDE - 10, (2, ROWS, 1, 1), generator=random)
    y, x = torch.arange(SIDE)[:, None] - centre[0], torch.arange(SIDE) - centre[1]
    near = (x.abs() < 8) & (y.abs() < 8)
    square, disc, cross = near & (x.abs() < 6) & (y.abs() < 6), x**2 + y**2 < 48, near & ((x.abs() < 2) | (y.abs() < 2))
    drawn = torch.stack((square, disc, cross, near & (y % 4 < 2)), 1)[torch.arange(ROWS), label].double()
    return (drawn + 0.5 * torch.randn(drawn.shape, generator=random, dtype=torch.float64))[:, None], label


def make() -> ViT:
    torch.manual_seed(0)
    return ViT().double()  # so that rounding does not grow over the steps, and all digits can be compared


def accumulated(steps: int, data_ranks: int, microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses and the buffers of a loop of plain PyTorch. Each data rank has a part of the batch, and runs its
    micro-batches one after another. Its running statistics begin where all ranks' stood, and end in their mean."""
    model, losses = make(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        before = {name: value.clone() for name, value in model.named_buffers()}
        total, after = 0.0, []
        for rows in zip(*(each.chunk(data_ranks) for each in batch(step)), strict=True):
            model.load_state_dict(before, strict=False)
            for image, label in zip(*(each.chunk(microbatches) for each in rows), strict=True):
                loss = loss_fn(model, image, label) / (data_ranks * microbatches)
                loss.backward()
                total += loss.item()
            after.append({name: value.clone() for name, value in model.named_buffers()})
        mean = {name: sum(each[name] for each in after) / data_ranks for name in before}
        model.load_state_dict(mean, strict=False)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, dict(model.named_buffers())


def accuracy(model: nn.Module, steps: range) -> float:
    """The share of images that are named right, in evaluation mode; alike on every rank."""
    model.eval()
    with torch.no_grad():
        hits = [(model(image).argmax(-1) == label).float().mean().item() for image, label in map(batch, steps)]
    model.train()
    return sum(hits) / len(hits)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dp", type=int, default=2, help="ranks that split the batch")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--statistics", choices=("batch", "microbatch"), default="microbatch")
    args = parser.parse_args(arguments)
    model = autopar.parallelize(
        make(), f"dp={args.dp}", loss_fn=loss_fn, microbatches=args.microbatches, batch_statistics=args.statistics
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(args.steps):
        losses.append(model.forward_backward(*batch(step)).item())
        optimizer.step()
        optimizer.zero_grad()
    right, buffers = accuracy(model, range(1000, 1004)), model.full_state_dict()
    if buffers:  # on rank 0
        print(curve(losses, "loss"))
        print(f"{right:.0%} of new images are named right")
        parts = (args.dp, args.microbatches) if args.statistics == "microbatch" else (1, 1)
        alone, wanted = accumulated(args.steps, *parts)
        print(beside(losses, alone))
        worst = max((buffers[name] - value).abs().max().item() for name, value in wanted.items())
        print(f"running statistics of the norms: largest difference {worst:.0e}")
    return losses


if __name__ == "__main__":
    main()
